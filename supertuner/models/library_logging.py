"""The model libraries without their own bars and remarks, for as long as we call them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import diffusers
import transformers


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """What matters of it is checked by the caller, and told by us; afterwards everything is as it was."""
    verbosities = diffusers.logging.get_verbosity(), transformers.logging.get_verbosity()
    bars_enabled = transformers.logging.is_progress_bar_enabled()
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers.logging.set_verbosity(verbosities[0])
        transformers.logging.set_verbosity(verbosities[1])
        if bars_enabled:
            transformers.logging.enable_progress_bar()
