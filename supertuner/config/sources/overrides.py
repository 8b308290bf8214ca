"""`--set path=value` and calls from code: one value each, applied above the file in the order given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from supertuner.config.sources.translate import SourceTranslator
from supertuner.config.settings import key_paths
from supertuner.config.sources.parse import ConfigSyntaxError, check_plain_values
from supertuner.config.sources.provenance import ConfigLayer, ConfigSource
from supertuner.config.settings.values import parse_text
from supertuner.core.errors import ConfigProblem


def layer_from_set(text: str, folder: Path) -> ConfigLayer:
    """The layer of one `--set`. The value is JSON if it reads as JSON, else text."""
    path, equals, value = text.partition("=")
    key_path = key_paths.parse_path(path.strip())
    if not equals or key_path is None:
        form = "write path=value, for example train.batch_size=4 or datasets[0].type=disk"
        return ConfigLayer(problems=[ConfigProblem(f"--set {text}", f"not understood; {form}")])
    parsed = parse_text(value)
    structured = isinstance(parsed, list | dict)
    return _override_layer(
        ConfigSource(f"--set {text}", folder, False, not structured), key_path, parsed if structured else value
    )


def layer_from_code(path: str, value: Any, folder: Path) -> ConfigLayer:
    """The layer of one override given by code; the value counts as it is."""
    key_path = key_paths.parse_path(path)
    if key_path is None:
        return ConfigLayer(problems=[ConfigProblem(f"code: {path}", "not the path of a setting")])
    return _override_layer(ConfigSource("code", folder, False), key_path, _to_plain_json(value))


def _override_layer(source: ConfigSource, key_path: key_paths.KeyPath, value: Any) -> ConfigLayer:
    try:
        check_plain_values(value)
    except ConfigSyntaxError as error:
        return ConfigLayer(problems=[ConfigProblem(source.name, str(error))])
    return SourceTranslator(source).translate_value(key_path, value)


def _to_plain_json(value: Any) -> Any:
    """Code may give paths and tuples; files have text and lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _to_plain_json(inner) for name, inner in value.items()}
    return [_to_plain_json(inner) for inner in value] if isinstance(value, list | tuple) else value
