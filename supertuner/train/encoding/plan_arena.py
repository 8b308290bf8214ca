"""The plan of a corpus's caches in an arena: one process of a node works it out, and the others map it.

Keys and captions of a million samples are half a gigabyte and seconds of work; nobody needs them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.home import Home
from supertuner.arena.reader import Reader
from supertuner.cache.keys import Keys, no_keys
from supertuner.core.types import JSON
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.order import Draws
from supertuner.train.encoding.cache_plan import Plan
from supertuner.train.encoding.media import MediaPlan
from supertuner.train.encoding.tables import caption_columns, caption_turns, mapped_captions
from supertuner.train.encoding.text import TextPlan
from supertuner.train.encoding.text_inputs import Told

NO_ORIGINAL = -1


class MappedTexts(Sequence[Told]):
    """Texts that lie in an arena, each made an object when it is asked for."""

    def __init__(self, corpus: Corpus, reader: Reader) -> None:
        self._corpus = corpus
        self._offsets: NDArray[np.int64] = reader.table("text_offsets")
        self._bytes: NDArray[np.uint8] = reader.table("text_bytes")
        self._dataset: NDArray[np.int32] = reader.table("text_dataset")
        self._sample: NDArray[np.int64] = reader.table("text_sample")

    def __len__(self) -> int:
        return len(self._sample)

    @overload
    def __getitem__(self, place: int) -> Told: ...
    @overload
    def __getitem__(self, place: slice) -> list[Told]: ...
    def __getitem__(self, place: int | slice) -> Told | list[Told]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        caption = self._bytes[self._offsets[place] : self._offsets[place + 1]].tobytes().decode()
        dataset = int(self._dataset[place])
        originals = None if dataset == NO_ORIGINAL else self._corpus.parts[dataset].originals
        return Told.of(caption, originals, int(self._sample[place]))


def shared(home: Home, name: str, corpus: Corpus, plan: Plan) -> Reader:
    """The plan in an arena of that name, which ends with its last reader."""
    jobs = plan.media.jobs
    columns: dict[str, NDArray[Any]] = {
        "group": jobs.group,
        "sample": jobs.sample,
        "cycle": jobs.cycle,
        "media_keys": _bytes_of(plan.media.keys),
        "text_keys": _bytes_of(plan.text_keys),
        **_text_columns(corpus, plan.text.texts),
        **caption_columns(plan),
    }
    numbers: dict[str, JSON] = {"begins": list(plan.media.begins), "turns": list(plan.media.turns)}
    with home.build(name, life="run") as build:
        for column, values in columns.items():
            build.put_table(column, values)
        build.seal({"holds": "plan of caches", **numbers, "caption_turns": caption_turns(plan)})
        return home.attach(name)


def mapped(corpus: Corpus, reader: Reader) -> Plan:
    """The plan that `reader` shows. It stays good after it is closed."""
    meta: Mapping[str, Any] = reader.meta
    group = reader.table("group")
    nothing = np.broadcast_to(np.int64(0), group.shape)
    jobs = Draws(nothing, nothing, group, reader.table("sample"), reader.table("cycle"))
    media = MediaPlan(jobs, _keys_of(reader.table("media_keys")), tuple(meta["begins"]), tuple(meta["turns"]))
    text = TextPlan(MappedTexts(corpus, reader), mapped_captions(corpus, reader))
    return Plan(media, text, _keys_of(reader.table("text_keys")))


def _text_columns(corpus: Corpus, texts: Sequence[Told]) -> dict[str, NDArray[Any]]:
    owners = {id(part.originals): number for number, part in enumerate(corpus.parts) if part.originals is not None}
    encoded = [text.caption.encode() for text in texts]
    return {
        "text_offsets": np.concatenate([[0], np.cumsum([len(one) for one in encoded])]).astype(np.int64),
        "text_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "text_dataset": np.array([owners.get(id(text.originals), NO_ORIGINAL) for text in texts], np.int32),
        "text_sample": np.array([text.sample for text in texts], np.int64),
    }


def _bytes_of(keys: Keys) -> NDArray[np.uint8]:
    return np.ascontiguousarray(keys).view(np.uint8)


def _keys_of(content: NDArray[np.uint8]) -> Keys:
    return content.view(no_keys().dtype)
