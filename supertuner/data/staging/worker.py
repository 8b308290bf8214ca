"""StageWorker: one staging thread; reads each file once, checks it, and commits it to the arena or sets it aside."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.arena.writer import BulkUnitWriter
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.bulk_io import BulkReader
from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import BrokenMediaError
from supertuner.core.events import ProgressPhase
from supertuner.core.types import MIB, MediaKind
from supertuner.data.decode import require_decodes
from supertuner.data.decode.decode_memory import DecodeMemory
from supertuner.data.probe import probe
from supertuner.data.probe.media_info import MediaInfo
from supertuner.data.sources.caption_parsing import MAX_CAPTION_BYTES
from supertuner.data.sources.listing import DataSource, FileSpan, SkippedFile, SourceListing
from supertuner.data.staging import span_reader
from supertuner.data.staging.budget import stored_bytes
from supertuner.data.staging.budget_meter import BudgetMeter
from supertuner.data.staging.columns import StagedColumns
from supertuner.data.staging.compress import RAW_CODEC, CodecChoice, compress
from supertuner.data.staging.result import FormatFigures
from supertuner.data.staging.span_reader import SpanBuffer, read_span
from supertuner.data.staging.staged_dataset import MEDIA_FIELD

if TYPE_CHECKING:
    from supertuner.arena.build import ArenaBuild
    from supertuner.data.sources.listing import SourceItem

_BUFFER_BYTES = 4 * MIB
"""Size of the buffer whose files are read, checked and written together. Twice as much would save a few waits for the
GIL, and cost memory in every thread."""
_SMALL_BYTES = MIB
"""Files up to this size are read together, as many as fit into the buffer, and checked before they are stored."""


@dataclass(frozen=True, slots=True)
class StagingJob:
    """What all threads that stage a dataset share."""

    dataset: DatasetSettings
    source: DataSource
    listing: SourceListing
    build: ArenaBuild
    meter: BudgetMeter
    codecs: Mapping[str, CodecChoice]
    """Codecs by file format; empty: files are stored uncompressed."""
    phase: ProgressPhase
    library: Path | None
    """The C library that reads and writes many files at once; None if it was not built."""
    decode_memory: DecodeMemory
    """Bounds the memory of files that are decoded at once, for `check: "decode"`."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class StageWorker(CloseOnExit):
    """Each worker writes to a separate segment of the arena."""

    def __init__(self, job: StagingJob) -> None:
        self._job = job
        self._kind = job.dataset.dataset_type
        self._probe = self._probe_and_decode if job.dataset.check == "decode" else probe
        self._stores_raw = not job.codecs
        self._writer = job.build.open_writer()
        buffer = BulkReader(_BUFFER_BYTES, job.library)
        self._span_buffer = SpanBuffer(buffer)
        self._bulk_writer = BulkUnitWriter(self._writer, MEDIA_FIELD, buffer)
        self.columns = StagedColumns()
        self.skipped: list[SkippedFile] = []
        self.formats: dict[str, FormatFigures] = {}

    def process_chunk(self, chunk: range) -> None:
        """Stage a chunk. Work per file is kept small, because reading 100 KB takes only tens of microseconds."""
        items = self._job.listing.items[chunk.start : chunk.stop]
        nbytes = sum([item.nbytes for item in items])
        if self._stores_raw:  # the sizes are known: charge the budget once for the whole chunk
            self._job.meter.charge(nbytes, sum([stored_bytes(item.nbytes) for item in items]))
        item_indices: list[int] = []
        infos: list[MediaInfo] = []
        captions: list[tuple[str, ...]] = []
        buffered_sizes = [span_reader.buffer_bytes(small_spans(item)) for item in items]
        for part in split_chunks(buffered_sizes, files=len(items), nbytes=_BUFFER_BYTES):
            self._span_buffer.load([span for item in items[part.start : part.stop] for span in small_spans(item)])
            for at in part:
                item = items[at]
                try:
                    text = self._read_captions(item) if isinstance(item.caption, FileSpan) else item.caption or ()
                    info = self._stage_item(item)
                except BrokenMediaError as error:
                    self.skipped.append(SkippedFile(item.name, str(error)))
                    if self._stores_raw:
                        self._job.meter.refund(item.nbytes, stored_bytes(item.nbytes))
                    continue
                item_indices.append(chunk.start + at)
                infos.append(info)
                captions.append(text)
            self._bulk_writer.flush()
        self.columns.extend(item_indices, infos, captions)
        if self._stores_raw:
            self._count_raw_formats([items[number - chunk.start].nbytes for number in item_indices], infos)
        with self._job.lock:
            self._job.phase.advance(len(chunk), nbytes)

    def close(self) -> None:
        self._writer.close()

    def _read_captions(self, item: SourceItem) -> tuple[str, ...]:
        syntax, settings = self._job.listing.caption_syntax, self._job.dataset.captions
        return span_reader.read_captions(item, syntax, settings, self._span_buffer.view)

    def _stage_item(self, item: SourceItem) -> MediaInfo:
        key, _, nbytes, media, _ = item
        if isinstance(media, int):
            content = self._job.source.read_row(media)
        elif nbytes <= _SMALL_BYTES:
            content = self._span_buffer.view(media)
        elif self._stores_raw and nbytes == media.file_bytes:
            return self._store_large_file(key, media)
        else:
            content = read_span(media)
        info = self._probe(content, self._kind)
        if not self._stores_raw:
            self._store_compressed(key, content, info.format)
        elif isinstance(media, FileSpan) and nbytes <= _SMALL_BYTES:
            self._bulk_writer.add(key, self._span_buffer.offset_of(media), nbytes)
        else:  # a file that is not in the buffer becomes a single unit
            self._bulk_writer.flush()
            with self._writer.begin(key) as unit:
                unit.put(MEDIA_FIELD, content)
        return info

    def _store_compressed(self, key: str, content: memoryview, format: str) -> None:
        """Store a file with the codec of its format, which may be RAW_CODEC."""
        codec = self._job.codecs[format].codec if format in self._job.codecs else RAW_CODEC
        nbytes = len(content)
        packed = content if codec == RAW_CODEC else compress(codec, content)
        self._job.meter.charge(nbytes, stored_bytes(len(packed)))
        with self._writer.begin(key) as unit:
            unit.put(MEDIA_FIELD, packed, codec=codec, raw_nbytes=nbytes)
        self.formats.setdefault(format, FormatFigures(codec=codec)).add(1, nbytes, len(packed))

    def _store_large_file(self, key: str, span: FileSpan) -> MediaInfo:
        """Copy a file that does not fit into the buffer directly into the arena, in pieces."""
        self._bulk_writer.flush()
        fd = span_reader.open_span(span)
        try:
            with self._writer.begin(key) as unit:
                info = self._probe(unit.put_file(MEDIA_FIELD, fd, span.nbytes), self._kind)
                span_reader.require_unchanged(os.fstat(fd), span)
        except OSError as error:  # an error of reading; errors of the arena are ArenaErrors
            raise BrokenMediaError(f"unreadable: {error.strerror}") from error
        finally:
            os.close(fd)
        return info

    def _probe_and_decode(self, view: memoryview, kind: MediaKind) -> MediaInfo:
        info = probe(view, kind)
        require_decodes(view, info, kind, self._job.decode_memory)
        return info

    def _count_raw_formats(self, sizes: list[int], infos: list[MediaInfo]) -> None:
        formats = [info.format for info in infos]
        for format in set(formats):
            format_sizes = [nbytes for nbytes, item_format in zip(sizes, formats, strict=True) if item_format == format]
            nbytes = sum(format_sizes)
            self.formats.setdefault(format, FormatFigures()).add(len(format_sizes), nbytes, nbytes)


