"""One value that somebody gave: where it came from, and what it was called there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from supertuner.config.sources.key_path import Place, show
from supertuner.core.errors import Problem
from supertuner.core.events import Warned
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class Source:
    """A file, the environment, a --set, or code."""

    name: str
    """`run.json`, `--set train.batch_size=4`, `environment: ACCELERATE_MIXED_PRECISION`, `code`."""
    folder: Path
    """What relative paths are relative to."""
    is_file: bool = True
    is_text: bool = False
    """Values come as text and are read as what the setting takes."""


@dataclass(frozen=True, slots=True)
class Given:
    value: JSON
    source: Source
    written: str
    """The name that was written, with its path inside the source."""
    dialect: str = ""
    weak: bool = False
    """A consequence of another key, which gives way to the same setting given by name."""
    was_relative: bool = False
    """A path that was made absolute."""

    def origin(self) -> str:
        """`run.json: train_batch_size (SimpleTuner)`."""
        if not self.source.is_file or not self.dialect:
            return self.source.name + (f" ({self.dialect})" if self.dialect else "")
        return f"{self.source.name}: {self.written} ({self.dialect})"

    def hint(self) -> str:
        """What an error adds so that the user finds the line; nothing where the place says it all."""
        if not self.source.is_file:
            return f"from {self.source.name}"
        return f"written as {self.written} in {self.source.name}" if self.dialect else ""


@dataclass(slots=True)
class Layer:
    """What one source gave, by place."""

    given: dict[Place, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Warned] = field(default_factory=list)
    replaced: set[Place] = field(default_factory=set)
    """Lists that this layer gives as a whole: what lower layers said of them is gone."""
    attachments: dict[str, bytes] = field(default_factory=dict)
    """Further files that were read on behalf of this one."""


def merged(layers: list[Layer]) -> dict[Place, Given]:
    """One value per place: a later layer wins."""
    result: dict[Place, Given] = {}
    for layer in layers:
        for whole in layer.replaced:
            for where in [w for w in result if w[: len(whole)] == whole]:
                del result[where]
        result |= layer.given
    return result


def assemble(given: Mapping[Place, Given]) -> tuple[dict[str, JSON], dict[Place, Problem]]:
    """The tree of values, and the list positions that do not exist."""
    tree: dict[str, JSON] = {}
    problems = {}
    for where in sorted(given, key=lambda w: (len(w), [(isinstance(s, str), s) for s in w])):
        refusal = _set(tree, where, given[where].value)
        if refusal:
            problems[where] = Problem(show(where), f"{refusal} (from {given[where].source.name})")
    return tree, problems


def _set(tree: dict[str, JSON], where: Place, value: JSON) -> str:
    """Put the value at its place; the reason if there is no such place."""
    node: dict[str, JSON] | list[JSON] = tree
    for step, following in pairwise(where):
        fresh: dict[str, JSON] | list[JSON] = [] if isinstance(following, int) else {}
        if isinstance(step, str):
            assert isinstance(node, dict)
            inner = node.setdefault(step, fresh)
            if isinstance(following, int) and not isinstance(inner, list):
                inner = node[step] = [inner]  # `resolution: 512` and then `resolution[1]=768`
        else:
            assert isinstance(node, list)
            if step > len(node):
                return _no_position(len(node))
            if step == len(node):
                node.append(fresh)
            inner = node[step]
        assert isinstance(inner, dict | list)
        node = inner
    last = where[-1]
    if isinstance(last, str):
        assert isinstance(node, dict)
        node[last] = _copied(value)
        return ""
    assert isinstance(node, list)
    if last > len(node):
        return _no_position(len(node))
    node[last:] = [_copied(value), *node[last + 1 :]]
    return ""


def _no_position(length: int) -> str:
    return f"there is no such entry; the list has {length}, so the next one is [{length}]"


def _copied(value: JSON) -> JSON:
    """Containers are filled in place while the tree grows; the caller's own stay as they are."""
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return dict(value) if isinstance(value, dict) else value
