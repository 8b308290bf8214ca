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

from supertuner.arena.home import Home
from supertuner.arena.peers import POLL_S, Peers
from supertuner.arena.reader import Reader
from supertuner.cache.entries import Entries
from supertuner.cache.fill import Wanted
from supertuner.cache.repair import loaded
from supertuner.cache.store import Store
from supertuner.core.errors import ArenaMissing
from supertuner.core.events import Progress, Sink
from supertuner.core.host import Host
from supertuner.data.corpus import Corpus
from supertuner.train.encoding import plan_arena, tables
from supertuner.train.encoding.cache_dirs import Places
from supertuner.train.encoding.cache_plan import Needs, Plan, What


@dataclass(frozen=True, eq=False, slots=True)
class Together:
    peers: Peers
    home: Home
    """Where plans and tables lie."""
    title: str
    """What is made; no two makings of a run have the same."""
    progress: Progress

    def plan(self, corpus: Corpus, work_out: Callable[[], Plan]) -> Reader:
        """An arena with the plan, worked out by the first process. Held until all have `arrived`."""
        return self._made_once("plan", lambda name: plan_arena.shared(self.home, name, corpus, work_out()))

    def tables(self, plan: Plan, media: Store | None, text: Store | None) -> Reader:
        """An arena with where entries are, which the first process finds; the others' stores show the same arenas."""
        entries = [Entries() if store is None else store.entries for store in (media, text)]
        return self._made_once("tables", lambda name: tables.shared(self.home, name, plan, *entries))

    def tell_store(self, what: What, store: Store) -> None:
        """The first process has all entries of a kind."""
        self.peers.tell(f"{self.title}: {what}", json.dumps(store.arenas).encode())

    def help_until_told(self, what: What, help_once: Callable[[], bool]) -> list[str]:
        """Encode with the first process until it has all entries of a kind; the arenas that they are in."""
        with self.progress.phase(f"following the process of this node that prepares {what}") as phase:
            while (told := self.peers.told(f"{self.title}: {what}")) is None:
                if not help_once():
                    self.peers.look()
                    phase.advance()
                    time.sleep(POLL_S)
        names: list[str] = json.loads(told)
        return names

    def arrived(self, cut: int) -> int:
        """Every process has the plan and all entries. How many captions were cut: by all, for the first process."""
        if not self.peers.first:
            self.peers.tell(f"{self.title}: {self.peers.number} is there", str(cut).encode())
            return 0
        for number in range(1, self.peers.count):
            who = f"process {number} of this node to open the caches"
            cut += int(self.peers.heard(f"{self.title}: {number} is there", who, self.progress))
        return cut

    def attached(self, attach: Callable[[], Store]) -> Store:
        """What the first process holds open is there, unless that process is gone: that is told then."""
        try:
            return attach()
        except ArenaMissing:
            self.peers.look()
            raise

    def _made_once(self, what: str, make: Callable[[str], Reader]) -> Reader:
        word = f"{self.title}: {what}"
        if self.peers.first:
            reader = make(f"{what}-{uuid.uuid4().hex}")
            try:
                self.peers.tell(word, reader.name.encode())
            except BaseException:
                reader.close()
                raise
            return reader
        name = self.peers.heard(word, f"the {what} of caches", self.progress).decode()
        try:
            return self.home.attach(name)
        except ArenaMissing:
            self.peers.look()
            raise


def helped(
    together: Together,
    needs: Needs,
    what: What,
    where: Places,
    wanted: Callable[[], Wanted],
    *,
    host: Host,
    sink: Sink,
    progress: Progress,
) -> Store:
    """The store of a further process, filled together with the first; `wanted` is called if something is to be done."""
    space, peers = needs.space(what), together.peers
    with ExitStack() as opened:
        kept = opened.enter_context(Store(where.kept, space, sink, arenas=()))

        def copies() -> Wanted:
            kept.refresh()  # what is copied was sealed since
            return loaded(kept, wanted(), host=host, progress=progress, sink=sink)

        stores = [(kept, wanted)]
        if where.shared is not None:
            stores.append((opened.enter_context(Store(where.shared, space, sink, arenas=())), copies))

        def help_once() -> bool:
            return any(store.help(made, host=host, progress=progress, peers=peers) for store, made in stores)

        names = together.help_until_told(what, help_once)
    return together.attached(partial(Store, where.shared or where.kept, space, sink, arenas=names))
