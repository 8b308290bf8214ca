"""Translates a parsed source, with our keys or a dialect's, into values by key path; unknown keys become problems."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from supertuner.config.dialects import conversions
from supertuner.config.dialects import lycoris as lycoris_dialect
from supertuner.config.dialects.ai_toolkit_other_keys import OTHER_TRAINING
from supertuner.config.dialects.dialect_keys import AI_TOOLKIT, SIMPLETUNER, DialectKey
from supertuner.config.dialects.host_defaults import differing_defaults
from supertuner.config.dialects.key_tables import (
    DATASET_LIST_KEYS,
    JOB_ADAPTER,
    dataset_keys,
    detect_dialect,
    inherited_keys,
    run_keys,
)
from supertuner.config.dialects.other_programs import detect_other_program
from supertuner.config.settings import key_paths
from supertuner.config.settings.key_paths import KeyPath, format_path
from supertuner.config.settings.values import coerce_text, format_value, parse_text
from supertuner.config.sources.parse import parse_bytes, read_bytes
from supertuner.config.sources.problems import not_a_block_message, unknown_key_message
from supertuner.config.sources.provenance import ConfigLayer, ConfigSource, Provenance
from supertuner.core.errors import ConfigError, ConfigProblem
from supertuner.core.events import WarningEvent
from supertuner.core.types import JSON

CACHE_DATASET_TYPES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
CONDITIONING_REFUSAL = (
    '"conditioning" is not a dataset type; remove this entry, and in the dataset that it belongs to set '
    "conditioning_dir (reference images) or mask_dir (masks), with files named like the samples"
)


Block: TypeAlias = Mapping[str, JSON]


class SourceTranslator:
    """Fills one ConfigLayer from one source. An instance is used once."""

    def __init__(self, source: ConfigSource) -> None:
        self.layer = ConfigLayer()
        self._source = self._main_source = source
        self._dataset_count = 0

    def translate_file(self, tree: Block) -> ConfigLayer:
        """Translate a whole file."""
        self._record_order(tree)
        if program := detect_other_program(tree):
            self._add_problem("", program.message)
            return self.layer
        rest, prefix, dialect = self._unwrap_job(tree)
        rest.pop("$schema", None)  # for editors
        dataset_lists = {name: rest.pop(name) for name in DATASET_LIST_KEYS if name in rest}
        inherited_values = {name: rest.pop(name) for name in list(rest) if name.removeprefix("--") in inherited_keys()}
        lycoris_files = {name: rest[name] for name in _LYCORIS_KEYS if rest.get(name)}
        self._translate_block(rest, (), run_keys(), "", prefix)
        for source_key, value in lycoris_files.items():
            self._translate_lycoris_file(value, prefix + source_key, rest)
        if dialect == AI_TOOLKIT and "model" in rest and not {"network", "adapter"} & rest.keys():
            self._put_value(("adapter", "type"), "full", f"{prefix}network", AI_TOOLKIT, implied=True)
            self._add_warning(f"{prefix}network", 'is missing, so all weights are trained: adapter.type "full"')
        self._translate_dataset_lists(dataset_lists, prefix, dialect)
        self._apply_inherited_values(inherited_values, prefix)
        if dialect == AI_TOOLKIT or {"model_family", "--model_family"} & rest.keys():
            self._note_other_defaults(dialect or SIMPLETUNER)
        return self.layer

    def _note_other_defaults(self, dialect: str) -> None:
        """Add a note about defaults of another program that differ from ours and that the file leaves out."""
        settings = {format_path(path): provenance.value for path, provenance in self.layer.values.items()}
        if message := differing_defaults(dialect, settings):
            self._add_warning("defaults", message)

    def translate_value(self, key_path: KeyPath, value: JSON) -> ConfigLayer:
        """Translate one value at a path, from --set or code."""
        if key_path[0] == "datasets" and len(key_path) > 1 and isinstance(key_path[1], int):
            if len(key_path) > 2:
                self._translate_dataset_value(key_path, value)
            else:
                self._translate_dataset_entry(value, key_path[1], format_path(key_path), "")
        elif all(isinstance(step, str) for step in key_path):
            return self.translate_file(_nested_mapping(key_path, value))
        elif key_paths.pattern(key_path[:-1] if isinstance(key_path[-1], int) else key_path) in key_paths.settings():
            self._put_value(key_path, value, format_path(key_path), "")
        else:
            self._add_problem(format_path(key_path), "not a setting")
        return self.layer

    def _translate_dataset_value(self, key_path: KeyPath, value: JSON) -> None:
        if isinstance(key_path[-1], int) and key_paths.settings().get(key_paths.pattern(key_path[:-1])) is not None:
            self._put_value(key_path, value, format_path(key_path), "")
        elif any(isinstance(step, int) for step in key_path[2:]):
            self._add_problem(format_path(key_path), "not a setting")
        else:
            block, dataset_path = _nested_mapping(key_path[2:], value), key_path[:2]
            self._translate_block(block, dataset_path, dataset_keys(""), "", f"{format_path(dataset_path)}.")

    def _unwrap_job(self, tree: Block) -> tuple[dict[str, JSON], str, str]:
        """The settings of a job of ai-toolkit (`config.process[0]`) or of SimpleTuner's web interface (`config`).

        Returns (settings, prefix of their keys, dialect); for other files the tree itself.
        """
        if "config" not in tree:
            return dict(tree), "", ""
        job = tree["config"]
        rest = {name: value for name, value in tree.items() if name != "config"}
        job_settings = dict(job) if isinstance(job, Mapping) else {}
        if isinstance(tree.get("_metadata"), Mapping):
            return job_settings, "config.", ""
        process = job_settings.pop("process", None)
        if isinstance(process, list) and len(process) == 1 and isinstance(process[0], Mapping):
            self._translate_block(rest, (), run_keys(), "", "")
            self._translate_block(job_settings, (), run_keys(), "", "config.")
            settings, prefix = dict(process[0]), "config.process[0]."
            if settings.pop(JOB_ADAPTER, None):
                self._add_problem(prefix + JOB_ADAPTER, f"ai-toolkit's adapter block {OTHER_TRAINING}")
            return settings, prefix, AI_TOOLKIT
        shape = "a block with a list `process` of one block"
        self._add_problem("config", f"{format_value(job)} is not a job of ai-toolkit: {shape}")
        return rest, "", ""

    def _translate_block(
        self, tree: Block, block_path: KeyPath, dialect_keys: Mapping[str, DialectKey], dialect_path: str, prefix: str
    ) -> None:
        """Translate a block: `block_path` is its path in our tree, `dialect_path` its path in `dialect_keys`, and
        `prefix` is prepended to its keys in messages."""
        for source_key, value in tree.items():
            name = source_key.removeprefix("--") if not block_path and not dialect_path else source_key
            full_key = prefix + source_key
            path = f"{dialect_path}.{name}".lstrip(".")
            key_path = (*block_path, name)
            pattern = key_paths.pattern(key_path)
            is_block = pattern in key_paths.blocks() or any(known.startswith(f"{path}.") for known in dialect_keys)
            if path in dialect_keys and not (is_block and isinstance(value, Mapping)):
                self._translate_dialect_key(dialect_keys[path], value, tree, _dataset_path(block_path), full_key)
            elif pattern in key_paths.settings():
                self._put_value(key_path, value, full_key, "" if name == source_key else SIMPLETUNER)
            elif is_block and isinstance(value, Mapping):
                self._translate_block(value, key_path, dialect_keys, path, f"{full_key}.")
            elif f"{pattern}[]" in key_paths.blocks():
                self._translate_block_list(value, key_path, full_key)
            elif is_block:
                self._add_problem(full_key, not_a_block_message(pattern, value))
            else:
                self._add_problem(full_key, _unknown_key_message(name, block_path, dialect_path))

    def _translate_block_list(self, value: JSON, key_path: KeyPath, source_key: str) -> None:
        """Translate a list of our blocks. (Datasets may have keys of dialects; `_translate_dataset_lists` handles
        them.)"""
        if not isinstance(value, list):
            self._add_problem(source_key, f"{format_value(value)} is not a list of blocks")
            return
        self.layer.replaced_lists.add(key_path)
        for index, entry in enumerate(value):
            block_path, name = (*key_path, index), f"{source_key}[{index}]"
            if isinstance(entry, Mapping):
                self.layer.values[block_path] = Provenance({}, self._source, name)
                self._translate_block(entry, block_path, {}, "", f"{name}.")
            else:
                self._add_problem(name, not_a_block_message(key_paths.pattern(block_path), entry))

    def _translate_dialect_key(
        self, key: DialectKey, value: JSON, block: Block, dataset_path: KeyPath, source_key: str, implied: bool = False
    ) -> None:
        """Apply the conversion of a dialect's key. `dataset_path` is the dataset that contains it, or ()."""
        # SimpleTuner's files hold command-line arguments, so that any value may be quoted text
        is_command_line = key.dialect == SIMPLETUNER and not dataset_path
        text = value if isinstance(value, str) and (self._source.is_text or is_command_line) else None
        parsed = parse_text(text) if text is not None else value
        if key.convert is None:
            if not key.is_off(parsed):
                (self._add_problem if key.is_refused else self._add_warning)(source_key, key.reason)
            return
        outcomes = list(key.convert(parsed, block))
        if key.approximation and any(isinstance(outcome, conversions.SettingValue) for outcome in outcomes):
            outcomes.append(conversions.ConversionNote(key.approximation))
        for outcome in outcomes:
            self._apply_outcome(outcome, key.dialect, dataset_path, source_key, (parsed, text), implied)

    def _apply_outcome(
        self,
        outcome: conversions.ConversionOutcome,
        dialect: str,
        dataset_path: KeyPath,
        source_key: str,
        parsed_and_text: tuple[JSON, str | None],
        implied: bool,
    ) -> None:
        match outcome:
            case conversions.ConversionNote(message):
                self._add_warning(source_key, message)
            case conversions.InvalidValue(message):
                self._add_problem(source_key, message)
            case conversions.SettingValue(to, value, is_weak):
                inner = key_paths.parse_path(to.removeprefix("^"))
                assert inner is not None, to
                key_path = inner if to.startswith("^") else (*dataset_path, *inner)
                text = parsed_and_text[1] if value == parsed_and_text[0] else None
                is_unchanged = format_path(key_path) == source_key and value == parsed_and_text[0]
                dialect = "" if is_unchanged else dialect
                self._put_value(key_path, value, source_key, dialect, implied or is_weak, text)

    def _put_value(
        self, path: KeyPath, value: JSON, source_key: str, dialect: str, implied: bool = False, text: str | None = None
    ) -> None:
        setting = key_paths.setting_at(path)
        assert setting is not None, path
        if text is None and self._source.is_text and isinstance(value, str):
            text, value = value, parse_text(value)
        if text is not None:
            value = coerce_text(value, text, setting)
        if setting.is_path and value == "":
            self._add_problem(source_key, "is empty; set a path, or remove it")
            return
        order = self.layer.key_order
        order.setdefault(format_path(path), order.get(self._qualified_key(source_key), len(order)))
        provenance = Provenance(value, self._source, source_key, dialect, implied)
        existing = self.layer.values.get(path)
        if existing is None or (existing.is_implied and not implied):
            self.layer.values[path] = provenance
        elif existing.value != value and existing.is_implied and path != ("cache_config", "cache_dir"):
            both = f"both set {format_path(path)}"
            self._add_warning(source_key, f"has no effect: {existing.source_key} overrides it, {both}")
        elif existing.value != value and not implied:
            other = f"{existing.source_key} is {format_value(existing.value)}"
            both = f"both set {format_path(path)}: remove one"
            self._add_problem(source_key, f"is {format_value(value)}, but {other}; {both}")

    def _translate_dataset_lists(self, lists: Mapping[str, JSON], prefix: str, dialect: str) -> None:
        if len(lists) > 1:
            first, second, *_ = lists
            self._add_problem(prefix + second, f"sets the datasets, and so does {prefix}{first}: remove one")
            return
        for source_key, value in lists.items():
            name = source_key.removeprefix("--")
            self.layer.replaced_lists.add(("datasets",))
            if name == "datasets":
                self._translate_dataset_entries(value, prefix + name, dialect)
            elif name == "data_backend_config":
                self._translate_dataset_file(value, prefix + source_key)
            else:
                dialect = AI_TOOLKIT if name == "dataset" else SIMPLETUNER
                self._translate_dataset_entry(value, 0, prefix + source_key, dialect)

    def _translate_dataset_entries(self, value: JSON, source_key: str, dialect: str) -> None:
        if self._source.is_text and isinstance(value, str):
            value = parse_text(value)
        if not isinstance(value, list):
            self._add_problem(source_key, f"{format_value(value)} is not a list of datasets")
            return
        for index, entry in enumerate(value):
            self._translate_dataset_entry(entry, self._dataset_count, f"{source_key}[{index}]", dialect)

    def _translate_dataset_file(self, value: JSON, source_key: str) -> None:
        """Translate SimpleTuner's `data_backend_config`, a separate file of datasets."""
        source_and_tree = self._read_attached_file(value, source_key)
        if source_and_tree is not None:
            outer_source = self._source
            self._source, tree = source_and_tree
            self._record_order(tree)
            self._translate_dataset_entries(tree, "", SIMPLETUNER)
            self._source = outer_source

    def _translate_lycoris_file(self, value: JSON, source_key: str, block: Block) -> None:
        """Translate SimpleTuner's `lycoris_config`, a separate file."""
        if conversions.sibling_value(block, "lora_type") != "lycoris":
            self._add_warning(source_key, 'has an effect only with lora_type: "lycoris"')
            return
        source_and_tree = self._read_attached_file(value, source_key)
        if source_and_tree is None:
            return
        outer_source = self._source
        self._source, tree = source_and_tree
        self._record_order(tree)
        if isinstance(tree, Mapping):
            for name, outcome in lycoris_dialect.convert_lycoris_config(tree):
                self._apply_outcome(outcome, SIMPLETUNER, (), name, (tree.get(name), None), False)
        else:
            self._add_problem("", f"{format_value(tree)} is not a block of settings")
        self._source = outer_source

    def _read_attached_file(self, value: JSON, source_key: str) -> tuple[ConfigSource, JSON] | None:
        """Read and parse a file that the source refers to; None if that failed, which adds a problem."""
        if not isinstance(value, str) or not value:
            self._add_problem(source_key, f"{format_value(value)} is not the path of a file")
            return None
        folders = dict.fromkeys((self._source.folder, Path.cwd()))
        candidates = [folder / os.path.expanduser(value) for folder in folders]
        path = next((candidate for candidate in candidates if candidate.exists()), candidates[0])
        if not path.exists() and len(set(candidates)) > 1:
            tried = " and ".join(map(str, candidates))
            self._add_problem(source_key, f"{format_value(value)} does not exist; looked for {tried}")
            return None
        try:
            content = read_bytes(path)
            tree = parse_bytes(content, path.name)
        except ConfigError as error:
            for problem in error.problems:
                self._add_problem(source_key, problem.message)
            return None
        self.layer.attachments[path.name] = content
        return ConfigSource(path.name, path.parent), tree

    def _translate_dataset_entry(self, entry: JSON, index: int, source_key: str, dialect: str) -> None:
        if not isinstance(entry, Mapping):
            self._add_problem(source_key, not_a_block_message("datasets[]", entry))
            return
        dialect = dialect or detect_dialect(entry)
        key_path: KeyPath = ("datasets", index)
        if entry.get("disabled") is True or entry.get("disable") is True:
            self._add_warning(source_key, "is disabled and not used")
        elif entry.get("dataset_type") in CACHE_DATASET_TYPES:
            self._add_warning(source_key, "describes a cache, not samples; only its cache_dir is used")
            self._translate_cache_entry(entry, dialect, source_key)
        elif entry.get("dataset_type") == "conditioning":
            self._add_problem(f"{source_key}.dataset_type", CONDITIONING_REFUSAL)
        else:
            self._dataset_count = max(self._dataset_count, index + 1)
            self.layer.values[key_path] = Provenance({}, self._source, source_key)
            self._translate_block(entry, key_path, dataset_keys(dialect), "", f"{source_key}.")

    def _translate_cache_entry(self, entry: Block, dialect: str, source_key: str) -> None:
        dialect_keys = dataset_keys(dialect)
        for name, value in entry.items():
            if name == "cache_dir":
                self._translate_dialect_key(dialect_keys[name], value, entry, ("datasets", 0), f"{source_key}.{name}")
            elif name not in dialect_keys and name not in key_paths.names_in_block("datasets[]"):
                self._add_problem(f"{source_key}.{name}", unknown_key_message(name, "datasets[]"))

    def _apply_inherited_values(self, inherited_values: Mapping[str, JSON], prefix: str) -> None:
        """Apply keys of the root that count for all datasets, to each dataset that does not set them."""
        block = {inherited_keys()[name.removeprefix("--")][1]: value for name, value in inherited_values.items()}
        for source_key, value in inherited_values.items():
            dialect, dataset_key = inherited_keys()[source_key.removeprefix("--")]
            if not self._dataset_count:
                remedy = "" if self._source.is_file else f"; set datasets[0].{dataset_key}"
                reason = "there is no dataset in this source to apply it to"
                self._add_warning(prefix + source_key, f"has no effect: {reason}{remedy}")
            value = parse_text(value) if isinstance(value, str) else value
            key = dataset_keys(dialect).get(dataset_key)
            key = key or DialectKey(dialect, source_key, conversions.rename_to(dataset_key))
            for index in range(self._dataset_count):
                dataset_path = ("datasets", index)
                self._translate_dialect_key(key, value, block, dataset_path, prefix + source_key, implied=True)

    def _record_order(self, node: JSON, source_key: str = "") -> None:
        """Remember the order of all keys of a source, for the order of messages."""
        self.layer.key_order.setdefault(self._qualified_key(source_key), len(self.layer.key_order))
        if isinstance(node, Mapping):
            for name, inner in node.items():
                self._record_order(inner, f"{source_key}.{name}".lstrip("."))
        elif isinstance(node, list):
            for index, inner in enumerate(node):
                self._record_order(inner, f"{source_key}[{index}]")

    def _add_problem(self, source_key: str, message: str) -> None:
        self.layer.problems.append(ConfigProblem(self._qualified_key(source_key), message))

    def _add_warning(self, source_key: str, message: str) -> None:
        self.layer.warnings.append(WarningEvent(self._qualified_key(source_key), message))

    def _qualified_key(self, source_key: str) -> str:
        """The key for messages; prefixed with the source unless that is the configuration file."""
        is_main_file = self._source.is_file and self._source is self._main_source
        return source_key if is_main_file else f"{self._source.name}: {source_key}"


