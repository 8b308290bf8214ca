"""An arena under construction: one owner and any number of writers, until it is sealed, or abandoned and deleted."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.arena import locks
from supertuner.arena.catalog_checks import check_catalog
from supertuner.arena.folder import HEAD_FILE, INDEX_FILE, ArenaFolder, remove_arena
from supertuner.arena.format import TABLE_SEGMENT, UNIT_SEGMENT, ArenaHead, segment_name
from supertuner.arena.index import write_index
from supertuner.arena.segments import collect_segments, committed_keys, sync_data_files
from supertuner.arena.writer import SegmentWriter
from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import ArenaBusyError, ArenaError
from supertuner.core.types import JSON

_SEAL_WAIT_S = 60.0


class BuildParticipant(CloseOnExit):
    """This process's writers in an arena that this or another process is building."""

    def __init__(self, folder: ArenaFolder, head: ArenaHead) -> None:
        self._folder = folder
        self._head = head
        self._writers: list[SegmentWriter] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        return self._folder.path.name

    def open_writer(self) -> SegmentWriter:
        """Open a new segment for writing; use one writer per thread."""
        return self._open_writer(UNIT_SEGMENT)

    def committed_keys(self) -> frozenset[str]:
        """Keys of all units that any process has committed so far."""
        return frozenset(key.decode() for key in committed_keys(self._folder, self._head.uuid))

    def close(self) -> None:
        """Close the writers. Their committed units stay in the build."""
        self._close_writers()
        self._folder.close()

    def _close_writers(self) -> None:
        with self._lock:
            for writer in self._writers:
                writer.close()

    def _open_writer(self, kind: int) -> SegmentWriter:
        assert self._folder.fd >= 0, "this build is closed"
        with self._lock:
            self._writers.append(SegmentWriter(self._folder, self._head.uuid, kind))
            return self._writers[-1]


class ArenaBuild(BuildParticipant):
    """The owner's view of a build. Leaving it without `seal()` abandons the build and deletes everything.

    A resumable build is kept instead: the next `ArenaHome.build(name, resume=True)` continues with its committed units.
    """

    def __init__(self, folder: ArenaFolder, builder: int, head: ArenaHead) -> None:
        super().__init__(folder, head)
        self._builder_fd = builder
        self._table_writer: SegmentWriter | None = None
        self._sealed = False

    def put_table(self, name: str, array: NDArray[Any]) -> None:
        """Add a column of the whole dataset; `ArenaReader.table(name)` maps it."""
        assert isinstance(array, np.ndarray), type(array)
        if self._table_writer is None:
            self._table_writer = self._open_writer(TABLE_SEGMENT)
        with self._table_writer.begin(name) as unit:
            unit.put("table", array)

    def seal(self, meta: Mapping[str, JSON] | None = None) -> None:
        """Make the arena readable and immutable. Units are numbered in bytewise order of their keys.

        Closes this process's writers; raises ArenaBusyError while another process still has one open. The arena cannot
        be removed until the `with` block ends: attach to it inside the block.
        """
        assert not self._sealed and self._folder.fd >= 0, "already sealed or closed"
        with self._lock:
            for writer in self._writers:
                unit = writer._open_unit
                assert unit is None, f"unit {unit.key!r} is neither committed nor aborted"
                writer.close()
        with self._folder.opened(HEAD_FILE) as head_fd:
            if not locks.lock(head_fd, exclusive=True, wait_s=_SEAL_WAIT_S):
                remedy = "end it and seal again"
                raise ArenaBusyError(f"{self._folder.path}: another process does not finish opening a writer; {remedy}")
            self._seal_locked(meta or {})

    def _seal_locked(self, meta: Mapping[str, JSON]) -> None:
        expected = {writer.number: writer.units_committed for writer in self._writers}
        builder = collect_segments(self._folder, self._head.uuid, expected)
        sync_data_files(self._folder, builder.segments)
        catalog = builder.build(_sorted_units(self._folder, builder.keys))
        check_catalog(self._folder.file_path(INDEX_FILE), catalog)
        write_index(self._folder, catalog, meta)
        self._sealed = True
        for segment in builder.segments:
            self._folder.unlink(segment_name(segment.number, "journal"))

    def abandon(self) -> None:
        """Delete everything, including committed units. Writers of other processes fail at their next commit."""
        assert not self._sealed, "a sealed arena is removed with ArenaHome.remove"
        if self._folder.fd >= 0 and os.getpid() == self._pid:  # in a forked child the build belongs to the parent
            self._close_writers()
            remove_arena(self._folder)
        self._release()

    def close(self) -> None:
        if self._sealed or self._head.resumable:
            self._release()
        else:
            self.abandon()

    def _release(self) -> None:
        super().close()
        if self._builder_fd >= 0:
            os.close(self._builder_fd)
            self._builder_fd = -1


def _sorted_units(folder: ArenaFolder, keys: list[bytes]) -> list[int]:
    """Unit numbers in bytewise order of their keys. Raises ArenaError if a key occurs twice."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for before, after in pairwise(order):
        if keys[before] == keys[after]:
            text = keys[after].decode(errors="replace")
            raise ArenaError(f"{folder.path}: the key {text!r} was committed twice; keys must be unique")
    return order
