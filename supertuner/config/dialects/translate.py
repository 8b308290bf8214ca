"""A parsed file, in our own names or a dialect's, becomes values by canonical place; unknown keys are collected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from supertuner.config.dialects import lycoris as lycoris_dialect
from supertuner.config.dialects.conversions import No, Outcome, Put, Said, beside, to
from supertuner.config.dialects.table import AI_TOOLKIT, SIMPLETUNER, Row, dataset_rows, dialect_of, inherited, run_rows
from supertuner.config.problems import not_a_block, unknown_key
from supertuner.config.sources import key_path as places
from supertuner.config.sources.key_path import Place
from supertuner.config.sources.parse import parse_bytes, read_bytes
from supertuner.config.sources.provenance import Given, Layer, Source
from supertuner.config.sources.values import fitted, from_text, shown
from supertuner.core.errors import ConfigError, Problem
from supertuner.core.events import Warned
from supertuner.core.types import JSON

CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")


class Translation:
    """Fills one layer from one source. Used once."""

    def __init__(self, source: Source) -> None:
        self.layer = Layer()
        self._source = self._main = source
        self._datasets = 0

    def root(self, tree: Mapping[str, JSON]) -> Layer:
        """Read a whole file."""
        rest, lead, dialect = self._unwrapped(tree)
        rest.pop("$schema", None)  # for editors
        lists = {name: rest.pop(name) for name in _DATASETS if name in rest}
        for_all = {name: rest.pop(name) for name in list(rest) if name.removeprefix("--") in inherited()}
        lycoris = {name: rest[name] for name in _LYCORIS if rest.get(name)}
        self._block(rest, (), run_rows(), "", lead)
        for written, value in lycoris.items():
            self._lycoris_file(value, lead + written, rest)
        if dialect == AI_TOOLKIT and "model" in rest and not {"network", "adapter"} & rest.keys():
            self._put(("adapter", "type"), "full", f"{lead}network", AI_TOOLKIT, weak=True)
            self._note(f"{lead}network", 'is missing, so all weights are trained: adapter.type "full"')
        self._dataset_lists(lists, lead, dialect)
        self._inherit(for_all, lead)
        return self.layer

    def at(self, where: Place, value: JSON) -> Layer:
        """Read one value at a place, as --set and code give it."""
        if where[0] == "datasets" and len(where) > 1 and isinstance(where[1], int):
            if len(where) > 2:
                self._inside_dataset(where, value)
            else:
                self._entry(value, where[1], places.show(where), "")
        elif all(isinstance(step, str) for step in where):
            return self.root(_nested(where, value))
        elif places.pattern(where[:-1] if isinstance(where[-1], int) else where) in places.settings():
            self._put(where, value, places.show(where), "")
        else:
            self._problem(places.show(where), "not a setting")
        return self.layer

    def _inside_dataset(self, where: Place, value: JSON) -> None:
        if isinstance(where[-1], int) and places.settings().get(places.pattern(where[:-1])) is not None:
            self._put(where, value, places.show(where), "")
        elif any(isinstance(step, int) for step in where[2:]):
            self._problem(places.show(where), "not a setting")
        else:
            self._block(_nested(where[2:], value), where[:2], dataset_rows(""), "", places.show(where[:2]) + ".")

    def _unwrapped(self, tree: Mapping[str, JSON]) -> tuple[dict[str, JSON], str, str]:
        """The settings inside ai-toolkit's `config.process[0]`, if the file is one of its jobs."""
        if "config" not in tree:
            return dict(tree), "", ""
        job = tree["config"]
        rest = {name: value for name, value in tree.items() if name != "config"}
        process = job.get("process") if isinstance(job, Mapping) else None
        if (
            isinstance(job, Mapping)
            and isinstance(process, list)
            and len(process) == 1
            and isinstance(process[0], Mapping)
        ):
            self._block(rest, (), run_rows(), "", "")
            self._block(
                {name: value for name, value in job.items() if name != "process"}, (), run_rows(), "", "config."
            )
            return dict(process[0]), "config.process[0].", AI_TOOLKIT
        self._problem("config", f"{shown(job)} is not a job of ai-toolkit: a block with a list `process` of one block")
        return rest, "", ""

    def _block(self, tree: Mapping[str, JSON], at: Place, rows: Mapping[str, Row], inside: str, lead: str) -> None:
        """Read a block: `at` is its place, `inside` its path in the table's rows, `lead` what precedes its keys."""
        for written, value in tree.items():
            name = written.removeprefix("--") if not at and not inside else written
            path = f"{inside}.{name}".lstrip(".")
            where = (*at, name)
            kind = places.pattern(where)
            is_block = kind in places.blocks() or any(known.startswith(f"{path}.") for known in rows)
            if path in rows and not (is_block and isinstance(value, Mapping)):
                self._row(rows[path], value, tree, _dataset(at), lead + written)
            elif kind in places.settings():
                self._put(where, value, lead + written, "" if name == written else SIMPLETUNER)
            elif is_block and isinstance(value, Mapping):
                self._block(value, where, rows, path, f"{lead}{written}.")
            elif f"{kind}[]" in places.blocks():
                self._blocks(value, where, lead + written)
            else:
                message = not_a_block(kind, value) if is_block else _unknown(name, at, inside)
                self._problem(lead + written, message)

    def _blocks(self, value: JSON, where: Place, written: str) -> None:
        """Read a list of blocks of ours (datasets have words of others in them, and are read apart)."""
        if not isinstance(value, list):
            self._problem(written, f"{shown(value)} is not a list of blocks")
            return
        self.layer.replaced.add(where)
        for index, entry in enumerate(value):
            at, name = (*where, index), f"{written}[{index}]"
            if isinstance(entry, Mapping):
                self.layer.given[at] = Given({}, self._source, name)
                self._block(entry, at, {}, "", f"{name}.")
            else:
                self._problem(name, not_a_block(places.pattern(at), entry))

    def _row(
        self, row: Row, value: JSON, block: Mapping[str, JSON], base: Place, written: str, weak: bool = False
    ) -> None:
        """Do what the table says about a foreign key. `base` is the dataset it stands in, if any."""
        if row.convert is None:
            self._note(written, row.why)
            return
        # SimpleTuner's flat files hold command-line arguments, whose values may all be in quotes
        arguments = row.dialect == SIMPLETUNER and not base
        text = value if isinstance(value, str) and (self._source.is_text or arguments) else None
        read = from_text(text) if text is not None else value
        for outcome in row.convert(read, block):
            self._outcome(outcome, row, base, written, (read, text), weak)

    def _outcome(
        self, outcome: Outcome, row: Row, base: Place, written: str, read: tuple[JSON, str | None], weak: bool
    ) -> None:
        match outcome:
            case Said(message):
                self._note(written, message)
            case No(message):
                self._problem(written, message)
            case Put(to, value, is_weak):
                inner = places.parse(to.removeprefix("^"))
                assert inner is not None, to
                where = inner if to.startswith("^") else (*base, *inner)
                same = places.show(where) == written and value == read[0]
                text = read[1] if value == read[0] else None
                self._put(where, value, written, "" if same else row.dialect, weak or is_weak, text)

    def _put(
        self, where: Place, value: JSON, written: str, dialect: str, weak: bool = False, text: str | None = None
    ) -> None:
        key = places.key_at(where)
        assert key is not None, where
        if text is None and self._source.is_text and isinstance(value, str):
            text, value = value, from_text(value)
        if text is not None:
            value = fitted(value, text, key)
        if key.is_path and value == "":
            self._problem(written, "is empty; give a path, or leave it out")
            return
        given = Given(value, self._source, written, dialect, weak)
        other = self.layer.given.get(where)
        if other is None or (other.weak and not weak):
            self.layer.given[where] = given
        elif other.value != value and other.weak:
            self._note(written, f"gives way to {other.written}: {places.show(where)} is one setting")
        elif other.value != value and not weak:
            message = f"is {shown(value)}, but {other.written} says {shown(other.value)}; both mean "
            self._problem(written, f"{message}{places.show(where)}: keep one")

    def _dataset_lists(self, lists: Mapping[str, JSON], lead: str, dialect: str) -> None:
        if len(lists) > 1:
            self._problem(lead + list(lists)[1], f"gives datasets, and so does {lead}{next(iter(lists))}: keep one")
            return
        for written, value in lists.items():
            name = written.removeprefix("--")
            self.layer.replaced.add(("datasets",))
            if name == "datasets":
                self._entries(value, lead + name, dialect)
            elif name == "data_backend_config":
                self._dataset_file(value, lead + written)
            else:
                self._entry(value, 0, lead + written, AI_TOOLKIT if name == "dataset" else SIMPLETUNER)

    def _entries(self, value: JSON, written: str, dialect: str) -> None:
        if self._source.is_text and isinstance(value, str):
            value = from_text(value)
        if not isinstance(value, list):
            self._problem(written, f"{shown(value)} is not a list of datasets")
            return
        for index, entry in enumerate(value):
            self._entry(entry, self._datasets, f"{written}[{index}]", dialect)

    def _dataset_file(self, value: JSON, written: str) -> None:
        """SimpleTuner keeps its datasets in a file of their own."""
        opened = self._opened(value, written)
        if opened is not None:
            outer, self._source = self._source, opened[0]
            self._entries(opened[1], "", SIMPLETUNER)
            self._source = outer

    def _lycoris_file(self, value: JSON, written: str, block: Mapping[str, JSON]) -> None:
        """And what it tells LyCORIS in another."""
        if beside(block, "lora_type") != "lycoris":
            self._note(written, 'has an effect only with lora_type: "lycoris"')
            return
        opened = self._opened(value, written)
        if opened is None:
            return
        outer, self._source = self._source, opened[0]
        if isinstance(opened[1], Mapping):
            for name, outcome in lycoris_dialect.read(opened[1]):
                self._outcome(outcome, Row(SIMPLETUNER, name), (), name, (opened[1].get(name), None), False)
        else:
            self._problem("", f"{shown(opened[1])} is not a block of settings")
        self._source = outer

    def _opened(self, value: JSON, written: str) -> tuple[Source, JSON] | None:
        """Another file that this one names, and what is in it; None: the problem is told."""
        if not isinstance(value, str) or not value:
            self._problem(written, f"{shown(value)} is not the path of a file")
            return None
        path = self._source.folder / os.path.expanduser(value)
        try:
            content = read_bytes(path)
            tree = parse_bytes(content, path.name)
        except ConfigError as error:
            for problem in error.problems:
                self._problem(written, problem.message)
            return None
        self.layer.attachments[path.name] = content
        return Source(path.name, path.parent), tree

    def _entry(self, entry: JSON, index: int, written: str, dialect: str) -> None:
        if not isinstance(entry, Mapping):
            self._problem(written, not_a_block("datasets[]", entry))
            return
        dialect = dialect or dialect_of(entry)
        rows = dataset_rows(dialect)
        where: Place = ("datasets", index)
        if entry.get("disabled") is True or entry.get("disable") is True:
            self._note(written, "is disabled and left out")
        elif entry.get("dataset_type") in CACHES:
            self._note(written, "describes a cache, not samples; only its cache_dir is read")
            self._cache_entry(entry, rows, written)
        elif entry.get("dataset_type") == "conditioning":
            self._problem(
                f"{written}.dataset_type", '"conditioning" is not available; allowed: "image", "video", "audio"'
            )
        else:
            self._datasets = max(self._datasets, index + 1)
            self.layer.given[where] = Given({}, self._source, written)
            self._block(entry, where, rows, "", f"{written}.")

    def _cache_entry(self, entry: Mapping[str, JSON], rows: Mapping[str, Row], written: str) -> None:
        for name, value in entry.items():
            if name == "cache_dir":
                self._row(rows[name], value, entry, ("datasets", 0), f"{written}.{name}")
            elif name not in rows and name not in places.names_in("datasets[]"):
                self._problem(f"{written}.{name}", unknown_key(name, "datasets[]"))

    def _inherit(self, for_all: Mapping[str, JSON], lead: str) -> None:
        """Give every dataset what the root says for all, where it says nothing itself."""
        block = {inherited()[name.removeprefix("--")][1]: value for name, value in for_all.items()}
        for written, value in for_all.items():
            dialect, inner = inherited()[written.removeprefix("--")]
            if not self._datasets:
                other = "" if self._source.is_file else f"; set datasets[0].{inner}"
                self._note(lead + written, f"has no effect: there is no dataset here that it could apply to{other}")
            for index in range(self._datasets):
                rows = dataset_rows(dialect)
                row = rows.get(inner) or Row(dialect, written, to(inner))
                self._row(row, _argument(value), block, ("datasets", index), lead + written, weak=True)

    def _problem(self, written: str, message: str) -> None:
        self.layer.problems.append(Problem(self._named(written), message))

    def _note(self, written: str, message: str) -> None:
        self.layer.notes.append(Warned(self._named(written), message))

    def _named(self, written: str) -> str:
        """The name that was written, with the source where it is not the file that everybody thinks of."""
        is_main_file = self._source.is_file and self._source is self._main
        return written if is_main_file else f"{self._source.name}: {written}"


