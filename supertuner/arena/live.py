"""An arena read while it is being built: units appear once committed, keep their numbers, and never vanish."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from supertuner.arena.catalog import Collected, ListedKeys, SegmentColumns
from supertuner.arena.checks import check_catalog
from supertuner.arena.files import INDEX, Folder, unless_abandoned
from supertuner.arena.format import (
    DATA_MAGIC,
    JOURNAL_NBYTES,
    PAGE,
    Head,
    check_segment,
    end_of,
    round_up,
    segment_name,
)
from supertuner.arena.journal import Journal
from supertuner.arena.mapping import map_segments
from supertuner.arena.reader import Reader
from supertuner.arena.sealed import open_sealed
from supertuner.arena.verify import check_record
from supertuner.core.errors import ArenaDamagedError, ArenaMissingError
from supertuner.core.events import NullSink, Progress


class LiveReader(Reader):
    """Units are numbered in the order in which this reader found them, and `refresh()` looks for more."""

    def __init__(self, folder: Folder, head: Head) -> None:
        self._head = head
        self._collected = Collected(head.uuid)
        self._journals: dict[int, tuple[int, Journal, SegmentColumns]] = {}
        self.sealed = False
        empty = self._collected.catalog(ListedKeys(()))
        super().__init__(folder, empty, map_segments(folder, (), empty.total), "on_demand", self._close_journals)
        self.refresh()

    def refresh(self) -> int:
        """Show what was committed since; how many units are new. ArenaMissing if the build was abandoned."""
        if self.sealed:
            return 0
        before = len(self)
        with unless_abandoned(self._folder):
            if self._folder.has(INDEX):
                self._take_sealed()
            else:
                self._take_journals()
        return len(self) - before

    def verify(self, progress: Progress | None = None) -> None:
        """Check what is committed so far; once sealed, every byte of the arena."""
        if self.sealed:
            super().verify(progress)
            return
        total = int(self._catalog.nbytes.sum())
        title, records = f"verifying {self.name}", len(self._offset)
        with (progress or NullSink()).phase(title, items=records, nbytes=total, noun="records") as phase:
            for record in range(len(self._offset)):
                check_record(self._folder, self._catalog, self._bytes, record)
                phase.advance(items=1, nbytes=self._nbytes[record])

    def _take_journals(self) -> None:
        numbers = self._folder.segments()
        if not self._folder.is_current():
            raise ArenaMissingError(f"{self._folder.path}: the build was abandoned; build it again")
        for number in numbers:
            if number not in self._journals:
                self._open_journal(number)
        known = len(self._collected.keys), len(self._collected.tables)
        for order, journal, columns in self._journals.values():
            for entry in journal.advance():
                self._collected.add(columns, order, entry)
            self._measure(columns)
        if known != (len(self._collected.keys), len(self._collected.tables)):
            catalog = self._collected.catalog(ListedKeys(list(self._collected.keys)))
            check_catalog(self._folder.path, catalog)
            self._show(catalog, map_segments(self._folder, catalog.segments, catalog.total))

    def _open_journal(self, number: int) -> None:
        name = segment_name(number, "journal")
        try:
            whole = os.stat(name, dir_fd=self._folder.fd, follow_symlinks=False).st_size >= JOURNAL_NBYTES
        except FileNotFoundError:  # sealed, or a void segment removed, since we listed them
            return
        if not whole:
            return
        data = segment_name(number, "data")
        try:
            page = self._folder.read(data, PAGE)
            check_segment(self._folder.file(data), page, DATA_MAGIC, self._head.uuid, number)
            journal = Journal(self._folder, number, self._head.uuid)
        except ArenaDamagedError:
            if self._folder.has(name):
                raise
            return
        columns = self._collected.add_segment(number, journal.kind)
        self._journals[number] = (len(self._collected.segments) - 1, journal, columns)

    def _measure(self, columns: SegmentColumns) -> None:
        """Map as far as units are committed; the file must reach that far."""
        if not len(columns):
            return
        written = columns.offset[-1] + columns.nbytes[-1]
        name = segment_name(columns.number, "data")
        fd = self._folder.open_file(name)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size < written:
            raise ArenaDamagedError(self._folder.file(name), f"has {size} bytes; its journal speaks of {written}")
        columns.nbytes_of_file = round_up(end_of(columns.offset[-1], columns.nbytes[-1]), PAGE)

    def _take_sealed(self) -> None:
        """The whole arena from its index; units that were known keep their numbers, the others follow in key order."""
        _, catalog = open_sealed(self._folder)
        known = [catalog.keys.find(key) for key in self._collected.keys]
        if None in known:
            raise ArenaDamagedError(self._folder.file(INDEX), "lacks a unit that was committed")
        numbers = np.array(known, np.int64)
        rest = np.setdiff1d(np.arange(len(catalog.keys)), numbers, assume_unique=True)
        order = np.concatenate([numbers, rest])
        keys = ListedKeys([catalog.keys.at(unit) for unit in order.tolist()])
        fields = {name: column[order] for name, column in catalog.fields.items()}
        self._show(
            replace(catalog, fields=fields, keys=keys), map_segments(self._folder, catalog.segments, catalog.total)
        )
        self.sealed = True
        self._close_journals()

    def _close_journals(self) -> None:
        for _, journal, _ in self._journals.values():
            journal.close()
        self._journals.clear()
