"""Reads an arena while it is being built: units appear once committed, keep their numbers, and never disappear."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from supertuner.arena.catalog import CatalogBuilder, ListedKeys, SegmentColumns
from supertuner.arena.catalog_checks import check_catalog
from supertuner.arena.folder import INDEX_FILE, ArenaFolder, unless_abandoned
from supertuner.arena.format import (
    DATA_MAGIC,
    JOURNAL_NBYTES,
    PAGE,
    ArenaHead,
    check_segment_header,
    record_end,
    round_up,
    segment_name,
)
from supertuner.arena.index import open_sealed
from supertuner.arena.journal import JournalReader
from supertuner.arena.mapping import map_segments
from supertuner.arena.reader import ArenaReader
from supertuner.arena.verify import check_record
from supertuner.core.errors import ArenaDamagedError, ArenaMissingError
from supertuner.core.events import NullSink, Progress


class LiveArenaReader(ArenaReader):
    """A reader that numbers units in the order in which it discovers them; `refresh()` looks for new ones."""

    def __init__(self, folder: ArenaFolder, head: ArenaHead) -> None:
        self._head = head
        self._catalog_builder = CatalogBuilder(head.uuid)
        self._journals: dict[int, tuple[int, JournalReader, SegmentColumns]] = {}
        self.sealed = False
        empty = self._catalog_builder.build(ListedKeys(()))
        super().__init__(folder, empty, map_segments(folder, (), empty.total_bytes), "on_demand", self._close_journals)
        self.refresh()

    def refresh(self) -> int:
        """Read newly committed units and return their number. Raises ArenaMissingError if the build was abandoned."""
        if self.sealed:
            return 0
        before = len(self)
        with unless_abandoned(self._folder):
            if self._folder.has(INDEX_FILE):
                self._load_sealed()
            else:
                self._read_journals()
        return len(self) - before

    def verify(self, progress: Progress | None = None) -> None:
        """Check everything committed so far; once the arena is sealed, every byte of it."""
        if self.sealed:
            super().verify(progress)
            return
        total = int(self._catalog.nbytes.sum())
        title, records = f"verifying {self.name}", len(self._offset)
        with (progress or NullSink()).phase(title, items=records, nbytes=total, noun="records") as phase:
            for record in range(len(self._offset)):
                check_record(self._folder, self._catalog, self._bytes, record)
                phase.advance(items=1, nbytes=self._nbytes[record])

    def _read_journals(self) -> None:
        numbers = self._folder.segment_numbers()
        if not self._folder.is_current():
            raise ArenaMissingError(f"{self._folder.path}: the build was abandoned; build it again")
        for number in numbers:
            if number not in self._journals:
                self._open_journal(number)
        known = len(self._catalog_builder.keys), len(self._catalog_builder.tables)
        for segment_index, journal, columns in self._journals.values():
            for entry in journal.read_entries():
                self._catalog_builder.add(columns, segment_index, entry)
            self._set_mapped_size(columns)
        if known != (len(self._catalog_builder.keys), len(self._catalog_builder.tables)):
            catalog = self._catalog_builder.build(ListedKeys(list(self._catalog_builder.keys)))
            check_catalog(self._folder.path, catalog)
            self._set_catalog(catalog, map_segments(self._folder, catalog.segments, catalog.total_bytes))

    def _open_journal(self, number: int) -> None:
        name = segment_name(number, "journal")
        try:
            has_header = os.stat(name, dir_fd=self._folder.fd, follow_symlinks=False).st_size >= JOURNAL_NBYTES
        except FileNotFoundError:  # sealed, or an empty segment removed, since the listing
            return
        if not has_header:
            return
        data = segment_name(number, "data")
        try:
            page = self._folder.read(data, PAGE)
            check_segment_header(self._folder.file_path(data), page, DATA_MAGIC, self._head.uuid, number)
            journal = JournalReader(self._folder, number, self._head.uuid)
        except ArenaDamagedError:
            if self._folder.has(name):
                raise
            return
        columns = self._catalog_builder.add_segment(number, journal.kind)
        self._journals[number] = (len(self._catalog_builder.segments) - 1, journal, columns)

    def _set_mapped_size(self, columns: SegmentColumns) -> None:
        """Set the mapped size to the end of the committed units; raise ArenaDamagedError if the file is shorter."""
        if not len(columns):
            return
        written_end = columns.offset[-1] + columns.nbytes[-1]
        name = segment_name(columns.number, "data")
        fd = self._folder.open_file(name)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size < written_end:
            raise ArenaDamagedError(self._folder.file_path(name), f"has {size} bytes; its journal lists {written_end}")
        columns.file_nbytes = round_up(record_end(columns.offset[-1], columns.nbytes[-1]), PAGE)

    def _load_sealed(self) -> None:
        """Switch to the index of the sealed arena. Known units keep their numbers, the others follow in key order."""
        _, catalog = open_sealed(self._folder)
        known = [catalog.keys.find(key) for key in self._catalog_builder.keys]
        if None in known:
            raise ArenaDamagedError(self._folder.file_path(INDEX_FILE), "does not contain a unit that was committed")
        numbers = np.array(known, np.int64)
        new_units = np.setdiff1d(np.arange(len(catalog.keys)), numbers, assume_unique=True)
        order = np.concatenate([numbers, new_units])
        keys = ListedKeys([catalog.keys.key_at(unit) for unit in order.tolist()])
        fields = {name: column[order] for name, column in catalog.fields.items()}
        self._set_catalog(
            replace(catalog, fields=fields, keys=keys),
            map_segments(self._folder, catalog.segments, catalog.total_bytes),
        )
        self.sealed = True
        self._close_journals()

    def _close_journals(self) -> None:
        for _, journal, _ in self._journals.values():
            journal.close()
        self._journals.clear()
