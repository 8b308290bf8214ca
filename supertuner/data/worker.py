"""One staging thread: each file is read once into the arena, checked on the way, and committed or set aside."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from supertuner.config.data import Dataset
from supertuner.core.errors import BrokenMedia
from supertuner.core.events import Phase
from supertuner.data.columns import Columns
from supertuner.data.compress import RAW, Choice, compress
from supertuner.data.fit import stored_bytes
from supertuner.data.meter import Meter
from supertuner.data.probe import probe
from supertuner.data.probe.facts import Facts
from supertuner.data.reading import open_span, read_captions, require_unchanged
from supertuner.data.result import FormatFigures
from supertuner.data.sources.listing import Left, Listing, Source, Span
from supertuner.data.staged import MEDIA
from supertuner.data.trial import item_bytes

if TYPE_CHECKING:
    from supertuner.arena.build import Build
    from supertuner.arena.writer import Unit
    from supertuner.data.sources.listing import Item


@dataclass(frozen=True, slots=True)
class Job:
    """What all threads of a staging share."""

    dataset: Dataset
    source: Source
    listing: Listing
    build: Build
    meter: Meter
    choices: Mapping[str, Choice]
    """Codecs by format; empty: files are stored as they are."""
    phase: Phase
    lock: threading.Lock = field(default_factory=threading.Lock)


class StageWorker:
    """Has a segment of the arena to itself."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kind = job.dataset.dataset_type
        self._decode = job.dataset.check == "decode"
        self._writer = job.build.writer()
        self.columns = Columns()
        self.left: list[tuple[int, Left]] = []
        self.formats: dict[str, FormatFigures] = {}

    def work(self, chunk: range) -> None:
        nbytes = 0
        items = self._job.listing.items
        for number in chunk:
            item = items[number]
            try:
                self._one(number, item)
            except BrokenMedia as error:
                self.left.append((number, Left(item.name, str(error))))
            nbytes += item.nbytes
        with self._job.lock:
            self._job.phase.advance(len(chunk), nbytes)

    def finish(self) -> None:
        self._writer.close()

    def _one(self, number: int, item: Item) -> None:
        captions = self._captions(item)
        with self._writer.begin(item.key) as unit:
            if isinstance(item.media, Span) and item.media.nbytes == item.media.file_bytes and not self._job.choices:
                facts, stored = self._file(unit, item.media)
            else:
                facts, stored = self._bytes(unit, item)
        self.columns.add(number, facts, captions)
        self._count(facts.format, item.nbytes, stored)

    def _captions(self, item: Item) -> tuple[str, ...]:
        settings, listing = self._job.dataset.captions, self._job.listing
        if isinstance(item.caption, Span):
            return read_captions(item, listing.caption_syntax, settings.caption_column, several=settings.several)
        return item.caption or ()

    def _file(self, unit: Unit, span: Span) -> tuple[Facts, int]:
        """A whole file, straight from its descriptor into the arena."""
        fd = open_span(span)
        taken = stored_bytes(span.nbytes)
        self._job.meter.take(span.nbytes, taken)
        try:
            view = unit.put_file(MEDIA, fd, span.nbytes)
            facts = self._checked(view)
            require_unchanged(fd, span)
        except BrokenMedia:
            self._job.meter.give_back(span.nbytes, taken)
            raise
        except OSError as error:  # of reading: what the arena itself meets is an ArenaError
            self._job.meter.give_back(span.nbytes, taken)
            raise BrokenMedia(f"unreadable: {error.strerror}") from error
        finally:
            os.close(fd)
        return facts, span.nbytes

    def _bytes(self, unit: Unit, item: Item) -> tuple[Facts, int]:
        """A member of an archive, a row, or a file that is to be compressed: by way of private memory."""
        content = item_bytes(item, self._job.source)
        facts = self._checked(memoryview(content))
        choice = self._job.choices.get(facts.format)
        codec = RAW if choice is None else choice.codec
        if codec == RAW:
            self._job.meter.take(len(content), stored_bytes(len(content)))
            unit.put(MEDIA, content)
            return facts, len(content)
        packed = compress(codec, content)
        self._job.meter.take(len(content), stored_bytes(len(packed)))
        unit.put(MEDIA, packed, codec=codec, raw_nbytes=len(content))
        return facts, len(packed)

    def _checked(self, view: memoryview) -> Facts:
        facts = probe(view, self._kind)
        if self._decode:
            from supertuner.data.decodes import require_decodes

            require_decodes(view, facts, self._kind)
        return facts

    def _count(self, format: str, nbytes: int, stored: int) -> None:
        figures = self.formats.get(format)
        if figures is None:
            choice = self._job.choices.get(format)
            figures = self.formats[format] = FormatFigures(codec=RAW if choice is None else choice.codec)
        figures.files += 1
        figures.nbytes += nbytes
        figures.stored += stored
