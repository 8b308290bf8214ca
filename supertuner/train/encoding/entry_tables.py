"""Where a batch finds the entries of its samples: arrays by number, one copy for all processes of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import ArenaReader
from supertuner.cache.entries import CacheEntries, EntryRefs
from supertuner.core.types import JSON
from supertuner.data.corpus import Corpus
from supertuner.train.encoding.cache_plan import CachePlan
from supertuner.train.encoding.media import MediaTable
from supertuner.train.encoding.text import CaptionTable


@dataclass(frozen=True, eq=False, slots=True)
class EntryTables:
    media: MediaTable
    captions: tuple[CaptionTable | None, ...]
    """For each dataset; None if its captions are not cached once."""
    text_refs: EntryRefs
    """By the number of a text."""

    @classmethod
    def build(cls, corpus: Corpus, plan: CachePlan, media: CacheEntries, text: CacheEntries) -> EntryTables:
        media_table = MediaTable(corpus, plan.media.job_offsets, plan.media.variations, media.find(plan.media.keys))
        return cls(media_table, plan.text.tables, text.find(plan.text_keys))


def write_tables_arena(
    home: ArenaHome, name: str, plan: CachePlan, media: CacheEntries, text: CacheEntries
) -> ArenaReader:
    """The same in an arena of that name, which ends with its last reader."""
    columns = {"media_refs": media.find(plan.media.keys), "text_refs": text.find(plan.text_keys)}
    numbers: dict[str, JSON] = {"begins": list(plan.media.job_offsets), "turns": list(plan.media.variations)}
    with home.build(name, life="run") as build:
        for column, values in (columns | caption_columns(plan)).items():
            build.put_table(column, values)
        build.seal({"holds": "tables of caches", **numbers, "caption_turns": caption_variations(plan)})
        return home.attach(name)


def map_tables(corpus: Corpus, reader: ArenaReader) -> EntryTables:
    """The tables that `reader` shows. They stay good after it is closed."""
    meta: Mapping[str, Any] = reader.meta
    media = MediaTable(corpus, meta["begins"], meta["turns"], reader.table("media_refs"))
    return EntryTables(media, map_caption_tables(corpus, reader), reader.table("text_refs"))


def caption_columns(plan: CachePlan) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
    """Caption tables, by columns that have the dataset's number in their names."""
    return {
        f"{column}-{number}": getattr(table, column)
        for number, table in enumerate(plan.text.tables)
        if table is not None
        for column in ("first", "numbers", "empty")
    }


def caption_variations(plan: CachePlan) -> list[JSON]:
    """For each dataset, how many turns of its captions are kept; None if they are not cached once."""
    return [None if table is None else table.variations for table in plan.text.tables]


def map_caption_tables(corpus: Corpus, reader: ArenaReader) -> tuple[CaptionTable | None, ...]:
    meta: Mapping[str, Any] = reader.meta
    tables: list[CaptionTable | None] = []
    for number, (dataset, variations) in enumerate(zip(corpus.datasets, meta["caption_turns"], strict=True)):
        first, numbers, empty = (f"{column}-{number}" for column in ("first", "numbers", "empty"))
        table = reader.table
        tables.append(
            None
            if variations is None
            else CaptionTable(dataset, table(first), table(numbers), variations, table(empty))
        )
    return tuple(tables)