_LYCORIS_KEYS = ("lycoris_config", "--lycoris_config")


def _dataset_path(key_path: KeyPath) -> KeyPath:
    """The path of the dataset that contains `key_path`; () outside datasets."""
    return key_path[:2] if key_path[:1] == ("datasets",) else ()


def _unknown_key_message(name: str, block_path: KeyPath, dialect_path: str) -> str:
    """The message for an unknown key in our block at `block_path`, else in the dialect's block `dialect_path`."""
    if key_paths.pattern(block_path) in key_paths.blocks():
        return unknown_key_message(name, key_paths.pattern(block_path))
    return unknown_key_message(name, key_paths.pattern(_dataset_path(block_path)), dialect_path)


def _nested_mapping(key_path: KeyPath, value: JSON) -> dict[str, JSON]:
    """`("a", "b")` and a value → `{"a": {"b": value}}`."""
    for step in reversed(key_path):
        value = {str(step): value}
    assert isinstance(value, dict)
    return value


def iter_settings(tree: JSON, key_path: KeyPath = ()) -> Iterator[tuple[KeyPath, JSON]]:
    """Every setting of a tree under our names, as (key path, value)."""
    if isinstance(tree, Mapping) and key_paths.setting_at(key_path) is None:
        for name, inner in tree.items():
            yield from iter_settings(inner, (*key_path, name))
    elif isinstance(tree, list | tuple) and key_paths.pattern((*key_path, 0)) in key_paths.blocks():
        for index, inner in enumerate(tree):
            yield from iter_settings(inner, (*key_path, index))
    else:
        yield key_path, tree
