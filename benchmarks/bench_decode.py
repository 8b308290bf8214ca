"""Decoding a folder of JPEG files into batches, compared with torch's DataLoader and Pillow, on the same two CPUs.

The peer is the usual recipe in its documented fast mode: two persistent worker processes with prefetching; Pillow
decodes the file, crops and resizes in one call (`resize(box=…)`, with `draft`, which lets libjpeg reduce large
pictures), collated into one uint8 tensor (docs.pytorch.org/docs/stable/data.html, "Multi-process data loading"). The
peer reads files from the page cache, we read them from the arena; both produce the same 1024×1024 pictures with the
same filter. Each round is one epoch: no rival has batches ready when it begins or keeps working after its end. Staging
is not timed, because it happens once before the first epoch. CPU affinity limits both to two CPUs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import ClaimRow, at_least, interleave, paired, report, say
from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.run_context import RunContext
from supertuner.config.settings import data as settings
from supertuner.data.batching.decoder_pool import DecoderPool
from supertuner.data.batching.prefetch import BatchPrefetcher
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.decode.resize import ResizeFilter, crop_box
from supertuner.data.ordering.micro_batches import single_micro_batch
from supertuner.data.staging.stager import DatasetStager

SIDE, BATCH, ROUNDS, CPUS = 1024, 4, 7, 2
LIMIT = 1.3
PILLOW: dict[ResizeFilter, Image.Resampling] = {
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
}
CASES = {"1400×1100": ((1400, 1100), 48), "4000×3000": ((4000, 3000), 16)}
"""Size of the pictures, and number of files per epoch."""


def make_folder(folder: Path, size: tuple[int, int], files: int) -> None:
    """Write files with the detail of photographs: smooth shapes with a little noise, quality 90."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(files):
        shapes = Image.fromarray(rng.integers(0, 255, (size[1] // 40, size[0] // 40, 3), dtype=np.uint8))
        picture = np.asarray(shapes.resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
        noise = rng.normal(0, 6, (size[1], size[0], 1)).astype(np.int16)
        Image.fromarray((picture + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{number:04d}.jpg", quality=90)


class JpegFolderDataset(Dataset[torch.Tensor]):
    """The peer's dataset: opens, decodes, crops and resizes a file."""

    def __init__(self, folder: Path, by: ResizeFilter) -> None:
        self.files = sorted(folder.glob("*.jpg"))
        self.by = PILLOW[by]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self.files[number]) as file:
            file.draft("RGB", (2 * SIDE, 2 * SIDE))  # as our decoder does: never below twice the final size
            picture = file.convert("RGB")
        box = crop_box(*picture.size, SIDE, SIDE, 0.5, 0.5)
        region = (box.left, box.top, box.left + box.width, box.top + box.height)
        small = picture.resize((SIDE, SIDE), self.by, box=region)
        return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def one_thread(_: int) -> None:
    torch.set_num_threads(1)


def peer(folder: Path, by: ResizeFilter) -> Callable[[], None]:
    loader = DataLoader(
        JpegFolderDataset(folder, by),
        batch_size=BATCH,
        shuffle=True,
        num_workers=CPUS,
        prefetch_factor=2,
        persistent_workers=True,
        worker_init_fn=one_thread,
    )

    def epoch() -> None:
        for batch in loader:
            assert batch.shape == (BATCH, 3, SIDE, SIDE)

    return epoch


def ours(corpus: Corpus, decoders: DecoderPool) -> Callable[[], None]:
    epochs = count()

    def epoch() -> None:
        number = next(epochs)
        order = corpus.order
        draws = order.batches(order.epoch_begin(number), order.epoch_begin(number + 1))
        for batch in BatchPrefetcher(
            decoders, (single_micro_batch(order, batch_draws) for batch_draws in draws), batches_ahead=2
        ):
            assert batch.media.shape == (BATCH, 3, SIDE, SIDE)

    return epoch


def race(name: str, by: ResizeFilter, folder: Path, home: Path) -> ClaimRow:
    dataset = settings.DatasetSettings(
        id="bench", instance_data_dir=folder, resolution=(SIDE,), max_aspect_ratio=1.0, resize_filter=by
    )
    _, staged = DatasetStager(ArenaHome(home), RunContext.silent(home)).open(dataset)
    corpus = build_corpus([(dataset, staged)], seed=0, batch_size=BATCH)
    with staged, DecoderPool(corpus, CPUS) as decoders:
        rivals = {"ours": ours(corpus, decoders), "DataLoader": peer(folder, by)}
        timings = interleave(rivals, rounds=ROUNDS)
    for rival, timing in timings.items():
        say(f"{name} JPEG, {by}, {rival:<10}  {len(staged) / timing.median_s:6.1f} pictures/s   {timing}")
    note = "" if by == "lanczos" else "with a cheap filter, decoding (libjpeg-turbo for both) dominates"
    label = f"{name} JPEG to {SIDE}×{SIDE} batches, {by}, times DataLoader"
    return at_least(label, paired(timings["DataLoader"], timings["ours"]), LIMIT, note=note)


def rows() -> list[ClaimRow]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CPUS])
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="bench-decode-"))
    home = Path(tempfile.mkdtemp(prefix="bench-decode-", dir=default_home().parent))
    try:
        for name, (size, files) in CASES.items():
            make_folder(work / name, size, files)
        return [race(name, by, work / name, home / name) for name in CASES for by in PILLOW]
    finally:
        shutil.rmtree(work)
        shutil.rmtree(home)


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
