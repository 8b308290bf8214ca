"""Environment, file, --set and code become one checked RunConfig, or one ConfigError with every problem found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from supertuner.config.sources import problems
from supertuner.config.sources import resolve
from supertuner.config.sources.translate import SourceTranslator, iter_settings
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources import environment
from supertuner.config.settings import key_paths
from supertuner.config.sources import overrides as sets
from supertuner.config.settings.key_paths import KeyPath
from supertuner.config.sources.parse import parse_bytes, read_bytes
from supertuner.config.sources.provenance import ConfigLayer, ConfigSource, Provenance, build_tree, merge_layers
from supertuner.core.errors import ConfigError, ConfigProblem
from supertuner.core.events import WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration and everything that is known about where it came from."""

    config: RunConfig
    file_content: bytes
    """The file as it was; empty without one."""
    source_name: str
    """Name of the file, or what stands in for it."""
    origins: dict[str, str]
    """Where each value that is not a default came from, by its path: `run.json: train_batch_size (SimpleTuner)`."""
    notes: tuple[WarningEvent, ...]
    """What is unwise, was changed, or has no effect."""
    provenance: Mapping[KeyPath, Provenance] = field(default_factory=dict)
    """What was given, by place, before this machine changed anything."""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Further files that the configuration named and that were read as part of it."""

    def to_dict(self) -> dict[str, JSON]:
        """The configuration in force, with origins and notes, as JSON for the run folder."""
        notes = [{"what": note.what, "message": note.message} for note in self.notes]
        config = self.config.model_dump(mode="json")
        return {"source": self.source_name, "config": config, "origins": dict(self.origins), "notes": notes}

    def iter_settings(self) -> Iterator[tuple[str, JSON, str]]:
        """Every setting: its path, its value, and where it came from."""
        for key_path, value in iter_settings(self.config.model_dump(mode="json")):
            path = key_paths.format_path(key_path)
            yield path, value, self.origins.get(path, "default")


def load_config(
    path: Path | None,
    *,
    sets: Sequence[str] = (),
    overrides: Mapping[str, JSON] | None = None,
    environ: Mapping[str, str] | None = None,
    check_paths: bool = True,
    host: HostFacts | None = None,
) -> LoadedConfig:
    """Read and check a configuration. Order: environment < file < `sets` < `overrides`.

    Relative paths are relative to the file that holds them; those of the other sources, to the working folder.
    `check_paths=False` accepts datasets that are not on this machine.
    """
    content = b"" if path is None else read_bytes(path)
    source = "the settings given" if path is None else path.name
    layers = list(_collect_layers(path, content, sets, overrides or {}, environ))
    written_values = merge_layers(layers)
    resolved_values = resolve.resolve_paths(written_values)
    config, found_problems = _validate(resolved_values)
    found_problems = [*(p for layer in layers for p in layer.problems), *found_problems]
    if check_paths:
        found_problems += resolve.missing_paths(written_values, resolved_values)
    if found_problems or config is None:
        raise ConfigError(source, list(dict.fromkeys(found_problems)))
    config, host_warnings, changed = resolve.resolve_for_host(config, host or HostFacts())
    notes = [
        *(n for layer in layers for n in layer.warnings),
        *host_warnings,
        *resolve.settings_warnings(config),
    ]
    origins = {
        key_paths.format_path(key_path): provenance.origin_text()
        for key_path, provenance in resolved_values.items()
        if key_paths.setting_at(key_path)
    }
    for where, change in changed.items():
        origins[key_paths.format_path(where)] = f"{origins.get(key_paths.format_path(where), 'default')} ({change})"
    attachments = {name: data for layer in layers for name, data in layer.attachments.items()}
    return LoadedConfig(config, content, source, origins, tuple(dict.fromkeys(notes)), resolved_values, attachments)


def _collect_layers(
    path: Path | None,
    content: bytes,
    set_texts: Sequence[str],
    overrides: Mapping[str, JSON],
    environ: Mapping[str, str] | None,
) -> Iterator[ConfigLayer]:
    working_folder = Path.cwd()
    yield from environment.environment_layers(
        environment.current_environment() if environ is None else environ, working_folder
    )
    if path is not None:
        yield _file_layer(path.absolute(), content)
    for text in set_texts:
        yield sets.layer_from_set(text, working_folder)
    for name, value in overrides.items():
        yield sets.layer_from_code(name, value, working_folder)


def _file_layer(path: Path, content: bytes) -> ConfigLayer:
    tree = parse_bytes(content, path.name)
    if not isinstance(tree, Mapping):
        hint = "; SimpleTuner's file of datasets is named by data_backend_config" if isinstance(tree, list) else ""
        return ConfigLayer(problems=[ConfigProblem("", f"the file holds no settings at its top{hint}")])
    return SourceTranslator(ConfigSource(path.name, path.parent)).translate_file(tree)


def _validate(values: Mapping[KeyPath, Provenance]) -> tuple[RunConfig | None, list[ConfigProblem]]:
    """The configuration, or all that is wrong with it.

    A wrong value hides contradictions between the others, so wrong ones are taken out and the rest is looked at again.
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
        rejected_paths = _overlapping_paths(remaining, list(new_problems)) or _overlapping_paths(
            remaining, [bad_path[:-1] for bad_path in new_problems if len(bad_path) > 1]
        )
        if not rejected_paths:
            break
        for where in rejected_paths:
            del remaining[where]
    return None, list(problems_by_path.values())


def _overlapping_paths(values: Mapping[KeyPath, Provenance], bad_paths: Sequence[KeyPath]) -> list[KeyPath]:
    """What was given at these places. A setting that is missing has none: then its block is asked for."""
    return [
        key_path
        for key_path, provenance in values.items()
        if provenance.value != {} and any(_paths_overlap(key_path, bad_path) for bad_path in bad_paths)
    ]


def _paths_overlap(a: KeyPath, b: KeyPath) -> bool:
    """One place lies at or inside the other."""
    return a[: len(b)] == b or b[: len(a)] == a
