"""An arena being built: by one owner and any number of writers, until it is sealed, or abandoned and gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.arena import locks
from supertuner.arena.catalog import Collected, ListedKeys
from supertuner.arena.checks import check_catalog
from supertuner.arena.files import HEAD, INDEX, Folder, discard
from supertuner.arena.format import TABLES, UNITS, Head, segment_name
from supertuner.arena.index import write_index
from supertuner.arena.segments import collect, committed_keys, sync_data
from supertuner.arena.writer import Writer
from supertuner.core.errors import ArenaBusyError, ArenaError
from supertuner.core.types import JSON

_GATE_S = 60.0


class Joined:
    """This process's writers in an arena that is being built here or by another process."""

    def __init__(self, folder: Folder, head: Head) -> None:
        self._folder = folder
        self._head = head
        self._writers: list[Writer] = []
        self._guard = threading.Lock()
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        return self._folder.path.name

    def writer(self) -> Writer:
        """A segment of its own; one per thread."""
        return self._writer(UNITS)

    def committed(self) -> frozenset[str]:
        """Keys of all units committed so far, by any process."""
        return frozenset(key.decode() for key in committed_keys(self._folder, self._head.uuid))

    def stored_bytes(self) -> int:
        """Bytes that the arena takes so far, all segments: pages, not lengths."""
        return self._folder.stored_bytes()

    def close(self) -> None:
        """Close the writers. What they committed stays with the build."""
        with self._guard:
            for writer in self._writers:
                writer.close()
        self._folder.close()

    def __enter__(self) -> Joined:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writer(self, kind: int) -> Writer:
        assert self._folder.fd >= 0, "this build is closed"
        with self._guard:
            self._writers.append(Writer(self._folder, self._head.uuid, kind))
            return self._writers[-1]


class Build(Joined):
    """The owner's side. Leaving it without `seal()` abandons it and leaves nothing behind.

    A resumable build is kept instead: the next `Home.build(name, resume=True)` goes on with its committed units.
    """

    def __init__(self, folder: Folder, builder: int, head: Head) -> None:
        super().__init__(folder, head)
        self._builder = builder
        self._tables: Writer | None = None
        self._sealed = False

    def put_table(self, name: str, array: NDArray[Any]) -> None:
        """Add a column of the whole dataset; `Reader.table(name)` maps it."""
        assert isinstance(array, np.ndarray), type(array)
        if self._tables is None:
            self._tables = self._writer(TABLES)
        with self._tables.begin(name) as unit:
            unit.put("table", array)

    def seal(self, meta: Mapping[str, JSON] | None = None) -> None:
        """Make the arena readable, complete and for good. Units are numbered in bytewise order of their keys.

        Closes this process's writers; ArenaBusy while another process still has one. Until the `with` block is left
        nobody can remove the arena: attach inside it.
        """
        assert not self._sealed and self._folder.fd >= 0, "sealed or closed already"
        with self._guard:
            for writer in self._writers:
                assert writer._open is None, (
                    f"unit {writer._open and writer._open.key!r} is neither committed nor aborted"
                )
                writer.close()
        gate = self._folder.open_file(HEAD)
        try:
            if not locks.lock(gate, exclusive=True, wait_s=_GATE_S):
                raise ArenaBusyError(f"{self._folder.path}: a writer of another process is stuck while opening")
            self._seal(meta or {})
        finally:
            os.close(gate)

    def _seal(self, meta: Mapping[str, JSON]) -> None:
        collected = collect(self._folder, self._head.uuid, {w.number: w.units for w in self._writers})
        numbers = [s.number for s in collected.segments]
        sync_data(self._folder, numbers)
        order = _order(self._folder, collected)
        keys = [collected.keys[unit] for unit in order]
        catalog = collected.catalog(ListedKeys(()), np.array(order, np.intp))
        check_catalog(self._folder.file(INDEX), catalog)
        write_index(self._folder, catalog, keys, meta)
        self._sealed = True
        for number in numbers:
            self._folder.unlink(segment_name(number, "journal"))

    def abandon(self) -> None:
        """Remove everything, committed units too. Other processes' writers learn it at their next commit."""
        assert not self._sealed, "a sealed arena is removed by Home.remove"
        if self._folder.fd >= 0 and os.getpid() == self._pid:  # in a forked child the build is the parent's
            with self._guard:
                for writer in self._writers:
                    writer.close()
            discard(self._folder)
        self._release()

    def close(self) -> None:
        if self._sealed or self._head.resumable:
            self._release()
        else:
            self.abandon()

    def __enter__(self) -> Build:
        return self

    def _release(self) -> None:
        super().close()
        if self._builder >= 0:
            os.close(self._builder)
            self._builder = -1


def _order(folder: Folder, collected: Collected) -> list[int]:
    """Units in bytewise order of their keys, which must differ."""
    keys = collected.keys
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for before, after in pairwise(order):
        if keys[before] == keys[after]:
            text = keys[after].decode(errors="replace")
            raise ArenaError(f"{folder.path}: the key {text!r} was committed twice; a key names one unit")
    return order
