"""DatasetStager: copies a dataset's files into an arena of this node, or reuses an arena that contains them."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from supertuner.arena.build import ArenaBuild
from supertuner.arena.format import ArenaLifetime
from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.reader import ArenaReader, VerifyMode
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import DatasetSettings
from supertuner.core import bulk_io
from supertuner.core.closing import close_on_error
from supertuner.core.errors import ArenaBusyError, ArenaFullError, DoesNotFitError, SourceError
from supertuner.core.events import DecisionEvent, MeasurementEvent, SetAsideEvent, WarningEvent
from supertuner.core.interrupts import raise_lost_interrupt
from supertuner.core.types import GIB, JSON, MIB, bytes_text
from supertuner.data.decode.decode_memory import DecodeMemory, decode_memory_limit
from supertuner.data.sources import open_source
from supertuner.data.sources.listing import DataSource, SourceListing
from supertuner.data.staging import budget as fit
from supertuner.data.staging.arena_lookup import find_older_versions, find_staged_arena
from supertuner.data.staging.budget_meter import BudgetMeter, measure_capacity
from supertuner.data.staging.columns import CAPTION_INDEX, build_tables
from supertuner.data.staging.compress import RAW_CODEC, CodecChoice, choose_codecs
from supertuner.data.staging.fingerprint import STAGED_VERSION, arena_name, dataset_fingerprint, origin_digest
from supertuner.data.staging.follower import announce_arena, announce_staged
from supertuner.data.staging.result import FormatFigures, StageResult, require_few_broken
from supertuner.data.staging.staged_dataset import SET_ASIDE_TABLE, StagedDataset
from supertuner.data.staging.worker import StageWorker, StagingJob, run_workers, split_chunks

MAX_THREADS = 72
_POLL_S = 0.2
_CHUNK_FILES = 64
_CHUNK_BYTES = 4 * MIB
"""As much as a worker reads at once."""


@dataclass(frozen=True, slots=True)
class DatasetStager:
    """Stages datasets to a home on this node."""

    home: ArenaHome
    context: RunContext
    """Its peers, if any, wait for this process to stage."""
    life: ArenaLifetime = "until_removed"
    verify: VerifyMode = "on_demand"
    library: Path | None = field(default_factory=bulk_io.find_native_library)
    """The C library with which several threads can read small files at the same time; None if it was not built."""

    def stage(self, dataset: DatasetSettings, key_path: str = "") -> StageResult:
        """Stage `dataset` or find it staged, and close it. An arena with lifetime "run" is removed then: use `open`.

        A reused arena is verified completely now, because no read follows that would verify it.
        """
        result, staged = self.open(dataset, key_path)
        with staged:
            if result.reused and self.verify != "on_demand":
                staged.verify(self.context.progress)
        return result

    def open(self, dataset: DatasetSettings, key_path: str = "") -> tuple[StageResult, StagedDataset]:
        """Stage or reuse a dataset, and return it open. `key_path` is the path of its block in the configuration."""
        began = time.perf_counter()
        key_path = key_path or f"datasets[{dataset.id}]"
        staged_arena = find_staged_arena(self.home.path, dataset)
        if staged_arena is not None:
            name, reuse_reason = staged_arena.name, "its source is gone, and the arena contains everything"
            staged = StagedDataset.open(self.home, name, verify=self.verify)
        else:
            staged, name, reuse_reason = self._stage_from_source(dataset, key_path)
        with close_on_error(staged):
            result = self._build_result(dataset, staged, began, name, reuse_reason)
            self._report(dataset, result, key_path)
            announce_staged(self.context.peers, dataset.id, name)
        return result, staged

    def _stage_from_source(self, dataset: DatasetSettings, key_path: str) -> tuple[StagedDataset, str, str]:
        """The dataset as its source is now, the arena's name, and why it was reused; "" for a new arena."""
        source = open_source(dataset)
        with self.context.progress.phase(f"listing {dataset.id}"):
            fingerprint = dataset_fingerprint(dataset, source.fingerprint_parts())
        name = arena_name(dataset.id, fingerprint)
        announce_arena(self.context.peers, dataset.id, name)
        reader_or_build = self._acquire(name)
        if isinstance(reader_or_build, ArenaReader):
            return StagedDataset.from_reader(reader_or_build), name, "nothing has changed since it was staged"
        with reader_or_build as build:
            _StagingRun(self, dataset, source, build, fingerprint, key_path).run()
            return StagedDataset.open(self.home, name, verify=self.verify), name, ""

    def _acquire(self, name: str) -> ArenaBuild | ArenaReader:
        """A reader of the existing arena, validated and locked, or a new build of it.

        While another process builds the arena, this waits until that process finishes or dies. A damaged arena raises
        its error; it is not rebuilt silently.
        """
        self.home.sweep()  # removes expired arenas, which must not be reused, and leftovers that hold memory
        with suppress(ArenaBusyError):  # another process builds it: wait below
            return self.home.attach_or_build(name, life=self.life, verify=self.verify)
        shown_bytes = 0
        with self.context.progress.phase(f"waiting for another process that stages {name}") as phase:
            while True:
                nbytes = self.home.stored_bytes(name)
                phase.advance(nbytes=max(0, nbytes - shown_bytes))
                shown_bytes = max(shown_bytes, nbytes)
                time.sleep(_POLL_S)
                with suppress(ArenaBusyError):  # it is still building
                    return self.home.attach_or_build(name, life=self.life, verify=self.verify)

    def _build_result(
        self, dataset: DatasetSettings, staged: StagedDataset, began: float, name: str, reuse_reason: str
    ) -> StageResult:
        """The figures as stored in the arena, so that a reused arena reports the same as a new one."""
        meta = staged.meta
        arenas = self.home.list_arenas()
        return StageResult(
            dataset=dataset.id,
            kind=staged.kind,
            arena=name,
            home=str(self.home.path),
            fingerprint=staged.fingerprint,
            reused=bool(reuse_reason),
            reuse_reason=reuse_reason,
            files=len(staged),
            nbytes=int(meta["bytes"]),
            stored_bytes=next(arena.nbytes for arena in arenas if arena.name == name),
            seconds=time.perf_counter() - began,
            formats=dict(meta["formats"]),
            set_aside=tuple(SetAsideEvent(dataset.id, file, reason) for file, reason in staged.set_aside()),
            without_caption=int(meta["without_caption"]),
            older_arenas=tuple((old.name, old.nbytes) for old in find_older_versions(arenas, dataset, name)),
        )

    def _report(self, dataset: DatasetSettings, result: StageResult, key_path: str) -> None:
        """Emit events about a dataset that was staged or reused."""
        name = f"datasets[{dataset.id}]"
        if not result.reused:
            reason = "staged: no arena contains its current version"
            self.context.sink.emit(DecisionEvent(f"{name}.arena", result.arena, reason))
        else:
            self.context.sink.emit(DecisionEvent(f"{name}.arena", f"{result.arena} reused", result.reuse_reason))
            self._warn_over_limit(dataset, result)
            for broken in result.set_aside:
                self.context.sink.emit(broken)
            require_few_broken(dataset, result.set_aside, result.files, key_path)
        if result.without_caption and dataset.captions.source != "none":
            text = f"{result.without_caption} of {result.files} samples have no caption; an empty one is used"
            self.context.sink.emit(WarningEvent(f"{name}.captions", text))
        if result.older_arenas:
            names, count = " ".join(old for old, _ in result.older_arenas), len(result.older_arenas)
            versions = "an older version is" if count == 1 else f"{count} older versions are"
            size = bytes_text(sum(nbytes for _, nbytes in result.older_arenas))
            home_option = "" if self.home.path == default_home() else f" --home {shlex.quote(str(self.home.path))}"
            text = f"{versions} still kept ({size}): `supertuner arena rm{home_option} {names}`"
            self.context.sink.emit(WarningEvent(f"{name}.arena", text))
        self.context.sink.emit(MeasurementEvent(f"{name}.staging", result.figures()))

    def _warn_over_limit(self, dataset: DatasetSettings, result: StageResult) -> None:
        """Warn if a reused arena exceeds the limit, which applies only to new arenas."""
        limit = fit.memory_limit_bytes(dataset.in_memory.memory_limit_gb)
        if dataset.type == "in_memory" and limit is not None and result.stored_bytes > limit:
            size, allowed = bytes_text(result.stored_bytes), bytes_text(limit)
            text = f"allows {allowed}, but the existing arena has {size}; it is used anyway"
            self.context.sink.emit(WarningEvent(f"datasets[{dataset.id}].in_memory.memory_limit_gb", text))


