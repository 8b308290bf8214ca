"""Random batched gather from the arena, compared with memcpy and with other stores, warm, for three sample sizes.

The samples are 2 GiB of noise, many times the last-level cache, and every batch is drawn from all of them. Each rival
has read all samples once before timing starts, and fills the same buffer of one batch again and again. The limit is
memcpy, which copies whole batches from an ordinary array of the same 2 GiB. One thread each, except the DataLoader's 2
workers.

The row of each peer also shows the ratio of memcpy to that peer in the same rounds: a store that copies every byte once
cannot do better, so a larger limit cannot be met on this machine with one thread. Large batches are also gathered with
one thread per CPU, without a limit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import (
    ClaimRow,
    RivalTiming,
    at_least,
    in_memory_folder,
    interleave,
    noted,
    paired,
    report,
    say,
    skipped,
)
from benchmarks.peers import PEERS, Bytes, Gather, Opener, dataloader_rounds, webdataset_gather
from supertuner.arena.home import ArenaHome
from supertuner.core.host import HostFacts

DATA_BYTES = 2 << 30
ROUND_BYTES = 200 << 20
BATCH_BYTES = 6 << 20
LARGE_BATCH_BYTES = 64 << 20
MEMCPY_ROUNDS = 41
ROUNDS = 15
FEW_ROUNDS = 5
LONG_ROUND_S = 0.5
SIZES = {"4 KB": 4096, "100 KB": 100_000, "1 MB": 1_000_000}
MEMCPY_SHARE = 0.80
LIMITS = {
    "LMDB": 1.5,
    "HF datasets": 4.0,
    "HF datasets, Arrow by hand": 4.0,
    "safetensors": 5.0,
    "Mosaic MDS": 5.0,
    "torch DataLoader, 2 workers": 15.0,
}
"""How many times faster than the peer, for samples of 100 KB; other sizes have only the limit of memcpy."""
LIMITED = "100 KB"
MANY_FILES = 50_000


@dataclass(frozen=True, slots=True)
class GatherScenario:
    """The samples of one size; `batches()` draws a new round of random batches."""

    label: str
    samples: Bytes
    rng: np.random.Generator
    batch_bytes: int = BATCH_BYTES

    @property
    def nbytes(self) -> int:
        return int(self.samples.shape[1])

    @property
    def batch(self) -> int:
        return max(1, self.batch_bytes // self.nbytes)

    @property
    def round_samples(self) -> int:
        return self.batch * max(1, ROUND_BYTES // (self.batch * self.nbytes))

    def batches(self) -> list[NDArray[np.int64]]:
        numbers = self.rng.integers(0, len(self.samples), self.round_samples)
        return list(numbers.reshape(-1, self.batch))

    def read_all(self, gather: Gather) -> None:
        """Read every sample once, as a first epoch does, so that stores with memory maps have all pages mapped."""
        out = np.zeros((self.batch, self.nbytes), np.uint8)
        for first in range(0, len(self.samples) - self.batch, self.batch):
            gather(np.arange(first, first + self.batch), out)

    def rounds_of(self, gather: Gather) -> Callable[[], None]:
        """A function that gathers one round of batches into the same buffer."""
        out = np.zeros((self.batch, self.samples.shape[1]), np.uint8)

        def play() -> None:
            for numbers in self.batches():
                gather(numbers, out)

        return play


def rows() -> list[ClaimRow]:
    found: list[ClaimRow] = []
    for label, nbytes in SIZES.items():
        rng = np.random.default_rng(nbytes)
        count = DATA_BYTES // nbytes
        scene = GatherScenario(label, rng.integers(0, 256, (count, nbytes), np.uint8), rng)
        say(f"{label}: {count:,} samples, batches of {scene.batch}, {scene.round_samples:,} samples a round")
        found += scene_rows(scene)
    return found


def scene_rows(scene: GatherScenario) -> list[ClaimRow]:
    with in_memory_folder() as folder, arena_of(scene, folder / "arenas") as ours:
        check(scene, ours)
        scene.read_all(ours)
        timings = interleave(
            {"arena": scene.rounds_of(ours), "memcpy": scene.rounds_of(memcpy_of(scene))}, MEMCPY_ROUNDS
        )
        print_speed(scene, "memcpy", timings["memcpy"])
        print_speed(scene, "arena", timings["arena"])
        name = f"gather of {scene.label}, share of memcpy"
        found = [at_least(name, paired(timings["memcpy"], timings["arena"]), MEMCPY_SHARE)]
        found.append(by_all_cpus(replace(scene, batch_bytes=LARGE_BATCH_BYTES), ours))
        for peer, opener in PEERS.items():
            found.append(against(scene, ours, peer, partial(peer_rounds, scene, opener)))
        if len(scene.samples) <= MANY_FILES:
            found.append(against(scene, ours, "torch DataLoader, 2 workers", partial(loader_rounds, scene)))
    return found


def by_all_cpus(scene: GatherScenario, ours: Callable[..., None]) -> ClaimRow:
    """Large batches, each copied by one thread per CPU, compared with memcpy on one thread."""
    threads = HostFacts().cpus()
    many = partial(ours, threads=threads)
    check(scene, many)
    timings = interleave({"arena": scene.rounds_of(many), "memcpy": scene.rounds_of(memcpy_of(scene))}, ROUNDS)
    print_speed(scene, f"arena, {threads} threads", timings["arena"])
    name = f"gather of {scene.label} in batches of 64 MiB, {threads} threads, times memcpy on one"
    return noted(name, paired(timings["memcpy"], timings["arena"]))


def against(scene: GatherScenario, ours: Gather, peer: str, begin: Callable[[Path], Callable[[], None]]) -> ClaimRow:
    """Time the arena and one peer in turns."""
    name = f"gather of {scene.label}, times {peer}"
    limit = LIMITS.get(peer) if scene.label == LIMITED else None
    with in_memory_folder() as folder:
        try:
            play = begin(folder)
        except ModuleNotFoundError as error:
            say(f"  {peer}: skipped, {error.name} is not installed here (make bench installs it)")
            return skipped(name, limit or float("nan"), f"{error.name} is not installed")
        # The slowest peers differ by much more than the machine's noise, so fewer rounds are enough.
        rounds = ROUNDS if seconds_of(play) < LONG_ROUND_S else FEW_ROUNDS
        memcpy = scene.rounds_of(memcpy_of(scene))
        timings = interleave({"arena": scene.rounds_of(ours), "memcpy": memcpy, "peer": play}, rounds, warmup=0)
    print_speed(scene, peer, timings["peer"])
    ratio = paired(timings["peer"], timings["arena"])
    note = f"memcpy: {paired(timings['peer'], timings['memcpy']).median:.3g} ×"
    return noted(name, ratio, note=note) if limit is None else at_least(name, ratio, limit, note=note)


def seconds_of(play: Callable[[], None]) -> float:
    """Seconds of one round after a first one for warming up."""
    play()
    begin = time.perf_counter()
    play()
    return time.perf_counter() - begin


def peer_rounds(scene: GatherScenario, opener: Opener, folder: Path) -> Callable[[], None]:
    gather = opener(folder, scene.samples)
    if opener is not webdataset_gather:  # it returns samples in sequence and ignores the indices
        check(scene, gather)
        scene.read_all(gather)
    return scene.rounds_of(gather)


def loader_rounds(scene: GatherScenario, folder: Path) -> Callable[[], None]:
    play = dataloader_rounds(folder, scene.samples)
    return lambda: play(scene.batches())


def memcpy_of(scene: GatherScenario) -> Gather:
    """Copies a batch from one contiguous place: the limit of the hardware."""
    last = len(scene.samples) - scene.batch

    def gather(numbers: NDArray[np.int64], out: Bytes) -> None:
        first = min(int(numbers[0]), last)
        np.copyto(out, scene.samples[first : first + len(out)])

    return gather


@contextmanager
def arena_of(scene: GatherScenario, home: Path) -> Iterator[Callable[..., None]]:
    """The samples in an arena, read through the reader that training uses."""
    arenas = ArenaHome(home)
    with arenas.build("gather") as build:
        with build.open_writer() as writer:
            for number, sample in enumerate(scene.samples):
                with writer.begin(f"{number:08}") as unit:
                    unit.put("media", sample)
                    unit.commit()
        build.seal({})
    with arenas.attach("gather") as reader:
        yield reader.gather


def check(scene: GatherScenario, gather: Gather) -> None:
    """Assert that the gathered bytes are right."""
    numbers = scene.batches()[0]
    out = np.zeros((len(numbers), scene.samples.shape[1]), np.uint8)
    gather(numbers, out)
    assert np.array_equal(out, scene.samples[numbers])


def print_speed(scene: GatherScenario, name: str, timing: RivalTiming) -> None:
    per_second = scene.round_samples / timing.median_s
    gigabytes = per_second * scene.samples.shape[1] / 1e9
    say(f"  {name:<28} {per_second:>12,.0f} samples/s  {gigabytes:6.2f} GB/s   a round: {timing}")


def main() -> int:
    return report(rows(), title="random batched gather")


if __name__ == "__main__":
    sys.exit(main())
