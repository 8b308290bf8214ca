"""Staging: a dataset's files become one arena of this node, or the arena that already holds them is reused."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.arena.build import Build
from supertuner.arena.format import Life
from supertuner.arena.home import Home, default_home
from supertuner.arena.peers import ALONE, Peers
from supertuner.arena.reader import Reader, Verify
from supertuner.config.settings.data import Dataset
from supertuner.core import bulk_io as many
from supertuner.core.errors import ArenaFull, DoesNotFit, SourceError
from supertuner.core.events import Decided, Measured, Progress, SetAside, Sink, Warned
from supertuner.core.host import Host
from supertuner.core.types import GIB, JSON, MIB, bytes_text
from supertuner.data.sources import open_source
from supertuner.data.sources.listing import Left, Listing, Source
from supertuner.data.staged import SET_ASIDE, StagedDataset
from supertuner.data.staging import budget as fit
from supertuner.data.staging import codec_trial as trial
from supertuner.data.staging.acquire import claim, older_versions
from supertuner.data.staging.capacity import room_of
from supertuner.data.staging.columns import CAPTION_INDEX, tables
from supertuner.data.staging.compress import RAW, Choice
from supertuner.data.staging.fingerprint import STAGED_VERSION, arena_name, fingerprint, origin
from supertuner.data.staging.follower import name_told, staged_told
from supertuner.data.staging.meter import Meter
from supertuner.data.staging.result import FormatFigures, StageResult, judge
from supertuner.data.staging.reuse import staged_earlier
from supertuner.data.staging.thread_pool import Crew, chunked
from supertuner.data.staging.worker import Job, StageWorker

MOST_THREADS = 72
_CHUNK_FILES = 64
_CHUNK_BYTES = 4 * MIB
"""As much as a worker reads at once."""


@dataclass(frozen=True, slots=True)
class Stager:
    """Where datasets are staged on this node, and who is told about it."""

    home: Home
    host: Host
    sink: Sink
    progress: Progress
    life: Life = "until_removed"
    verify: Verify = "on_demand"
    library: Path | None = field(default_factory=many.built)
    """What lets threads read small files at the same time, if it was built."""
    peers: Peers = ALONE
    """Processes of this node that follow; this one stages for them."""

    def stage(self, dataset: Dataset, place: str = "") -> StageResult:
        """Stage `dataset`, or find it staged. An arena kept for "run" only ends here: use `open` to work with it.

        Nobody reads it here, so checks that reading would bring are made now: all of an arena that is reused.
        """
        result, staged = self.open(dataset, place)
        with staged:
            if result.reused and self.verify != "on_demand":
                staged.verify(self.progress)
        return result

    def open(self, dataset: Dataset, place: str = "") -> tuple[StageResult, StagedDataset]:
        """Stage or reuse, and hold. `place` is what the dataset's block is called in the configuration."""
        began = time.perf_counter()
        place = place or f"datasets[{dataset.id}]"
        earlier = staged_earlier(self.home.path, dataset)
        if earlier is not None:
            name, reused = earlier.name, "its source is gone, and everything is in the arena"
            staged = StagedDataset.open(self.home, name, verify=self.verify)
        else:
            staged, name, reused = self._listed(dataset, place)
        try:
            result = self._result(dataset, staged, began, name, reused)
            self._report(dataset, result, place)
            staged_told(self.peers, dataset.id, name)
        except BaseException:
            staged.close()
            raise
        return result, staged

    def _listed(self, dataset: Dataset, place: str) -> tuple[StagedDataset, str, str]:
        """The dataset as its source is now, the arena's name, and why it was reused; "" for a fresh one."""
        source = open_source(dataset)
        with self.progress.phase(f"listing {dataset.id}"):
            mark = fingerprint(dataset, source.identity())
        name = arena_name(dataset.id, mark)
        name_told(self.peers, dataset.id, name)
        claimed = claim(self.home, name, self.life, self.verify, self.progress)
        if isinstance(claimed, Reader):
            return StagedDataset.of(claimed), name, "nothing has changed since it was staged"
        with claimed as build:
            _Staging(self, dataset, source, build, mark, place).run()
            return StagedDataset.open(self.home, name, verify=self.verify), name, ""

    def _result(self, dataset: Dataset, staged: StagedDataset, began: float, name: str, reused: str) -> StageResult:
        """The figures as the arena itself holds them, so that a reused one reports what a fresh one did."""
        meta = staged.meta
        arenas = self.home.ls()
        return StageResult(
            dataset=dataset.id,
            kind=staged.kind,
            arena=name,
            home=str(self.home.path),
            fingerprint=staged.fingerprint,
            reused=bool(reused),
            why_reused=reused,
            files=len(staged),
            nbytes=int(meta["bytes"]),
            stored_bytes=next(arena.nbytes for arena in arenas if arena.name == name),
            seconds=time.perf_counter() - began,
            formats=dict(meta["formats"]),
            set_aside=tuple(SetAside(dataset.id, file, reason) for file, reason in staged.set_aside()),
            without_caption=int(meta["without_caption"]),
            older=tuple((old.name, old.nbytes) for old in older_versions(arenas, dataset, name)),
        )

    def _report(self, dataset: Dataset, result: StageResult, place: str) -> None:
        """What the user should know of a dataset that is there now, fresh or reused."""
        name = f"datasets[{dataset.id}]"
        if not result.reused:
            self.sink.emit(Decided(f"{name}.arena", result.arena, "staged: no arena held it as it is now"))
        else:
            self.sink.emit(Decided(f"{name}.arena", f"{result.arena} reused", result.why_reused))
            self._doubt_limit(dataset, result)
            for one in result.set_aside:
                self.sink.emit(one)
            judge(dataset, result.set_aside, result.files, place)
        if result.without_caption and dataset.captions.source != "none":
            text = f"{result.without_caption} of {result.files} samples have no caption; they get an empty one"
            self.sink.emit(Warned(f"{name}.captions", text))
        if result.older:
            names = " ".join(old for old, _ in result.older)
            versions = "an older version is" if len(result.older) == 1 else f"{len(result.older)} older versions are"
            size = bytes_text(sum(nbytes for _, nbytes in result.older))
            where = "" if self.home.path == default_home() else f" --home {shlex.quote(str(self.home.path))}"
            text = f"{versions} still kept ({size}): `supertuner arena rm{where} {names}`"
            self.sink.emit(Warned(f"{name}.arena", text))
        self.sink.emit(Measured(f"{name}.staging", result.figures()))

    def _doubt_limit(self, dataset: Dataset, result: StageResult) -> None:
        """A limit bounds what is stored; what lies there already is not thrown away for it, but it is told."""
        limit = fit.limit_bytes(dataset.in_memory.memory_limit_gb)
        if dataset.type == "in_memory" and limit is not None and result.stored_bytes > limit:
            size, allowed = bytes_text(result.stored_bytes), bytes_text(limit)
            text = f"allows {allowed}, and the arena that is there already takes {size}; it is used all the same"
            self.sink.emit(Warned(f"datasets[{dataset.id}].in_memory.memory_limit_gb", text))


