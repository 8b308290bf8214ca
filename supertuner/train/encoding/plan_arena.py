"""The plan of a corpus's caches in an arena: one process of a node works it out, and the others map it.

Keys and captions of a million samples are half a gigabyte and seconds of work; nobody needs them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.home import ArenaHome
from supertuner.arena.reader import ArenaReader
from supertuner.cache.keys import EntryKeys, empty_keys
from supertuner.core.types import JSON
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.train.encoding.cache_plan import CachePlan
from supertuner.train.encoding.entry_tables import caption_columns, caption_variations, map_caption_tables
from supertuner.train.encoding.media import MediaPlan
from supertuner.train.encoding.text import TextPlan
from supertuner.train.encoding.text_inputs import TextInput

NO_REFERENCE = -1


class MappedTextInputs(Sequence[TextInput]):
    """Texts that lie in an arena, each made an object when it is asked for."""

    def __init__(self, corpus: Corpus, reader: ArenaReader) -> None:
        self._corpus = corpus
        self._offsets: NDArray[np.int64] = reader.table("text_offsets")
        self._bytes: NDArray[np.uint8] = reader.table("text_bytes")
        self._dataset: NDArray[np.int32] = reader.table("text_dataset")
        self._sample: NDArray[np.int64] = reader.table("text_sample")

    def __len__(self) -> int:
        return len(self._sample)

    @overload
    def __getitem__(self, place: int) -> TextInput: ...
    @overload
    def __getitem__(self, place: slice) -> list[TextInput]: ...
    def __getitem__(self, place: int | slice) -> TextInput | list[TextInput]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        caption = self._bytes[self._offsets[place] : self._offsets[place + 1]].tobytes().decode()
        dataset = int(self._dataset[place])
        originals = None if dataset == NO_REFERENCE else self._corpus.datasets[dataset].references
        return TextInput.for_sample(caption, originals, int(self._sample[place]))


def write_plan_arena(home: ArenaHome, name: str, corpus: Corpus, plan: CachePlan) -> ArenaReader:
    """The plan in an arena of that name, which ends with its last reader."""
    jobs = plan.media.jobs
    columns: dict[str, NDArray[Any]] = {
        "group": jobs.group,
        "sample": jobs.sample,
        "cycle": jobs.cycle,
        "media_keys": _keys_to_bytes(plan.media.keys),
        "text_keys": _keys_to_bytes(plan.text_keys),
        **_text_columns(corpus, plan.text.texts),
        **caption_columns(plan),
    }
    numbers: dict[str, JSON] = {"begins": list(plan.media.job_offsets), "turns": list(plan.media.variations)}
    with home.build(name, life="run") as build:
        for column, values in columns.items():
            build.put_table(column, values)
        build.seal({"holds": "plan of caches", **numbers, "caption_turns": caption_variations(plan)})
        return home.attach(name)


def map_plan(corpus: Corpus, reader: ArenaReader) -> CachePlan:
    """The plan that `reader` shows. It stays good after it is closed."""
    meta: Mapping[str, Any] = reader.meta
    group = reader.table("group")
    zeros = np.broadcast_to(np.int64(0), group.shape)
    jobs = SampleDraws(zeros, zeros, group, reader.table("sample"), reader.table("cycle"))
    media = MediaPlan(jobs, _bytes_to_keys(reader.table("media_keys")), tuple(meta["begins"]), tuple(meta["turns"]))
    text = TextPlan(MappedTextInputs(corpus, reader), map_caption_tables(corpus, reader))
    return CachePlan(media, text, _bytes_to_keys(reader.table("text_keys")))


def _text_columns(corpus: Corpus, texts: Sequence[TextInput]) -> dict[str, NDArray[Any]]:
    dataset_by_references = {
        id(dataset.references): number
        for number, dataset in enumerate(corpus.datasets)
        if dataset.references is not None
    }
    encoded = [text.caption.encode() for text in texts]
    return {
        "text_offsets": np.concatenate([[0], np.cumsum([len(caption) for caption in encoded])]).astype(np.int64),
        "text_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "text_dataset": np.array(
            [dataset_by_references.get(id(text.references), NO_REFERENCE) for text in texts], np.int32
        ),
        "text_sample": np.array([text.sample_index for text in texts], np.int64),
    }


def _keys_to_bytes(keys: EntryKeys) -> NDArray[np.uint8]:
    return np.ascontiguousarray(keys).view(np.uint8)


def _bytes_to_keys(content: NDArray[np.uint8]) -> EntryKeys:
    return content.view(empty_keys().dtype)
