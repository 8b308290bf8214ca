"""Imports model families by their names in the table `config.families`."""

from __future__ import annotations

import logging
from importlib import import_module

from supertuner.config.families import FAMILIES
from supertuner.core.errors import ModelError
from supertuner.models.spec import Family


def load_family(name: str | None) -> Family:
    """The family with this name. Imports its libraries. Raises ModelError with the known names if there is none."""
    if name is None or name not in FAMILIES:
        value = "not set" if name is None else repr(name)
        raise ModelError(f"model.family is {value}; set it to one of {', '.join(FAMILIES)}")
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # on import, the libraries log which of their optional dependencies are missing
    try:
        loaded = import_module(f"{FAMILIES[name].package}.family").FAMILY
    finally:
        logging.disable(disabled_level)
    assert isinstance(loaded, Family)
    return loaded
