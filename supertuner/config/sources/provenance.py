"""Values of settings with their origin, collected in layers (one per source), merged, and built into a tree."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from supertuner.config.settings.key_paths import KeyPath, format_path
from supertuner.core.errors import ConfigProblem
from supertuner.core.events import WarningEvent
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A file, an environment variable, a `--set`, or code."""

    name: str
    """`run.json`, `--set train.batch_size=4`, `environment: ACCELERATE_MIXED_PRECISION`, `code`."""
    folder: Path
    """The folder from which relative paths are resolved."""
    is_file: bool = True
    is_text: bool = False
    """Its values are text, which is converted to the type of the setting."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """A value of a setting and its origin."""

    value: JSON
    source: ConfigSource
    source_key: str
    """The key in the source, with its path: `config.process[0].train.lr`."""
    dialect: str = ""
    """The program whose name for the setting was used; "" for our own."""
    is_implied: bool = False
    """It follows from another key of the same source, and counts only if that source does not give the setting
    itself."""
    was_relative: bool = False
    """It is a path that was relative in the source."""
    hub_name: str = ""
    """`hub:owner/name`, if it is the folder of a dataset in the hub's cache."""

    def origin_text(self) -> str:
        """`run.json: train_batch_size (SimpleTuner)`."""
        if not self.source.is_file or not self.dialect:
            return self.source.name + (f" ({self.dialect})" if self.dialect else "")
        return f"{self.source.name}: {self.source_key} ({self.dialect})"

    def error_hint(self) -> str:
        """A hint where the value is written, for error messages; "" if the path of the setting is enough."""
        if not self.source.is_file:
            return f"from {self.source.name}"
        return f"written as {self.source_key} in {self.source.name}" if self.dialect else ""


@dataclass(slots=True)
class ConfigLayer:
    """The values, problems and warnings of one source."""

    values: dict[KeyPath, Provenance] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    warnings: list[WarningEvent] = field(default_factory=list)
    replaced_lists: set[KeyPath] = field(default_factory=set)
    """Lists that this layer sets as a whole; entries of lower layers are dropped."""
    attachments: dict[str, bytes] = field(default_factory=dict)
    """The content of further files that the source refers to, by name."""
    key_order: dict[str, int] = field(default_factory=dict)
    """Keys as messages name them, and the settings that they set → their position in the source."""


def merge_layers(layers: list[ConfigLayer]) -> dict[KeyPath, Provenance]:
    """Merge layers; where several give a setting, the last one wins."""
    result: dict[KeyPath, Provenance] = {}
    for layer in layers:
        for list_path in layer.replaced_lists:
            for key_path in [w for w in result if w[: len(list_path)] == list_path]:
                del result[key_path]
        result |= layer.values
    return result


def build_tree(values: Mapping[KeyPath, Provenance]) -> tuple[dict[str, JSON], dict[KeyPath, ConfigProblem]]:
    """Build the tree of values. Returns it, and a problem for each list position that does not exist."""
    tree: dict[str, JSON] = {}
    problems = {}
    for key_path in sorted(values, key=lambda w: (len(w), [(isinstance(s, str), s) for s in w])):
        if refusal := _insert_value(tree, key_path, values[key_path].value):
            message = f"{refusal} (from {values[key_path].source.name})"
            problems[key_path] = ConfigProblem(format_path(key_path), message)
    return tree, problems


def _insert_value(tree: dict[str, JSON], key_path: KeyPath, value: JSON) -> str:
    """Insert the value at `key_path`. Returns "" or the reason why that is not possible."""
    node: dict[str, JSON] | list[JSON] = tree
    for step, following in pairwise(key_path):
        empty_container: dict[str, JSON] | list[JSON] = [] if isinstance(following, int) else {}
        if isinstance(step, str):
            assert isinstance(node, dict)
            inner = node.setdefault(step, empty_container)
            if isinstance(following, int) and not isinstance(inner, list):
                inner = node[step] = [inner]  # `resolution: 512` and then `resolution[1]=768`
        else:
            assert isinstance(node, list)
            if step > len(node):
                return _no_position_message(len(node))
            if step == len(node):
                node.append(empty_container)
            inner = node[step]
        assert isinstance(inner, dict | list)
        node = inner
    last = key_path[-1]
    if isinstance(last, str):
        assert isinstance(node, dict)
        node[last] = deepcopy(value)  # building the tree changes containers in place
        return ""
    assert isinstance(node, list)
    if last > len(node):
        return _no_position_message(len(node))
    node[last:] = [deepcopy(value), *node[last + 1 :]]
    return ""


def _no_position_message(length: int) -> str:
    return f"there is no such entry; the list has {length} entries, so the next one is [{length}]"