_LYCORIS = ("lycoris_config", "--lycoris_config")
_DATASETS = ("datasets", "dataset", "data_backend", "data_backend_config", "--data_backend_config")


def _dataset(at: Place) -> Place:
    """The dataset that a place is inside of; nothing elsewhere."""
    return at[:2] if at[:1] == ("datasets",) else ()


def _unknown(name: str, at: Place, inside: str) -> str:
    """What to say of an unknown key in our block at `at`, or in the foreign block `inside` where it is not ours."""
    if places.pattern(at) in places.blocks():
        return unknown_key(name, places.pattern(at))
    return unknown_key(name, places.pattern(_dataset(at)), inside)


def _argument(value: JSON) -> JSON:
    return from_text(value) if isinstance(value, str) else value


def _nested(where: Place, value: JSON) -> dict[str, JSON]:
    """`("a", "b")` and a value → `{"a": {"b": value}}`."""
    for step in reversed(where):
        value = {str(step): value}
    assert isinstance(value, dict)
    return value


def leaves(tree: JSON, at: Place = ()) -> Iterator[tuple[Place, JSON]]:
    """Every setting of a canonical tree with its place."""
    if isinstance(tree, Mapping) and places.key_at(at) is None:
        for name, inner in tree.items():
            yield from leaves(inner, (*at, name))
    elif isinstance(tree, list | tuple) and places.pattern((*at, 0)) in places.blocks():
        for index, inner in enumerate(tree):
            yield from leaves(inner, (*at, index))
    else:
        yield at, tree
