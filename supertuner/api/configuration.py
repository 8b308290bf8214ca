"""Loads a configuration for the functions of the API, and writes it as a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from supertuner.config.sources.load import LoadedConfig
from supertuner.config.sources.load import load_config as load_checked_config
from supertuner.config.sources.render import canonical_tree, render_tree
from supertuner.core.types import JSON


def load_config(
    source: str | os.PathLike[str] | Mapping[str, JSON] | None = None, *, overrides: Mapping[str, JSON] | None = None
) -> LoadedConfig:
    """Load and check a configuration.

    Environment variables, `source` and `overrides` are combined; later ones win. Datasets and models may be missing on
    this machine: `estimate` and `plan` do not need them, and `train` and `data.open` raise ConfigError for them.

    Args:
        source: A JSON, YAML or TOML file; a mapping with the keys of such a file; or None for the defaults.
        overrides: Path of a setting, such as `train.batch_size` or `datasets[0].repeats` → its value.

    Returns:
        The configuration: `.config` has the settings, `.origins` where each one comes from, `.notes` warnings.

    Raises:
        ConfigError: The configuration is not valid; the error lists every problem.
    """
    settings = source if source is None or isinstance(source, Mapping) else Path(source)
    return load_checked_config(settings, overrides=overrides, check_paths=False)


def render_config(
    config: LoadedConfig, language: Literal["json", "yaml", "toml"], *, folder: str | os.PathLike[str] = "."
) -> str:
    """A configuration as the text of a file, under SuperTuner's own names.

    It contains what the sources of the configuration set, not the defaults. Paths are relative to `folder`.

    Args:
        config: The configuration, from `load_config`; it may come from SimpleTuner or ai-toolkit.
        language: The format of the text.
        folder: The folder that the file will be in.
    """
    return render_tree(canonical_tree(config.provenance, Path(folder).absolute()), language)
