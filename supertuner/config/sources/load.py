"""Environment, file, --set and code become one checked RunConfig, or one ConfigError with every problem found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from supertuner.config import problems, resolve
from supertuner.config.dialects.translate import Translation, leaves
from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources import environment
from supertuner.config.sources import key_path as place
from supertuner.config.sources import overrides as sets
from supertuner.config.sources.key_path import Place
from supertuner.config.sources.parse import parse_bytes, read_bytes
from supertuner.config.sources.provenance import Given, Layer, Source, assemble, merged
from supertuner.core.errors import ConfigError, Problem
from supertuner.core.events import Warned
from supertuner.core.host import Host
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and everything that is known about where it came from."""

    config: RunConfig
    given: bytes
    """The file as it was; empty without one."""
    source: str
    """Name of the file, or what stands in for it."""
    origins: dict[str, str]
    """Where each value that is not a default came from, by its path: `run.json: train_batch_size (SimpleTuner)`."""
    notes: tuple[Warned, ...]
    """What is unwise, was changed, or has no effect."""
    values: Mapping[Place, Given] = field(default_factory=dict)
    """What was given, by place, before this machine changed anything."""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Further files that the configuration named and that were read as part of it."""

    def resolved(self) -> dict[str, JSON]:
        """The configuration in force, with origins and notes, as JSON for the run folder."""
        notes = [{"what": note.what, "message": note.message} for note in self.notes]
        config = self.config.model_dump(mode="json")
        return {"source": self.source, "config": config, "origins": dict(self.origins), "notes": notes}

    def leaves(self) -> Iterator[tuple[str, JSON, str]]:
        """Every setting: its path, its value, and where it came from."""
        for where, value in leaves(self.config.model_dump(mode="json")):
            path = place.show(where)
            yield path, value, self.origins.get(path, "default")


def load(
    path: Path | None,
    *,
    sets: Sequence[str] = (),
    overrides: Mapping[str, JSON] | None = None,
    environ: Mapping[str, str] | None = None,
    check_paths: bool = True,
    host: Host | None = None,
) -> Loaded:
    """Read and check a configuration. Order: environment < file < `sets` < `overrides`.

    Relative paths are relative to the file that holds them; those of the other sources, to the working folder.
    `check_paths=False` accepts datasets that are not on this machine.
    """
    content = b"" if path is None else read_bytes(path)
    source = "the settings given" if path is None else path.name
    layers = list(_layers(path, content, sets, overrides or {}, environ))
    written = merged(layers)
    found = resolve.absolute(written)
    config, wrong = _validated(found)
    wrong = [*(p for layer in layers for p in layer.problems), *wrong]
    if check_paths:
        wrong += resolve.missing_paths(written, found)
    if wrong or config is None:
        raise ConfigError(source, list(dict.fromkeys(wrong)))
    config, lowered, changed = resolve.resolved(config, host or Host())
    notes = [*(n for layer in layers for n in layer.notes), *lowered, *resolve.doubts(config), *resolve.pending(found)]
    origins = {place.show(where): one.origin() for where, one in found.items() if place.key_at(where)}
    for where, how in changed.items():
        origins[place.show(where)] = f"{origins.get(place.show(where), 'default')} ({how})"
    attachments = {name: data for layer in layers for name, data in layer.attachments.items()}
    return Loaded(config, content, source, origins, tuple(dict.fromkeys(notes)), found, attachments)


def _layers(
    path: Path | None,
    content: bytes,
    texts: Sequence[str],
    overrides: Mapping[str, JSON],
    environ: Mapping[str, str] | None,
) -> Iterator[Layer]:
    here = Path.cwd()
    yield from environment.layers(environment.current() if environ is None else environ, here)
    if path is not None:
        yield _file_layer(path.absolute(), content)
    for text in texts:
        yield sets.from_set(text, here)
    for name, value in overrides.items():
        yield sets.from_code(name, value, here)


def _file_layer(path: Path, content: bytes) -> Layer:
    tree = parse_bytes(content, path.name)
    if not isinstance(tree, Mapping):
        hint = "; SimpleTuner's file of datasets is named by data_backend_config" if isinstance(tree, list) else ""
        return Layer(problems=[Problem("", f"the file holds no settings at its top{hint}")])
    return Translation(Source(path.name, path.parent)).root(tree)


def _validated(given: Mapping[Place, Given]) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration, or all that is wrong with it.

    A wrong value hides contradictions between the others, so wrong ones are taken out and the rest is looked at again.
    """
    left = dict(given)
    hints = {where: one.hint() for where, one in given.items()}
    found: dict[Place, Problem] = {}
    for _ in range(len(given) + 2):
        tree, fresh = assemble(left)
        if not fresh:
            try:
                config = RunConfig.model_validate_json(json.dumps(tree), strict=True)
            except ValidationError as error:
                fresh = problems.from_pydantic(error, hints, set(found))
            else:
                return (None if found else config), list(found.values())
        found = {**fresh, **found}
        doomed = _inside(left, list(fresh)) or _inside(left, [bad[:-1] for bad in fresh if len(bad) > 1])
        if not doomed:
            break
        for where in doomed:
            del left[where]
    return None, list(found.values())


def _inside(given: Mapping[Place, Given], bad: Sequence[Place]) -> list[Place]:
    """What was given at these places. A setting that is missing has none: then its block is asked for."""
    return [where for where, one in given.items() if one.value != {} and any(_overlap(where, b) for b in bad)]


def _overlap(a: Place, b: Place) -> bool:
    """One place lies at or inside the other."""
    return a[: len(b)] == b or b[: len(a)] == a
