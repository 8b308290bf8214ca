"""How the processes of a node share the caches of one corpus: the first one plans and builds, all of them encode.

The first process writes the cache plan and the lookup tables into arenas and publishes their names; the others map
them. Keys and captions of a million samples are half a gigabyte and seconds of work, so only one process computes them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import POLL_S
from supertuner.arena.reader import ArenaReader
from supertuner.arena.run_context import RunContext
from supertuner.cache.entries import CacheEntries, EntryRequest
from supertuner.cache.keys import EntryKeys, empty_keys
from supertuner.cache.location import CachePlacement
from supertuner.cache.repair import copying_request
from supertuner.cache.store import CacheStore
from supertuner.core.errors import ArenaMissingError
from supertuner.core.types import JSON
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.train.encoding import cache_plan as plans
from supertuner.train.encoding.cache_lookup import EntryTables, LatentTable
from supertuner.train.encoding.encoders import TextInput

T = TypeVar("T")
Columns: TypeAlias = dict[str, NDArray[Any]]
"""Name → values of a table in an arena."""
NO_REFERENCE = -1


@dataclass(frozen=True, eq=False, slots=True)
class EncodingCoordinator:
    """The messages between the processes of a node while they open the caches of one corpus."""

    context: RunContext
    home: ArenaHome
    """Where the arenas of plans and tables are written."""
    title: str
    """Distinguishes these caches from all others that the run opens."""

    def share_plan(self, corpus: Corpus, build_plan: Callable[[], plans.CachePlan]) -> ArenaReader:
        """An arena with the plan, which the first process builds. Keep it open until `wait_until_opened` returns."""

        def write(name: str) -> ArenaReader:
            plan = build_plan()
            jobs, media_keys, text_keys = plan.media.jobs, plan.media.keys, plan.text_keys
            columns: Columns = {"group": jobs.group, "sample": jobs.sample, "cycle": jobs.cycle}
            columns |= {"media_keys": _keys_to_bytes(media_keys), "text_keys": _keys_to_bytes(text_keys)}
            columns |= _text_columns(corpus, plan.text.texts)
            return _write_arena(self.home, name, "plan of caches", columns, plan)

        return self._build_once("plan", write)

    def share_tables(self, plan: plans.CachePlan, media: CacheEntries, text: CacheEntries) -> ArenaReader:
        """An arena with the lookup tables, which the first process computes. The stores of all processes show the same
        arenas in the same order, so that its refs are valid in each of them."""

        def write(name: str) -> ArenaReader:
            columns = {"media_refs": media.find(plan.media.keys), "text_refs": text.find(plan.text_keys)}
            return _write_arena(self.home, name, "tables of caches", columns, plan)

        return self._build_once("tables", write)

    def announce_store(self, kind: plans.CacheKind, store: CacheStore) -> None:
        """Called by the first process when its store contains all entries of a kind."""
        self.context.peers.publish(f"{self.title}: {kind}", json.dumps(store.arenas).encode())

    def wait_until_opened(self, truncated_captions: int) -> int:
        """Wait until every process has opened the plan and all stores.

        Returns the number of truncated captions: of all processes in the first one, 0 in the others.
        """
        peers = self.context.peers
        if not peers.is_first:
            peers.publish(f"{self.title}: {peers.local_rank} is there", str(truncated_captions).encode())
            return 0
        for rank in range(1, peers.local_world_size):
            waiting_for = f"process {rank} of this node to open the caches"
            message = peers.wait_with_progress(f"{self.title}: {rank} is there", waiting_for, self.context.progress)
            truncated_captions += int(message)
        return truncated_captions

    def open_store_as_helper(
        self,
        requirements: plans.CacheRequirements,
        kind: plans.CacheKind,
        placement: CachePlacement,
        create_request: Callable[[], EntryRequest],
    ) -> CacheStore:
        """The store of a process other than the first: helps the first one to fill it, then opens the same arenas.

        `create_request` is called only if there is something to encode.
        """
        open_store = partial(CacheStore, namespace=requirements.namespace(kind), context=self.context)
        with ExitStack() as stack:
            primary = stack.enter_context(open_store(placement.primary, arenas=()))

            def copy_request() -> EntryRequest:
                primary.refresh()  # open the arenas that were sealed since
                return copying_request(primary, create_request())

            stores = [(primary, create_request)]
            if placement.working_copy is not None:
                stores.append((stack.enter_context(open_store(placement.working_copy, arenas=())), copy_request))
            peers, title = self.context.peers, f"following the process of this node that prepares {kind}"
            with self.context.progress.phase(title) as phase:
                while (content := peers.read_published(f"{self.title}: {kind}")) is None:
                    if not any(store.help_fill(make_request) for store, make_request in stores):
                        peers.check_peers()
                        phase.advance()
                        time.sleep(POLL_S)
            arenas = json.loads(content)
        return self._attach(lambda: open_store(placement.working_copy or placement.primary, arenas=arenas))

    def _build_once(self, artifact: str, build: Callable[[str], ArenaReader]) -> ArenaReader:
        """The first process builds the arena and publishes its name; the others wait for it and attach."""
        message_name, peers = f"{self.title}: {artifact}", self.context.peers
        if peers.is_first:
            reader = build(f"{artifact}-{uuid.uuid4().hex}")
            try:
                peers.publish(message_name, reader.name.encode())
            except BaseException:
                reader.close()
                raise
            return reader
        name = peers.wait_with_progress(message_name, f"the {artifact} of caches", self.context.progress).decode()
        return self._attach(lambda: self.home.attach(name))

    def _attach(self, attach: Callable[[], T]) -> T:
        """Attach to what the first process holds open. If it is missing, that process has died: raise PeerError."""
        try:
            return attach()
        except ArenaMissingError:
            self.context.peers.check_peers()
            raise


class MappedTextInputs(Sequence[TextInput]):
    """Text inputs in an arena; each is created when it is accessed."""

    def __init__(self, corpus: Corpus, reader: ArenaReader) -> None:
        self._corpus = corpus
        self._offsets: NDArray[np.int64] = reader.table("text_offsets")
        self._bytes: NDArray[np.uint8] = reader.table("text_bytes")
        self._dataset: NDArray[np.int32] = reader.table("text_dataset")
        self._sample: NDArray[np.int64] = reader.table("text_sample")

    def __len__(self) -> int:
        return len(self._sample)

    @overload
    def __getitem__(self, index: int) -> TextInput: ...
    @overload
    def __getitem__(self, index: slice) -> list[TextInput]: ...
    def __getitem__(self, index: int | slice) -> TextInput | list[TextInput]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        caption = self._bytes[self._offsets[index] : self._offsets[index + 1]].tobytes().decode()
        dataset = int(self._dataset[index])
        references = None if dataset == NO_REFERENCE else self._corpus.datasets[dataset].references
        return TextInput.for_sample(caption, references, int(self._sample[index]))


def map_plan(corpus: Corpus, reader: ArenaReader) -> plans.CachePlan:
    """The plan in an arena. It stays valid after the reader is closed."""
    meta: Mapping[str, Any] = reader.meta
    group, media_keys = reader.table("group"), _bytes_to_keys(reader.table("media_keys"))
    unused = np.broadcast_to(np.int64(0), group.shape)
    jobs = SampleDraws(unused, unused, group, reader.table("sample"), reader.table("cycle"))
    media = plans.MediaPlan(jobs, media_keys, tuple(meta["begins"]), tuple(meta["turns"]))
    text = plans.TextPlan(MappedTextInputs(corpus, reader), _map_caption_tables(corpus, reader))
    return plans.CachePlan(media, text, _bytes_to_keys(reader.table("text_keys")))


def map_tables(corpus: Corpus, reader: ArenaReader) -> EntryTables:
    """The tables that map samples and captions to cache entries, from a shared arena. Valid after the reader is
    closed."""
    meta: Mapping[str, Any] = reader.meta
    latents = LatentTable(corpus, meta["begins"], meta["turns"], reader.table("media_refs"))
    return EntryTables(latents, _map_caption_tables(corpus, reader), reader.table("text_refs"))


def _write_arena(home: ArenaHome, name: str, holds: str, columns: Columns, plan: plans.CachePlan) -> ArenaReader:
    """Write `columns` and the plan's caption tables into an arena that is removed when its last reader closes it."""
    with home.build(name, life="run") as build:
        for column, values in columns.items():
            build.put_table(column, values)
        caption_variations: list[JSON] = []
        for number, table in enumerate(plan.text.tables):
            caption_variations.append(None if table is None else table.variations)
            if table is not None:
                build.put_table(f"first-{number}", table.offsets)
                build.put_table(f"numbers-{number}", table.text_indices)
                build.put_table(f"empty-{number}", table.empty_text_indices)
        begins, turns = list(plan.media.job_offsets), list(plan.media.variations)
        build.seal({"holds": holds, "begins": begins, "turns": turns, "caption_turns": caption_variations})
        return home.attach(name)