class _Staging:
    """One dataset on its way into an arena that is being built."""

    def __init__(self, stager: Stager, dataset: Dataset, source: Source, build: Build, mark: str, place: str) -> None:
        self._to = stager
        self._dataset = dataset
        self._name = f"datasets[{dataset.id}]"
        self._source = source
        self._build = build
        self._mark = mark
        self._place = place

    def run(self) -> None:
        """List, decide, copy, judge, seal. An error on the way leaves nothing behind: the build is abandoned."""
        listing = self._listing()
        choices = self._choices(listing)
        workers = self._copy(listing, choices)
        set_aside = self._set_aside(listing, workers)
        staged = sum(len(worker.columns) for worker in workers)
        judge(self._dataset, set_aside, staged, self._place)
        self._seal(listing, workers, set_aside)

    def _listing(self) -> Listing:
        listing = self._source.listing()
        for note in listing.notes:
            self._to.sink.emit(Warned(self._name, note))
        if not listing.items and not listing.left:
            notes = "".join(f"; {note}" for note in listing.notes)
            where = self._dataset.instance_data_dir
            raise SourceError(f"{self._name}: no {self._dataset.dataset_type} files in {str(where)!r}{notes}")
        chosen, _, why = listing.captions_from.partition(": ")
        self._decide("captions", chosen, why or "as configured")
        return listing

    def _choices(self, listing: Listing) -> dict[str, Choice]:
        """Codecs by format, with their reasons; none if everything is to be stored as it is."""
        setting = self._dataset.in_memory.compression
        choices = trial.choices(setting, listing.items, self._source)
        for choice in choices.values():
            self._decide(f"in_memory.compression.{choice.format}", choice.codec, choice.reason)
            if setting != "auto" and not choice.gains:
                text = f"{choice.codec} gains nothing on {choice.format} ({choice.reason}), and every read pays for it"
                self._warn("in_memory.compression", f'{text}; leave it out or set "auto"')
        return {} if all(choice.codec == RAW for choice in choices.values()) else choices

    def _copy(self, listing: Listing, choices: Mapping[str, Choice]) -> list[StageWorker]:
        sizes = [item.nbytes for item in listing.items]
        threads = self._threads()
        meter = self._meter(listing, sizes, threads, known=not choices)
        chunks = chunked(sizes, files=_CHUNK_FILES, nbytes=_CHUNK_BYTES)
        title = f"staging {self._dataset.id}"
        with self._to.progress.phase(title, items=len(sizes), nbytes=sum(sizes)) as phase:
            job = Job(self._dataset, self._source, listing, self._build, meter, choices, phase, self._library())
            try:
                return Crew(lambda: StageWorker(job), chunks, threads).run()
            except ArenaFull as error:
                raise DoesNotFit(meter.ran_out(str(error))) from error

    def _meter(self, listing: Listing, sizes: Sequence[int], threads: int, *, known: bool) -> Meter:
        """What watches over the budget; DoesNotFit at once if the files are stored as they are and are too large."""
        room, bound = self._room()
        overhead = fit.overhead_bytes(len(sizes), listing.key_bytes(), listing.caption_bytes(), threads)
        if known:
            need = sum(map(fit.stored_bytes, sizes)) + overhead
            fit.require(self._dataset.id, need, len(sizes), bound)
        host = self._to.host if room.in_memory else None
        return Meter(self._dataset.id, bound, host, len(sizes), sum(sizes), taken=overhead)

    def _room(self) -> tuple[fit.Room, fit.Budget]:
        """How much may be stored; says so where that is less than the user asked for."""
        settings = self._dataset.in_memory
        room = room_of(self._to.home.path, self._to.host, settings.memory_limit_gb)
        lowered = fit.lowered(room)
        if lowered is not None:
            text = f"is {settings.memory_limit_gb:g}, and this machine can give {bytes_text(lowered)}; lowered to that"
            self._warn("in_memory.memory_limit_gb", text)
            self._decide("in_memory.memory_limit_gb", round(lowered / GIB, 3), text)
        if not room.in_memory and settings.memory_limit_gb is not None:
            self._warn("in_memory.memory_limit_gb", "has no effect: this dataset's arena lies on a disk")
        if not room.in_memory and self._dataset.type == "in_memory":
            self._warn("type", f"is in_memory, and arena.home {self._to.home.path} is on a disk; name one on tmpfs")
        return room, fit.budget(room)

    def _library(self) -> Path | None:
        """The stager's; told if it is not there."""
        if self._to.library is None:
            text = "the package was installed without a C compiler: small files are staged by one thread at a time"
            self._warn("in_memory.num_workers", f"{text}; install one and reinstall to use more")
        return self._to.library

    def _threads(self) -> int:
        asked = self._dataset.in_memory.num_workers
        threads = asked or min(MOST_THREADS, self._to.host.cpus())
        reason = "as configured" if asked else f"the CPUs this process may use, at most {MOST_THREADS}"
        self._decide("in_memory.num_workers", threads, reason)
        return threads

    def _set_aside(self, listing: Listing, workers: Sequence[StageWorker]) -> list[SetAside]:
        """Everything broken, in one order whatever the threads did, and told."""
        left: list[Left] = [*listing.left, *(one for worker in workers for _, one in worker.left)]
        found = [SetAside(self._dataset.id, one.file, one.reason) for one in sorted(left)]
        for one in found:
            self._to.sink.emit(one)
        return found

    def _seal(self, listing: Listing, workers: Sequence[StageWorker], set_aside: Sequence[SetAside]) -> None:
        columns = tables([worker.columns for worker in workers])
        for table, values in columns.items():
            self._build.put_table(table, values)
        self._build.put_table(SET_ASIDE, _json_column([[one.file, one.reason] for one in set_aside]))
        formats: dict[str, FormatFigures] = {}
        for worker in workers:
            for format, figures in worker.formats.items():
                mine = formats.setdefault(format, FormatFigures(codec=figures.codec))
                mine.add(figures.files, figures.nbytes, figures.stored)
        self._build.seal(
            {
                "holds": "staged dataset",
                "version": STAGED_VERSION,
                "dataset": self._dataset.id,
                "kind": self._dataset.dataset_type.value,
                "fingerprint": self._mark,
                "source": str(self._dataset.instance_data_dir),
                "origin": origin(self._dataset),
                "bytes": sum(figures.nbytes for figures in formats.values()),
                "formats": {format: figures.as_json() for format, figures in sorted(formats.items())},
                "captions": listing.captions_from,
                "set_aside": len(set_aside),
                "without_caption": int(np.count_nonzero(np.diff(columns[CAPTION_INDEX]) == 0)),
            }
        )

    def _decide(self, what: str, value: JSON, reason: str) -> None:
        self._to.sink.emit(Decided(f"{self._name}.{what}", value, reason))

    def _warn(self, what: str, text: str) -> None:
        self._to.sink.emit(Warned(f"{self._name}.{what}", text))


def _json_column(value: JSON) -> NDArray[Any]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