def small_spans(item: SourceItem) -> list[FileSpan]:
    """The spans of an item that are small enough to be read together with others."""
    limits = ((item.media, _SMALL_BYTES), (item.caption, MAX_CAPTION_BYTES))
    return [span for span, max_bytes in limits if isinstance(span, FileSpan) and 0 < span.nbytes <= max_bytes]


def split_chunks(sizes: Sequence[int], *, files: int, nbytes: int) -> list[range]:
    """Split items into consecutive chunks of at most `files` items and about `nbytes` bytes."""
    chunks: list[range] = []
    begin = total = 0
    for at, size in enumerate(sizes):
        if at > begin and (at - begin >= files or total + size > nbytes):
            chunks.append(range(begin, at))
            begin, total = at, 0
        total += size
    if begin < len(sizes):
        chunks.append(range(begin, len(sizes)))
    return chunks


def run_workers(job: StagingJob, chunks: Sequence[range], threads: int) -> list[StageWorker]:
    """Process all chunks in up to `threads` threads with a worker each, and return the workers.

    The first error stops all of them and is raised; all threads have ended then.
    """
    remaining, lock, stopped = iter(chunks), threading.Lock(), threading.Event()

    def next_chunk() -> range | None:
        with lock:
            return None if stopped.is_set() else next(remaining, None)

    def run_worker() -> StageWorker:
        with StageWorker(job) as worker:
            while (chunk := next_chunk()) is not None:
                worker.process_chunk(chunk)
        return worker

    count = max(1, min(threads, len(chunks)))
    with ThreadPoolExecutor(count, thread_name_prefix="stage") as pool:
        try:
            futures = [pool.submit(run_worker) for _ in range(count)]
            return [future.result() for future in as_completed(futures)]
        finally:  # after an error or Ctrl-C, threads end after their current chunk
            stopped.set()
