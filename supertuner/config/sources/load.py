"""Loads a configuration: environment, file, `--set` and code become a RunConfig, or a ConfigError with all problems."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from supertuner.config.settings import key_paths
from supertuner.config.settings.key_paths import KeyPath
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.settings.values import parse_text
from supertuner.config.sources import adapt_to_host as resolve
from supertuner.config.sources import environment, problems
from supertuner.config.sources.parse import ConfigSyntaxError, check_plain_values, parse_bytes, read_bytes
from supertuner.config.sources.provenance import ConfigLayer, ConfigSource, Provenance, build_tree, merge_layers
from supertuner.config.sources.translate import SourceTranslator, iter_settings
from supertuner.core.errors import ConfigError, ConfigNote, ConfigProblem
from supertuner.core.events import WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON

MAPPING_NAME = "settings.json"
"""The file name under which a run stores a configuration that is a mapping."""
NO_FILE = "the settings given"
"""How messages name a configuration that is not a file."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, with the origin of its values."""

    config: RunConfig
    file_content: bytes
    """The bytes of the configuration file, or the mapping as JSON; empty if there is neither."""
    source_name: str
    """Name of the file; "the settings given" for a mapping and without either."""
    origins: dict[str, str]
    """Path of each setting that is not a default → its origin, `run.json: train_batch_size (SimpleTuner)`."""
    notes: tuple[WarningEvent, ...]
    """Settings that are unwise, were changed, or have no effect."""
    provenance: Mapping[KeyPath, Provenance] = field(default_factory=dict)
    """The values as the sources gave them, with absolute paths, before they were adapted to this machine."""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Further files that the configuration refers to, by name."""
    path_problems: tuple[ConfigProblem, ...] = ()
    """Datasets and models that are not on this machine; always empty if the paths were checked while loading."""

    @property
    def file_name(self) -> str:
        """The name of the file, or the one under which a run stores a mapping."""
        return MAPPING_NAME if self.source_name == NO_FILE and self.file_content else self.source_name

    def to_dict(self) -> dict[str, JSON]:
        """The effective settings, with origins and notes, as JSON."""
        notes = [{"what": note.what, "message": note.message} for note in self.notes]
        config = self.config.model_dump(mode="json")
        return {"source": self.source_name, "config": config, "origins": dict(self.origins), "notes": notes}

    def iter_settings(self) -> Iterator[tuple[str, JSON, str]]:
        """Every setting as (path, value, origin)."""
        for key_path, value in iter_settings(self.config.model_dump(mode="json")):
            path = key_paths.format_path(key_path)
            yield path, value, self.origins.get(path, "default")


def load_config(
    source: Path | Mapping[str, JSON] | None,
    *,
    sets: Sequence[str] = (),
    overrides: Mapping[str, JSON] | None = None,
    environ: Mapping[str, str] | None = None,
    check_paths: bool = True,
    host: HostFacts | None = None,
) -> LoadedConfig:
    """Load and check a configuration. Later sources win: environment, `source`, `overrides`, `sets` (`path=value`).

    `source` is a file, or a mapping with the keys that a file may have. Relative paths in a file are relative to the
    folder of that file; all others, to the working directory. `check_paths=False` accepts datasets and models that are
    not on this machine, and lists them in `path_problems`. Raises ConfigError with every problem.
    """
    name, content = _read_source(source)
    path = Path(MAPPING_NAME) if isinstance(source, Mapping) else source
    environ = environment.current_environment() if environ is None else environ
    layers = list(_collect_layers(path, name, content, sets, overrides or {}, environ))
    written_values = merge_layers(layers)
    resolved_values = resolve.resolve_paths(written_values, environ)
    config, found_problems = _validate(resolved_values)
    found_problems = [problem for layer in layers for problem in layer.problems] + found_problems
    path_problems = tuple(dict.fromkeys(resolve.missing_paths(written_values, resolved_values)))
    if check_paths:
        found_problems, path_problems = [*found_problems, *path_problems], ()
    layer_warnings = [warning for layer in layers for warning in layer.warnings]
    if found_problems or config is None:
        raise ConfigError(name, _in_source_order(found_problems, layer_warnings, layers))
    config, host_warnings, changes = resolve.resolve_for_host(config, host or HostFacts())
    notes = dict.fromkeys([*layer_warnings, *host_warnings, *resolve.settings_warnings(config)])
    settings = [key_path for key_path in resolved_values if key_paths.setting_at(key_path)]
    origins = {key_paths.format_path(key_path): resolved_values[key_path].origin_text() for key_path in settings}
    for key_path, change in changes.items():
        setting = key_paths.format_path(key_path)
        origins[setting] = f"{origins.get(setting, 'default')} ({change})"
    attachments = {file: data for layer in layers for file, data in layer.attachments.items()}
    return LoadedConfig(config, content, name, origins, tuple(notes), resolved_values, attachments, path_problems)


def group_notes(warnings: Sequence[WarningEvent]) -> list[ConfigNote]:
    """The warnings as notes; keys with the same message share one, at the place of the first."""
    by_message: dict[str, list[str]] = {}
    for warning in warnings:
        by_message.setdefault(warning.message, []).append(warning.what)
    return [ConfigNote(", ".join(dict.fromkeys(keys)), message) for message, keys in by_message.items()]


def _in_source_order(
    problems_found: Sequence[ConfigProblem], warnings: Sequence[WarningEvent], layers: Sequence[ConfigLayer]
) -> list[ConfigProblem | ConfigNote]:
    """Problems and notes together, in the order of their keys in the sources. Messages about the file as a whole come
    first, those about keys that no source has come last."""
    positions: dict[str, int] = {"": -1}
    for layer in layers:
        offset = len(positions)
        for key, position in layer.key_order.items():
            positions.setdefault(key, offset + position)
    findings: list[ConfigProblem | ConfigNote] = [
        *dict.fromkeys(problems_found),
        *group_notes(list(dict.fromkeys(warnings))),
    ]
    return sorted(findings, key=lambda finding: positions.get(finding.path.partition(", ")[0], len(positions) << 1))


def _read_source(source: Path | Mapping[str, JSON] | None) -> tuple[str, bytes]:
    """The name and the content of a source. Raises ConfigError if a file cannot be read, or a mapping is not JSON."""
    if source is None:
        return NO_FILE, b""
    if isinstance(source, Path):
        return source.name, read_bytes(source)
    plain = _to_plain_json(source)
    try:
        check_plain_values(plain)
    except ConfigSyntaxError as error:
        raise ConfigError(NO_FILE, [ConfigProblem(error.path, str(error))]) from None
    return NO_FILE, json.dumps(plain, indent=2, ensure_ascii=False).encode()


def _collect_layers(
    path: Path | None,
    name: str,
    content: bytes,
    sets: Sequence[str],
    overrides: Mapping[str, JSON],
    environ: Mapping[str, str],
) -> Iterator[ConfigLayer]:
    working_folder = Path.cwd()
    yield from environment.environment_layers(environ, working_folder)
    if path is not None:
        yield _file_layer(path.absolute(), content, name)
    for setting, value in overrides.items():
        yield _code_layer(setting, value, working_folder)
    for text in sets:
        yield _set_layer(text, working_folder)


def _file_layer(path: Path, content: bytes, name: str) -> ConfigLayer:
    tree = parse_bytes(content, path.name)
    if not isinstance(tree, Mapping):
        hint = "; data_backend_config names SimpleTuner's file of datasets" if isinstance(tree, list) else ""
        return ConfigLayer(problems=[ConfigProblem("", f"the file does not hold a block of settings{hint}")])
    return SourceTranslator(ConfigSource(name, path.parent)).translate_file(tree)


def _set_layer(text: str, folder: Path) -> ConfigLayer:
    """The layer of one `--set`. A JSON list or object is read as such; any other value is text, which is converted to
    the type of the setting."""
    path, equals, value = text.partition("=")
    key_path = key_paths.parse_path(path.strip())
    if not equals or key_path is None:
        form = "write path=value, for example train.batch_size=4 or datasets[0].type=disk"
        return ConfigLayer(problems=[ConfigProblem(f"--set {text}", f"is not path=value; {form}")])
    parsed = parse_text(value)
    structured = isinstance(parsed, list | dict)
    source = ConfigSource(f"--set {text}", folder, is_file=False, is_text=not structured)
    return _override_layer(source, key_path, parsed if structured else value)


def _code_layer(path: str, value: Any, folder: Path) -> ConfigLayer:
    """The layer of one override from code. The value keeps its type."""
    key_path = key_paths.parse_path(path)
    if key_path is None:
        return ConfigLayer(problems=[ConfigProblem(f"code: {path}", "is not the path of a setting")])
    return _override_layer(ConfigSource("code", folder, is_file=False), key_path, _to_plain_json(value))


def _override_layer(source: ConfigSource, key_path: KeyPath, value: Any) -> ConfigLayer:
    try:
        check_plain_values(value)
    except ConfigSyntaxError as error:
        return ConfigLayer(problems=[ConfigProblem(source.name, str(error))])
    return SourceTranslator(source).translate_value(key_path, value)


def _to_plain_json(value: Any) -> Any:
    """`value` with paths as text and tuples as lists, as files hold them."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _to_plain_json(inner) for name, inner in value.items()}
    return [_to_plain_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _validate(values: Mapping[KeyPath, Provenance]) -> tuple[RunConfig | None, list[ConfigProblem]]:
    """The configuration, or None and every problem.

    Pydantic does not check contradictions between settings while one of them is invalid. So invalid values are removed
    and the rest is validated again, until no new problem appears.
    """
    remaining = dict(values)
    hints = {key_path: provenance.error_hint() for key_path, provenance in values.items()}
    problems_by_path: dict[KeyPath, ConfigProblem] = {}
    for _ in range(len(values) + 2):
        tree, new_problems = build_tree(remaining)
        if not new_problems:
            try:
                config = RunConfig.model_validate_json(json.dumps(tree), strict=True)
            except ValidationError as error:
                new_problems = problems.problems_from_pydantic(error, hints, set(problems_by_path))
            else:
                return (None if problems_by_path else config), list(problems_by_path.values())
        problems_by_path = {**new_problems, **problems_by_path}
        parents = [bad_path[:-1] for bad_path in new_problems if len(bad_path) > 1]
        rejected_paths = _overlapping_paths(remaining, new_problems) or _overlapping_paths(remaining, parents)
        if not rejected_paths:
            break
        for key_path in rejected_paths:
            del remaining[key_path]
    return None, list(problems_by_path.values())


def _overlapping_paths(values: Mapping[KeyPath, Provenance], bad_paths: Collection[KeyPath]) -> list[KeyPath]:
    """The paths of the values at, above or below `bad_paths`; none if the problem is that a setting is missing."""
    paths = [path for path, provenance in values.items() if provenance.value != {}]
    return [path for path in paths if any(path[: len(bad)] == bad[: len(path)] for bad in bad_paths)]
