"""Where a batch finds the entries of its samples: arrays by number, one copy for all processes of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.home import Home
from supertuner.arena.reader import Reader
from supertuner.cache.entries import Entries, Refs
from supertuner.core.types import JSON
from supertuner.data.corpus import Corpus
from supertuner.train.encoding.cache_plan import Plan
from supertuner.train.encoding.media import MediaTable
from supertuner.train.encoding.text import CaptionTable


@dataclass(frozen=True, eq=False, slots=True)
class Tables:
    media: MediaTable
    captions: tuple[CaptionTable | None, ...]
    """For each dataset; None if its captions are not cached once."""
    text_refs: Refs
    """By the number of a text."""

    @classmethod
    def of(cls, corpus: Corpus, plan: Plan, media: Entries, text: Entries) -> Tables:
        found = MediaTable(corpus, plan.media.begins, plan.media.turns, media.find(plan.media.keys))
        return cls(found, plan.text.tables, text.find(plan.text_keys))


def shared(home: Home, name: str, plan: Plan, media: Entries, text: Entries) -> Reader:
    """The same in an arena of that name, which ends with its last reader."""
    columns = {"media_refs": media.find(plan.media.keys), "text_refs": text.find(plan.text_keys)}
    numbers: dict[str, JSON] = {"begins": list(plan.media.begins), "turns": list(plan.media.turns)}
    with home.build(name, life="run") as build:
        for column, values in (columns | caption_columns(plan)).items():
            build.put_table(column, values)
        build.seal({"holds": "tables of caches", **numbers, "caption_turns": caption_turns(plan)})
        return home.attach(name)


def mapped(corpus: Corpus, reader: Reader) -> Tables:
    """The tables that `reader` shows. They stay good after it is closed."""
    meta: Mapping[str, Any] = reader.meta
    media = MediaTable(corpus, meta["begins"], meta["turns"], reader.table("media_refs"))
    return Tables(media, mapped_captions(corpus, reader), reader.table("text_refs"))


def caption_columns(plan: Plan) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
    """Caption tables, by columns that have the dataset's number in their names."""
    return {
        f"{column}-{number}": getattr(table, column)
        for number, table in enumerate(plan.text.tables)
        if table is not None
        for column in ("first", "numbers", "empty")
    }


def caption_turns(plan: Plan) -> list[JSON]:
    """For each dataset, how many turns of its captions are kept; None if they are not cached once."""
    return [None if table is None else table.turns for table in plan.text.tables]


def mapped_captions(corpus: Corpus, reader: Reader) -> tuple[CaptionTable | None, ...]:
    meta: Mapping[str, Any] = reader.meta
    found: list[CaptionTable | None] = []
    for number, (part, turns) in enumerate(zip(corpus.parts, meta["caption_turns"], strict=True)):
        first, numbers, empty = (f"{column}-{number}" for column in ("first", "numbers", "empty"))
        table = reader.table
        found.append(None if turns is None else CaptionTable(part, table(first), table(numbers), turns, table(empty)))
    return tuple(found)
