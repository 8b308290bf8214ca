"""One staging thread: each file is read once into the arena, checked on the way, and committed or set aside."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.arena.bulk import Bulk
from supertuner.config.settings.data import Dataset
from supertuner.core.bulk_io import Together
from supertuner.core.errors import BrokenMedia
from supertuner.core.events import Phase
from supertuner.core.types import MIB, MediaKind
from supertuner.data.probe import probe
from supertuner.data.probe.facts import Facts
from supertuner.data.sources.captions import MAX_CAPTION_BYTES
from supertuner.data.sources.listing import Left, Listing, Source, Span
from supertuner.data.staged import MEDIA
from supertuner.data.staging.budget import stored_bytes
from supertuner.data.staging.columns import Columns
from supertuner.data.staging.compress import RAW, Choice, compress
from supertuner.data.staging.decodes import require_decodes
from supertuner.data.staging.meter import Meter
from supertuner.data.staging.reading import Shelf, open_span, read_captions, read_span, require_unchanged, room_of
from supertuner.data.staging.result import FormatFigures

if TYPE_CHECKING:
    from supertuner.arena.build import Build
    from supertuner.data.sources.listing import Item

_BUFFER_BYTES = 4 * MIB
"""Read, checked and written together. Twice as much would save a few more waits for the interpreter's lock, and cost
memory in every thread."""
_SMALL_BYTES = MIB
"""Files up to this size are read together, as many as the buffer holds, and checked before they are stored."""


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
    library: Path | None
    """What reads and writes many files at once, if it was built."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class StageWorker:
    """Has a segment of the arena to itself."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kind = job.dataset.dataset_type
        self._check = _checked_by_decoding if job.dataset.check == "decode" else probe
        self._raw = not job.choices
        self._writer = job.build.writer()
        buffer = Together(_BUFFER_BYTES, job.library)
        self._shelf = Shelf(buffer)
        self._bulk = Bulk(self._writer, MEDIA, buffer)
        self.columns = Columns()
        self.left: list[tuple[int, Left]] = []
        self.formats: dict[str, FormatFigures] = {}

    def work(self, chunk: range) -> None:
        """Stage a chunk. What is done per file is kept short: reading 100 KB takes only some tens of microseconds."""
        items = self._job.listing.items[chunk.start : chunk.stop]
        nbytes = sum([item.nbytes for item in items])
        if self._raw:  # the sizes are known: one look at the budget for all
            self._job.meter.take(nbytes, sum([stored_bytes(item.nbytes) for item in items]))
        numbers: list[int] = []
        facts: list[Facts] = []
        captions: list[tuple[str, ...]] = []
        for part in together(items):
            self._shelf.fill([span for item in items[part.start : part.stop] for span in small_spans(item)])
            for at in part:
                item = items[at]
                try:
                    text = self._captions(item) if isinstance(item.caption, Span) else item.caption or ()
                    found = self._one(item)
                except BrokenMedia as error:
                    self._leave(chunk.start + at, item, str(error))
                    continue
                numbers.append(chunk.start + at)
                facts.append(found)
                captions.append(text)
            self._bulk.flush()
        self.columns.extend(numbers, facts, captions)
        if self._raw:
            self._count_raw([items[number - chunk.start].nbytes for number in numbers], facts)
        with self._job.lock:
            self._job.phase.advance(len(chunk), nbytes)

    def finish(self) -> None:
        self._writer.close()

    def _leave(self, number: int, item: Item, reason: str) -> None:
        self.left.append((number, Left(item.name, reason)))
        if self._raw:
            self._job.meter.give_back(item.nbytes, stored_bytes(item.nbytes))

    def _captions(self, item: Item) -> tuple[str, ...]:
        settings = self._job.dataset.captions
        syntax, column = self._job.listing.caption_syntax, settings.caption_column
        return read_captions(item, syntax, column, several=settings.several, read=self._shelf.take)

    def _one(self, item: Item) -> Facts:
        key, _, nbytes, media, _ = item
        if isinstance(media, int):
            content = self._job.source.payload(media)
        elif nbytes <= _SMALL_BYTES:
            content = self._shelf.take(media)
        elif self._raw and nbytes == media.file_bytes:
            return self._large(key, media)
        else:
            content = read_span(media)
        facts = self._check(content, self._kind)
        if not self._raw:
            self._compressed(key, content, facts.format)
        elif isinstance(media, Span) and nbytes <= _SMALL_BYTES:
            self._bulk.add(key, self._shelf.place(media), nbytes)
        else:
            self._put(key, content)
        return facts

    def _put(self, key: str, content: memoryview) -> None:
        """Store what is not in the buffer, as a unit of its own."""
        self._bulk.flush()
        with self._writer.begin(key) as unit:
            unit.put(MEDIA, content)

    def _compressed(self, key: str, content: memoryview, format: str) -> None:
        """Store with the codec of its format, which may be none."""
        codec = self._job.choices[format].codec if format in self._job.choices else RAW
        nbytes = len(content)
        packed = content if codec == RAW else compress(codec, content)
        self._job.meter.take(nbytes, stored_bytes(len(packed)))
        with self._writer.begin(key) as unit:
            unit.put(MEDIA, packed, codec=codec, raw_nbytes=nbytes)
        self.formats.setdefault(format, FormatFigures(codec=codec)).add(1, nbytes, len(packed))

    def _large(self, key: str, span: Span) -> Facts:
        """A file that would not fit into the buffer: in pieces straight into the arena."""
        self._bulk.flush()
        fd = open_span(span)
        try:
            with self._writer.begin(key) as unit:
                facts = self._check(unit.put_file(MEDIA, fd, span.nbytes), self._kind)
                require_unchanged(os.fstat(fd), span)
        except OSError as error:  # of reading: what the arena itself meets is an ArenaError
            raise BrokenMedia(f"unreadable: {error.strerror}") from error
        finally:
            os.close(fd)
        return facts

    def _count_raw(self, sizes: list[int], facts: list[Facts]) -> None:
        formats = [found.format for found in facts]
        for format in set(formats):
            mine = [nbytes for nbytes, its in zip(sizes, formats, strict=True) if its == format]
            self.formats.setdefault(format, FormatFigures()).add(len(mine), sum(mine), sum(mine))


def small_spans(item: Item) -> list[Span]:
    """What of an item is read together with others."""
    limits = ((item.media, _SMALL_BYTES), (item.caption, MAX_CAPTION_BYTES))
    return [span for span, most in limits if isinstance(span, Span) and 0 < span.nbytes <= most]


def together(items: Sequence[Item]) -> Iterator[range]:
    """Neighbours whose small spans fit the buffer at once."""
    begin = taken = 0
    for at, item in enumerate(items):
        room = room_of(small_spans(item))
        if at > begin and taken + room > _BUFFER_BYTES:
            yield range(begin, at)
            begin, taken = at, 0
        taken += room
    if begin < len(items):
        yield range(begin, len(items))


def _checked_by_decoding(view: memoryview, kind: MediaKind) -> Facts:
    facts = probe(view, kind)
    require_decodes(view, facts, kind)
    return facts