@dataclass(frozen=True, slots=True)
class _StagingRun:
    """Stages one dataset into an arena that is being built."""

    _stager: DatasetStager
    _dataset: DatasetSettings
    _source: DataSource
    _build: ArenaBuild
    _fingerprint: str
    _key_path: str

    @property
    def _name(self) -> str:
        return f"datasets[{self._dataset.id}]"

    def run(self) -> None:
        """List, choose codecs, copy, check for broken files, and seal. After an error the build is abandoned."""
        listing = self._list_source()
        codecs = self._choose_codecs(listing)
        workers = self._copy_files(listing, codecs)
        raise_lost_interrupt()  # before files are reported as broken: one may have failed because of an interrupt
        set_aside = self._report_broken(listing, workers)
        staged_count = sum(len(worker.columns) for worker in workers)
        require_few_broken(self._dataset, set_aside, staged_count, self._key_path)
        self._seal(listing, workers, set_aside)

    def _list_source(self) -> SourceListing:
        listing = self._source.list_items()
        for note in listing.notes:
            self._stager.context.sink.emit(WarningEvent(self._name, note))
        if not listing.items and not listing.skipped:
            notes = "".join(f"; {note}" for note in listing.notes)
            directory = self._dataset.instance_data_dir
            raise SourceError(f"{self._name}: no {self._dataset.dataset_type} files in {str(directory)!r}{notes}")
        caption_source, _, why = listing.caption_origin.partition(": ")
        self._decide("captions", caption_source, why or "as configured")
        return listing

    def _choose_codecs(self, listing: SourceListing) -> dict[str, CodecChoice]:
        """Codecs by file format, with their reasons; empty if all files are stored uncompressed."""
        setting = self._dataset.in_memory.compression
        choices = choose_codecs(setting, listing.items, self._source)
        for choice in choices.values():
            self._decide(f"in_memory.compression.{choice.format}", choice.codec, choice.reason)
            if setting != "auto" and not choice.is_worthwhile:
                text = f"{choice.codec} gains nothing on {choice.format} ({choice.reason}) and slows down every read"
                self._warn("in_memory.compression", f'{text}; remove it or set "auto"')
        return {} if all(choice.codec == RAW_CODEC for choice in choices.values()) else choices

    def _copy_files(self, listing: SourceListing, codecs: Mapping[str, CodecChoice]) -> list[StageWorker]:
        sizes = [item.nbytes for item in listing.items]
        threads = self._choose_threads()
        capacity, budget = self._measure_budget()
        overhead = fit.overhead_bytes(len(sizes), listing.key_bytes(), listing.caption_bytes(), threads)
        if not codecs:  # the sizes are known
            needed_bytes = sum(map(fit.stored_bytes, sizes)) + overhead
            fit.require_fits(self._dataset.id, needed_bytes, len(sizes), budget)
        host = self._stager.context.host
        meter_host = host if capacity.in_memory else None
        meter = BudgetMeter(self._dataset.id, budget, meter_host, len(sizes), sum(sizes), overhead_bytes=overhead)
        decode_memory = DecodeMemory(decode_memory_limit(host, kept_bytes=sum(sizes) if capacity.in_memory else 0))
        chunks = split_chunks(sizes, files=_CHUNK_FILES, nbytes=_CHUNK_BYTES)
        title = f"staging {self._dataset.id}"
        with self._stager.context.progress.phase(title, items=len(sizes), nbytes=sum(sizes)) as phase:
            library = self._bulk_library()
            job = StagingJob(
                self._dataset, self._source, listing, self._build, meter, codecs, phase, library, decode_memory
            )
            try:
                return run_workers(job, chunks, threads)
            except ArenaFullError as error:
                raise DoesNotFitError(meter.out_of_space_message(str(error))) from error

    def _measure_budget(self) -> tuple[fit.StagingCapacity, fit.StagingBudget]:
        """How much may be stored. Emits a warning if that is less than the configured limit."""
        settings = self._dataset.in_memory
        capacity = measure_capacity(self._stager.home.path, self._stager.context.host, settings.memory_limit_gb)
        lowered = fit.lowered_memory_limit(capacity)
        if lowered is not None:
            text = f"is {settings.memory_limit_gb:g}, but this machine can provide {bytes_text(lowered)}; lowered"
            self._warn("in_memory.memory_limit_gb", text)
            self._decide("in_memory.memory_limit_gb", round(lowered / GIB, 3), text)
        if not capacity.in_memory and settings.memory_limit_gb is not None:
            self._warn("in_memory.memory_limit_gb", "has no effect: this dataset's arena is on a disk")
        if not capacity.in_memory and self._dataset.type == "in_memory":
            self._warn("type", f"is in_memory, but arena.home {self._stager.home.path} is on a disk; set one on tmpfs")
        return capacity, fit.compute_budget(capacity)

    def _bulk_library(self) -> Path | None:
        """The stager's C library. Emits a warning if it was not built."""
        if self._stager.library is None:
            text = "the package was installed without a C compiler: small files are staged by one thread at a time"
            self._warn("in_memory.num_workers", f"{text}; install one and reinstall to use more")
        return self._stager.library

    def _choose_threads(self) -> int:
        configured = self._dataset.in_memory.num_workers
        threads = configured or min(MAX_THREADS, self._stager.context.host.cpus())
        reason = "as configured" if configured else f"the CPUs this process may use, at most {MAX_THREADS}"
        self._decide("in_memory.num_workers", threads, reason)
        return threads

    def _report_broken(self, listing: SourceListing, workers: Sequence[StageWorker]) -> list[SetAsideEvent]:
        """Emit an event for each broken file, in an order that does not depend on the threads."""
        skipped = [*listing.skipped, *(file for worker in workers for file in worker.skipped)]
        broken = [SetAsideEvent(self._dataset.id, file.file, file.reason) for file in sorted(skipped)]
        for event in broken:
            self._stager.context.sink.emit(event)
        return broken

    def _seal(self, listing: SourceListing, workers: Sequence[StageWorker], set_aside: Sequence[SetAsideEvent]) -> None:
        columns = build_tables([worker.columns for worker in workers])
        for table, values in columns.items():
            self._build.put_table(table, values)
        reasons = json.dumps([[event.file, event.reason] for event in set_aside])
        self._build.put_table(SET_ASIDE_TABLE, np.frombuffer(reasons.encode(), np.uint8))
        formats: dict[str, FormatFigures] = {}
        for worker in workers:
            for format, figures in worker.formats.items():
                format_figures = formats.setdefault(format, FormatFigures(codec=figures.codec))
                format_figures.add(figures.files, figures.nbytes, figures.stored_bytes)
        self._build.seal(
            {
                "holds": "staged dataset",
                "version": STAGED_VERSION,
                "dataset": self._dataset.id,
                "kind": self._dataset.dataset_type.value,
                "fingerprint": self._fingerprint,
                "source": str(self._dataset.instance_data_dir),
                "origin": origin_digest(self._dataset),
                "bytes": sum(figures.nbytes for figures in formats.values()),
                "formats": {format: figures.as_json() for format, figures in sorted(formats.items())},
                "captions": listing.caption_origin,
                "set_aside": len(set_aside),
                "without_caption": int(np.count_nonzero(np.diff(columns[CAPTION_INDEX]) == 0)),
            }
        )

    def _decide(self, setting: str, value: JSON, reason: str) -> None:
        self._stager.context.sink.emit(DecisionEvent(f"{self._name}.{setting}", value, reason))

    def _warn(self, setting: str, text: str) -> None:
        self._stager.context.sink.emit(WarningEvent(f"{self._name}.{setting}", text))
