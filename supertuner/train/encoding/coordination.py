"""The processes of a node on their way to the caches of one corpus: the first plans and builds, all of them encode.

What they say to each other is which arenas to map. A further process works nothing out and keeps nothing of its own.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import POLL_S, NodePeers
from supertuner.arena.reader import ArenaReader
from supertuner.cache.entries import CacheEntries
from supertuner.cache.fill import EntryRequest
from supertuner.cache.repair import copying_request
from supertuner.cache.store import CacheStore
from supertuner.core.errors import ArenaMissingError
from supertuner.core.events import Progress, Sink
from supertuner.core.host import HostFacts
from supertuner.data.corpus import Corpus
from supertuner.train.encoding import entry_tables as tables
from supertuner.train.encoding import plan_arena
from supertuner.train.encoding.cache_dirs import CachePlacement
from supertuner.train.encoding.cache_plan import CacheKind, CachePlan, CacheRequirements


@dataclass(frozen=True, eq=False, slots=True)
class EncodingCoordinator:
    peers: NodePeers
    home: ArenaHome
    """Where plans and tables lie."""
    title: str
    """What is made; no two makings of a run have the same."""
    progress: Progress

    def share_plan(self, corpus: Corpus, build_plan: Callable[[], CachePlan]) -> ArenaReader:
        """An arena with the plan, worked out by the first process. Held until all have `arrived`."""
        return self._build_once("plan", lambda name: plan_arena.write_plan_arena(self.home, name, corpus, build_plan()))

    def share_tables(self, plan: CachePlan, media: CacheStore | None, text: CacheStore | None) -> ArenaReader:
        """An arena with where entries are, which the first process finds; the others' stores show the same arenas."""
        entries = [CacheEntries() if store is None else store.entries for store in (media, text)]
        return self._build_once("tables", lambda name: tables.write_tables_arena(self.home, name, plan, *entries))

    def announce_store(self, kind: CacheKind, store: CacheStore) -> None:
        """The first process has all entries of a kind."""
        self.peers.publish(f"{self.title}: {kind}", json.dumps(store.arenas).encode())

    def help_until_ready(self, kind: CacheKind, help_once: Callable[[], bool]) -> list[str]:
        """Encode with the first process until it has all entries of a kind; the arenas that they are in."""
        with self.progress.phase(f"following the process of this node that prepares {kind}") as phase:
            while (content := self.peers.read_published(f"{self.title}: {kind}")) is None:
                if not help_once():
                    self.peers.check_peers()
                    phase.advance()
                    time.sleep(POLL_S)
        names: list[str] = json.loads(content)
        return names

    def wait_until_opened(self, truncated_captions: int) -> int:
        """Every process has the plan and all entries. How many captions were cut: by all, for the first process."""
        if not self.peers.is_first:
            self.peers.publish(f"{self.title}: {self.peers.local_rank} is there", str(truncated_captions).encode())
            return 0
        for number in range(1, self.peers.local_world_size):
            waiting_for = f"process {number} of this node to open the caches"
            truncated_captions += int(
                self.peers.wait_with_progress(f"{self.title}: {number} is there", waiting_for, self.progress)
            )
        return truncated_captions

    def attach_store(self, attach: Callable[[], CacheStore]) -> CacheStore:
        """What the first process holds open is there, unless that process is gone: that is told then."""
        try:
            return attach()
        except ArenaMissingError:
            self.peers.check_peers()
            raise

    def _build_once(self, artifact: str, build: Callable[[str], ArenaReader]) -> ArenaReader:
        message_name = f"{self.title}: {artifact}"
        if self.peers.is_first:
            reader = build(f"{artifact}-{uuid.uuid4().hex}")
            try:
                self.peers.publish(message_name, reader.name.encode())
            except BaseException:
                reader.close()
                raise
            return reader
        name = self.peers.wait_with_progress(message_name, f"the {artifact} of caches", self.progress).decode()
        try:
            return self.home.attach(name)
        except ArenaMissingError:
            self.peers.check_peers()
            raise


def open_store_as_helper(
    coordinator: EncodingCoordinator,
    requirements: CacheRequirements,
    kind: CacheKind,
    placement: CachePlacement,
    create_request: Callable[[], EntryRequest],
    *,
    host: HostFacts,
    sink: Sink,
    progress: Progress,
) -> CacheStore:
    """The store of a further process, filled together with the first; `wanted` is called if something is to be done."""
    space, peers = requirements.namespace(kind), coordinator.peers
    with ExitStack() as stack:
        primary = stack.enter_context(CacheStore(placement.primary, space, sink, arenas=()))

        def copy_request() -> EntryRequest:
            primary.refresh()  # what is copied was sealed since
            return copying_request(primary, create_request(), host=host, progress=progress, sink=sink)

        stores = [(primary, create_request)]
        if placement.working_copy is not None:
            stores.append(
                (stack.enter_context(CacheStore(placement.working_copy, space, sink, arenas=())), copy_request)
            )

        def help_once() -> bool:
            return any(
                store.help_fill(make_request, host=host, progress=progress, peers=peers)
                for store, make_request in stores
            )

        names = coordinator.help_until_ready(kind, help_once)
    return coordinator.attach_store(
        partial(CacheStore, placement.working_copy or placement.primary, space, sink, arenas=names)
    )
