"""Batches of 8 cached latents from the training cache, compared with torch.load and safetensors per sample.

The latents are 1 GiB of noise in bf16, many times the last-level cache. Every rival returns the same: a new batch of 8
random latents as one contiguous tensor. The peers have one file per sample on the same tmpfs, as trainers store them,
in the page cache. The limit is memcpy: it copies the bytes of a batch from a contiguous place in an ordinary array of
the same size into a reused buffer. One thread each.

Most of the gain over the peers comes from not opening files, not unpickling and not copying twice; for larger latents
the copy itself dominates, and no cache can be faster than memcpy, whose own ratio is printed too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ClaimRow, at_least, in_memory_folder, interleave, paired, report, say
from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.cache.entries import EntryIndices, EntryRequest, NamedTensors
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.location import CacheLocation
from supertuner.cache.store import CacheStore

Batch = Callable[[NDArray[np.int64]], torch.Tensor]

DATA_BYTES = 1 << 30
BATCH = 8
BATCHES = 64
"""Batches per round of our cache; peers load fewer."""
PEER_BATCHES = 8
ROUNDS = 21
SIZES = {"128 KiB": (16, 64, 64), "512 KiB": (16, 128, 128)}
LIMITS = {"128 KiB": {"torch.load": 20.0, "safetensors": 10.0}, "512 KiB": {"torch.load": 10.0, "safetensors": 4.0}}
MEMCPY_SHARE = 0.6


def rows() -> list[ClaimRow]:
    torch.set_num_threads(1)
    found: list[ClaimRow] = []
    for label, shape in SIZES.items():
        count = DATA_BYTES // (2 * int(np.prod(shape)))
        bits = torch.from_numpy(np.random.default_rng(1).integers(-(1 << 15), 1 << 15, (count, *shape), np.int16))
        say(f"{label}: {count} latents of {shape}, batches of {BATCH}")
        found += size_rows(label, bits.view(torch.bfloat16))
    return found


def size_rows(label: str, latents: torch.Tensor) -> list[ClaimRow]:
    rng = np.random.default_rng(2)

    def play(batch: Batch, batches: int) -> Callable[[], None]:
        def go() -> None:
            for numbers in rng.integers(0, len(latents), (batches, BATCH)):
                batch(numbers)

        return go

    with in_memory_folder() as folder, cached(folder / "cache", latents) as ours:
        rivals = {"torch.load": torch_files(folder, latents), "safetensors": safetensors_files(folder, latents)}
        for batch in (ours, *rivals.values()):
            check(batch, latents)
        for first in range(0, len(latents), BATCH):  # a first epoch, after which every page is mapped
            ours(np.arange(first, first + BATCH))
        timings = interleave(
            {
                "cache": play(ours, BATCHES),
                "memcpy": play(memcpy(latents), BATCHES),
                **{name: play(batch, PEER_BATCHES) for name, batch in rivals.items()},
            },
            ROUNDS,
        )
    per_round = {"cache": BATCHES, "memcpy": BATCHES, "torch.load": PEER_BATCHES, "safetensors": PEER_BATCHES}
    for name, timing in timings.items():
        speed = per_round[name] * BATCH / timing.median_s
        say(f"  {name:<12} {speed:>10,.0f} samples/s  {speed * latents[0].nbytes / 1e9:6.2f} GB/s   a round: {timing}")
    share = paired(timings["memcpy"], timings["cache"])
    found = [at_least(f"cached latents of {label}, share of memcpy", share, MEMCPY_SHARE)]
    for name in rivals:
        scale = BATCHES / PEER_BATCHES
        most = paired(timings[name], timings["memcpy"], scale).median
        ratio = paired(timings[name], timings["cache"], scale)
        limit = LIMITS[label][name]
        found.append(at_least(f"cached latents of {label}, times {name}", ratio, limit, note=f"memcpy: {most:.3g} ×"))
    return found


@contextmanager
def cached(folder: Path, latents: torch.Tensor) -> Iterator[Batch]:
    """The latents in a cache store, read as training reads them: indices → references → one new tensor."""
    space = CacheNamespace("latents", "bench", "bfloat16")
    place = CacheLocation(ArenaHome(folder), "run", True, "on_demand", "", "")
    keys = space.entry_keys(f"{number}".encode() for number in range(len(latents)))

    def make(places: EntryIndices) -> Generator[tuple[int, NamedTensors], None, None]:
        for number in places.tolist():
            yield number, {"latents": latents[number]}

    with CacheStore(place, space, RunContext.silent(folder)) as store:
        store.fill(EntryRequest(keys, make))
        refs = store.find(keys)
        yield lambda numbers: store.entries.gather(refs[numbers])["latents"]


def torch_files(folder: Path, latents: torch.Tensor) -> Batch:
    for number, one in enumerate(latents):
        torch.save(one.clone(), folder / f"{number}.pt")

    def batch(numbers: NDArray[np.int64]) -> torch.Tensor:
        return torch.stack([torch.load(folder / f"{number}.pt", weights_only=True) for number in numbers])

    return batch


def safetensors_files(folder: Path, latents: torch.Tensor) -> Batch:
    from safetensors.torch import load_file, save_file

    for number, one in enumerate(latents):
        save_file({"latents": one.contiguous()}, folder / f"{number}.safetensors")

    def batch(numbers: NDArray[np.int64]) -> torch.Tensor:
        return torch.stack([load_file(folder / f"{number}.safetensors")["latents"] for number in numbers])

    return batch


def memcpy(latents: torch.Tensor) -> Batch:
    flat = latents.clone()
    out = torch.empty_like(flat[:BATCH])
    last = len(flat) - BATCH

    def batch(numbers: NDArray[np.int64]) -> torch.Tensor:
        first = min(int(numbers[0]), last)
        return out.copy_(flat[first : first + BATCH])

    return batch


def check(batch: Batch, latents: torch.Tensor) -> None:
    """Assert that a batch is right, bit for bit."""
    numbers = np.array([5, 1, len(latents) - 1, 5, 0, 7, 2, 3])
    same = batch(numbers).view(torch.int16)
    assert torch.equal(same, latents[torch.from_numpy(numbers)].view(torch.int16))


def main() -> int:
    return report(rows(), title="cached latents")


if __name__ == "__main__":
    sys.exit(main())