def _map_caption_tables(corpus: Corpus, reader: ArenaReader) -> tuple[plans.CaptionTable | None, ...]:
    meta: Mapping[str, Any] = reader.meta
    tables: list[plans.CaptionTable | None] = []
    for number, (dataset, variations) in enumerate(zip(corpus.datasets, meta["caption_turns"], strict=True)):
        if variations is None:
            tables.append(None)
            continue
        offsets, text_indices, empty = (reader.table(f"{column}-{number}") for column in ("first", "numbers", "empty"))
        tables.append(plans.CaptionTable(dataset, offsets, text_indices, variations, empty))
    return tuple(tables)


def _text_columns(corpus: Corpus, texts: Sequence[TextInput]) -> Columns:
    dataset_by_references = {id(dataset.references): number for number, dataset in enumerate(corpus.datasets)}
    dataset_by_references[id(None)] = NO_REFERENCE
    encoded = [text.caption.encode() for text in texts]
    return {
        "text_offsets": np.concatenate([[0], np.cumsum([len(caption) for caption in encoded])]).astype(np.int64),
        "text_bytes": np.frombuffer(b"".join(encoded), np.uint8),
        "text_dataset": np.array([dataset_by_references[id(text.references)] for text in texts], np.int32),
        "text_sample": np.array([text.sample_index for text in texts], np.int64),
    }


def _keys_to_bytes(keys: EntryKeys) -> NDArray[np.uint8]:
    return np.ascontiguousarray(keys).view(np.uint8)


def _bytes_to_keys(content: NDArray[np.uint8]) -> EntryKeys:
    return content.view(empty_keys().dtype)
