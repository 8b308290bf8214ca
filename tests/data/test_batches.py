"""Batches of real staged files: equal for any number of threads, with an error that names a broken sample."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import (
    AudioSettings,
    AugmentSettings,
    CaptionSettings,
    DatasetSettings,
)
from supertuner.core.errors import ArenaDamagedError, BrokenMediaError
from supertuner.core.types import MediaKind
from supertuner.data.batching.decoder_pool import DecodedBatch, DecoderPool, single_threaded_torch_pool
from supertuner.data.batching.prefetch import BatchPrefetcher
from supertuner.data.batching.render import render_sample
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.ordering.bucket_members import assign_buckets, bucket_arena_name, shared_bucket_members
from supertuner.data.ordering.micro_batches import MicroBatch, single_micro_batch
from supertuner.data.staging.stager import DatasetStager
from supertuner.tools.sample_data import make_sample_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    make_sample_data(folder, images=15, videos=4, sounds=4)
    return folder


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory) -> Corpus:
    return corpus_in(folder, tmp_path_factory.mktemp("arenas"))


def settings_for(folder: Path) -> list[DatasetSettings]:
    colour = AugmentSettings(flip=0.5, brightness=0.2, hue=0.1)
    return [
        DatasetSettings(
            id="images",
            instance_data_dir=folder / "images",
            resolution=128,
            bucket_step=32,
            crop="random",
            augment=colour,
            captions=CaptionSettings(shuffle_tags=True, keep_tags=1),
        ),
        DatasetSettings(
            id="videos",
            dataset_type=MediaKind.VIDEO,
            instance_data_dir=folder / "videos",
            resolution=64,
            bucket_step=32,
            frames=(5, 25),
            crop="random",
            augment=colour,
        ),
        DatasetSettings(
            id="sounds",
            dataset_type=MediaKind.AUDIO,
            instance_data_dir=folder / "sounds",
            audio=AudioSettings(sample_rate=16_000, channels=1, max_seconds=2),
            crop="random",
        ),
    ]


def corpus_in(folder: Path, home: Path) -> Corpus:
    stager = DatasetStager(ArenaHome(home), RunContext.silent(home))
    datasets = [(settings, stager.open(settings)[1]) for settings in settings_for(folder)]
    return build_corpus(datasets, seed=7, batch_size=3)


def plan(corpus: Corpus, begin: int = 0, end: int | None = None) -> list[MicroBatch]:
    stop = corpus.order.epoch_length(0) if end is None else end
    return [single_micro_batch(corpus.order, draws) for draws in corpus.order.batches(begin, stop)]


def decode_all(corpus: Corpus, threads: int, ahead: int, memory_bytes: int | None = None) -> list[DecodedBatch]:
    decoders = DecoderPool(corpus, threads, memory_bytes)
    with decoders, BatchPrefetcher(decoders, plan(corpus), ahead) as batches:
        return list(batches)


def same(left: DecodedBatch, right: DecodedBatch) -> bool:
    fields = [(b.bucket, b.captions, b.sample_keys, b.dataset_indices, b.positions, b.cycles) for b in (left, right)]
    return fields[0] == fields[1] and torch.equal(left.media, right.media)


def test_an_epoch_has_every_sample_once_in_the_shape_of_its_bucket(corpus):
    seen: Counter[tuple[int, str]] = Counter()
    for batch in decode_all(corpus, 2, 2):
        assert batch.media.shape == (len(batch), *batch.bucket.shape)
        assert batch.media.dtype == (torch.float32 if batch.bucket.kind is MediaKind.AUDIO else torch.uint8)
        assert batch.media.is_contiguous() and len(batch.captions) == len(batch)
        seen.update(zip(batch.dataset_indices, batch.sample_keys, strict=True))
    assert len(seen) == 23 and set(seen.values()) == {1}


def test_batches_do_not_depend_on_the_number_of_threads_or_batches_ahead(corpus):
    single, parallel = decode_all(corpus, 1, 0), decode_all(corpus, 5, 4)
    assert len(single) == len(parallel) and all(map(same, single, parallel))


def test_batches_do_not_depend_on_the_memory_for_decoding_not_even_if_every_sample_exceeds_it(corpus):
    plenty, too_little = decode_all(corpus, 5, 4), decode_all(corpus, 5, 4, memory_bytes=1)
    assert len(plenty) == len(too_little) and all(map(same, plenty, too_little))


def test_a_sample_does_not_depend_on_its_batch(corpus):
    by_position = {p: row for b in decode_all(corpus, 2, 1) for p, row in zip(b.positions, b.media, strict=True)}
    with DecoderPool(corpus, 2) as decoders:
        for micro in plan(corpus, begin=2):
            batch = decoders.decode(micro)
            for position, row in zip(batch.positions, batch.media, strict=True):
                assert torch.equal(row, by_position[position])


def test_a_sample_differs_between_cycles_and_repeats_within_one(corpus):
    dataset = corpus.datasets[0]
    bucket = dataset.members.buckets[0]
    sample = int(dataset.members.samples_in(0)[0])
    rows = [torch.empty(bucket.shape, dtype=torch.uint8) for _ in range(4)]
    for cycle, row in zip((0, 1, 2, 0), rows, strict=True):
        render_sample(corpus.seed, dataset, sample, cycle, bucket, row)
    assert torch.equal(rows[0], rows[3])
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])


def test_all_frames_of_a_clip_get_the_same_augmentation(corpus):
    """The background of a sample clip does not move, so its colour must be equal in all frames."""
    dataset = corpus.datasets[1]
    for number, bucket in enumerate(dataset.members.buckets):
        row = torch.empty(bucket.shape, dtype=torch.uint8)
        render_sample(corpus.seed, dataset, int(dataset.members.samples_in(number)[0]), 0, bucket, row)
        background = row[:, :, 1, 1].float()
        assert (background - background[:, :1]).abs().max() <= 6


def test_batches_do_not_need_the_source_folder_after_staging(tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    make_sample_data(moved, images=3, videos=1, sounds=1)
    corpus = corpus_in(moved, tmp_path / "arenas")
    moved.rename(tmp_path / "elsewhere")
    assert sum(len(batch) for batch in decode_all(corpus, 2, 1)) == 5


class TruncatedSamples:
    """A staged dataset with one truncated sample."""

    def __init__(self, samples, broken: int) -> None:
        self._samples, self._broken = samples, broken

    def __getattr__(self, name: str):
        return getattr(self._samples, name)

    def __len__(self) -> int:
        return len(self._samples)

    def media(self, i: int) -> memoryview:
        content = self._samples.media(i)
        return content[: len(content) // 2] if i == self._broken else content


def test_a_broken_sample_raises_an_error_when_its_batch_is_requested(corpus):
    dataset = corpus.datasets[0]
    damaged = build_corpus([(dataset.settings, TruncatedSamples(dataset.samples, 6))], seed=7, batch_size=3)
    micros = plan(damaged)
    broken_batch = next(n for n, micro in enumerate(micros) if 6 in micro.draws.sample)
    with DecoderPool(damaged, 2) as decoders, BatchPrefetcher(decoders, micros, batches_ahead=len(micros)) as batches:
        for _ in range(broken_batch):
            next(batches)
        with pytest.raises(BrokenMediaError, match=rf"datasets\[images\], sample '{dataset.samples.key(6)}'"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


class DamagedArenaSamples(TruncatedSamples):
    """A staged dataset whose arena is damaged at one sample."""

    def media(self, i: int) -> memoryview:
        if i == self._broken:
            raise ArenaDamagedError("segment", "a checksum differs")
        return self._samples.media(i)


def test_a_damaged_arena_is_not_reported_as_a_broken_file(corpus):
    dataset = corpus.datasets[0]
    damaged = build_corpus([(dataset.settings, DamagedArenaSamples(dataset.samples, 6))], seed=7, batch_size=3)
    with DecoderPool(damaged, 2) as decoders, pytest.raises(ArenaDamagedError, match="checksum"):
        list(BatchPrefetcher(decoders, plan(damaged), 1))


class CountingPlan:
    """Micro-batches that count how many were consumed."""

    def __init__(self, micros: list[MicroBatch]) -> None:
        self.consumed, self._micros = 0, micros

    def __iter__(self):
        for micro in self._micros:
            self.consumed += 1
            yield micro


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_batches_are_started_than_requested_and_allowed_ahead(corpus, ahead):
    watched = CountingPlan(plan(corpus))
    with DecoderPool(corpus, 2) as decoders, BatchPrefetcher(decoders, watched, ahead) as batches:
        assert watched.consumed == ahead
        for requested in range(1, 4):
            next(batches)
            time.sleep(0.01)
            assert watched.consumed == requested + ahead


def test_the_next_batches_are_decoded_while_one_is_used(corpus):
    with DecoderPool(corpus, 2) as decoders, BatchPrefetcher(decoders, plan(corpus), 2) as batches:
        next(batches)
        deadline = time.monotonic() + 20
        while not all(row.done() for pending in batches._pending for row in pending._row_futures):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(batches._pending) == 2


def decode_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_no_thread_remains_when_the_consumer_raises(corpus):
    with (
        pytest.raises(KeyError),
        DecoderPool(corpus, 3) as decoders,
        BatchPrefetcher(decoders, plan(corpus), 3) as batches,
    ):
        next(batches)
        raise KeyError
    assert decode_threads() == []


def test_no_thread_remains_when_the_consumer_drops_its_references(corpus):
    decoders = DecoderPool(corpus, 3)
    batches = BatchPrefetcher(decoders, plan(corpus), 3)
    next(batches)
    del decoders, batches
    gc.collect()
    deadline = time.monotonic() + 20
    while decode_threads():
        assert time.monotonic() < deadline, decode_threads()
        time.sleep(0.01)


def test_torch_uses_one_thread_in_decoders_and_the_same_number_elsewhere():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = single_threaded_torch_pool(3)
        try:
            inside = [pool.submit(torch.get_num_threads).result() for _ in range(6)]
            outside: list[int] = []
            thread = threading.Thread(target=lambda: outside.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert inside == [1] * 6 and outside == [2] and torch.get_num_threads() == 2
        finally:
            pool.shutdown()
    finally:
        torch.set_num_threads(before)


def test_the_bucket_table_of_a_large_dataset_is_shared_through_an_arena(corpus, tmp_path):
    home = ArenaHome(tmp_path / "home")
    for dataset in corpus.datasets:
        computed = assign_buckets(dataset.settings, dataset.samples)
        for _ in range(2):
            shared = shared_bucket_members(dataset.settings, dataset.samples, home, shared_min_entries=1)
            assert shared.buckets == computed.buckets
            for column in ("offsets", "samples", "unassigned"):
                assert np.array_equal(getattr(shared, column), getattr(computed, column))
            assert not shared.samples.flags.writeable
    assert len(home.list_arenas()) == len(corpus.datasets)


def test_the_name_of_the_bucket_arena_changes_with_the_bucket_settings(corpus):
    dataset = corpus.datasets[0]
    names = {
        bucket_arena_name(dataset.settings.model_copy(update=update), dataset.samples)
        for update in ({}, {"resolution": (256,)}, {"bucket_step": 16}, {"upscale": False}, {"max_aspect_ratio": 3.0})
    }
    same_name = bucket_arena_name(dataset.settings.model_copy(update={"repeats": 9}), dataset.samples)
    assert len(names) == 5 and same_name in names


def test_every_sample_has_a_bucket_or_a_reason(corpus):
    dataset = corpus.datasets[1]
    strict = dataset.settings.model_copy(update={"frames": (25,)})
    members = assign_buckets(strict, dataset.samples)
    all_samples = sorted([*members.samples.tolist(), *members.unassigned.tolist()])
    assert all_samples == list(range(len(dataset.samples))) and 0 < len(members.unassigned) < len(dataset.samples)
    reduced = build_corpus([(strict, dataset.samples)], seed=0, batch_size=1)
    events = list(reduced.datasets[0].unassigned_samples())
    assert len(events) == len(members.unassigned) and all("20 frames" in event.reason for event in events)


def test_resolution_mode_each_uses_each_sample_at_every_resolution(corpus):
    dataset = corpus.datasets[0]
    both = dataset.settings.model_copy(update={"resolution": (96, 128), "resolution_mode": "each"})
    members = assign_buckets(both, dataset.samples)
    assert Counter(members.samples.tolist()) == {n: 2 for n in range(len(dataset.samples))}
    near = dataset.settings.model_copy(update={"resolution": (127, 128), "resolution_mode": "each"})
    assert Counter(assign_buckets(near, dataset.samples).samples.tolist()) == {
        n: 1 for n in range(len(dataset.samples))
    }
