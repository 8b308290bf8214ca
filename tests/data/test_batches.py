"""Batches from real staged files: the same whatever the threads, with the sample named where one is broken."""

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
    LoaderSettings,
)
from supertuner.core.errors import ArenaDamagedError, BrokenMediaError
from supertuner.core.events import DecisionEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import MediaKind
from supertuner.data.batching.decoder_pool import DecodedBatch, DecoderPool, single_threaded_torch_pool
from supertuner.data.batching.prefetch import BatchPrefetcher, open_prefetcher
from supertuner.data.batching.render import render_sample
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.ordering.bucket_members import assign_buckets, bucket_arena_name, shared_bucket_members
from supertuner.data.ordering.micro_batches import MicroBatch, single_micro_batch
from supertuner.data.staging.stager import DatasetStager
from supertuner.tools.sample_data import make_sample_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("sample")
    make_sample_data(made, images=15, videos=4, sounds=4)
    return made


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


def decode_all(corpus: Corpus, threads: int, ahead: int) -> list[DecodedBatch]:
    with DecoderPool(corpus, threads) as decoders, BatchPrefetcher(decoders, plan(corpus), ahead) as batches:
        return list(batches)


def same(one: DecodedBatch, other: DecodedBatch) -> bool:
    facts = [(b.bucket, b.captions, b.sample_keys, b.dataset_indices, b.positions, b.cycles) for b in (one, other)]
    return facts[0] == facts[1] and torch.equal(one.media, other.media)


def test_an_epoch_has_every_sample_once_in_the_shape_of_its_bucket(corpus):
    seen: Counter[tuple[int, str]] = Counter()
    for batch in decode_all(corpus, 2, 2):
        assert batch.media.shape == (len(batch), *batch.bucket.shape)
        assert batch.media.dtype == (torch.float32 if batch.bucket.kind is MediaKind.AUDIO else torch.uint8)
        assert batch.media.is_contiguous() and len(batch.captions) == len(batch)
        seen.update(zip(batch.dataset_indices, batch.sample_keys, strict=True))
    assert len(seen) == 23 and set(seen.values()) == {1}


def test_batches_are_the_same_whatever_the_threads_and_how_far_ahead(corpus):
    alone, crowd = decode_all(corpus, 1, 0), decode_all(corpus, 5, 4)
    assert len(alone) == len(crowd) and all(map(same, alone, crowd))


def test_a_sample_is_the_same_in_whatever_batch_it_comes(corpus):
    whole = {p: row for b in decode_all(corpus, 2, 1) for p, row in zip(b.positions, b.media, strict=True)}
    with DecoderPool(corpus, 2) as decoders:
        for micro in plan(corpus, begin=2):
            batch = decoders.decode(micro)
            for position, row in zip(batch.positions, batch.media, strict=True):
                assert torch.equal(row, whole[position])


def test_another_epoch_changes_crops_and_captions_and_another_order_does_not(corpus):
    part = corpus.parts[0]
    bucket = part.members.buckets[0]
    sample = int(part.members.of(0)[0])
    rows = [torch.empty(bucket.shape, dtype=torch.uint8) for _ in range(4)]
    for turn, row in zip((0, 1, 2, 0), rows, strict=True):
        render_sample(corpus.seed, part, sample, turn, bucket, row)
    assert torch.equal(rows[0], rows[3])
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])


def test_all_frames_of_a_clip_get_the_same_change(folder, corpus):
    """The ground of a drawn clip does not move: its colour must stay the same from frame to frame."""
    part = corpus.parts[1]
    for place, bucket in enumerate(part.members.buckets):
        row = torch.empty(bucket.shape, dtype=torch.uint8)
        render_sample(corpus.seed, part, int(part.members.of(place)[0]), 0, bucket, row)
        ground = row[:, :, 1, 1].float()
        assert (ground - ground[:, :1]).abs().max() <= 6


def test_the_source_folder_may_go_once_it_is_staged(folder, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    make_sample_data(moved, images=3, videos=1, sounds=1)
    corpus = corpus_in(moved, tmp_path / "arenas")
    moved.rename(tmp_path / "elsewhere")
    assert sum(len(batch) for batch in decode_all(corpus, 2, 1)) == 5


class TruncatedSamples:
    """A staged dataset, one of whose samples has other bytes."""

    def __init__(self, samples, broken: int) -> None:
        self._samples, self._broken = samples, broken

    def __getattr__(self, name: str):
        return getattr(self._samples, name)

    def __len__(self) -> int:
        return len(self._samples)

    def media(self, i: int) -> memoryview:
        content = self._samples.media(i)
        return content[: len(content) // 2] if i == self._broken else content


def test_a_broken_sample_is_named_where_its_batch_is_asked_for_and_not_before(corpus):
    part = corpus.parts[0]
    damaged = build_corpus([(part.settings, TruncatedSamples(part.samples, 6))], seed=7, batch_size=3)
    micros = plan(damaged)
    guilty = next(n for n, micro in enumerate(micros) if 6 in micro.draws.sample)
    with DecoderPool(damaged, 2) as decoders, BatchPrefetcher(decoders, micros, batches_ahead=len(micros)) as batches:
        for _ in range(guilty):
            next(batches)
        with pytest.raises(BrokenMediaError, match=rf"datasets\[images\], sample '{part.samples.key(6)}'"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


class DamagedArenaSamples(TruncatedSamples):
    """A staged dataset whose arena is damaged under one of its samples."""

    def media(self, i: int) -> memoryview:
        if i == self._broken:
            raise ArenaDamagedError("segment", "a checksum differs")
        return self._samples.media(i)


def test_a_damaged_arena_is_not_blamed_on_the_file(corpus):
    part = corpus.parts[0]
    rotten = build_corpus([(part.settings, DamagedArenaSamples(part.samples, 6))], seed=7, batch_size=3)
    with DecoderPool(rotten, 2) as decoders, pytest.raises(ArenaDamagedError, match="checksum"):
        list(BatchPrefetcher(decoders, plan(rotten), 1))


class CountingPlan:
    """A plan that counts how much of it was taken."""

    def __init__(self, micros: list[MicroBatch]) -> None:
        self.taken, self._micros = 0, micros

    def __iter__(self):
        for micro in self._micros:
            self.taken += 1
            yield micro


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_batches_are_begun_than_asked_for_and_allowed_ahead(corpus, ahead):
    watched = CountingPlan(plan(corpus))
    with DecoderPool(corpus, 2) as decoders, BatchPrefetcher(decoders, watched, ahead) as batches:
        assert watched.taken == ahead
        for asked in range(1, 4):
            next(batches)
            time.sleep(0.01)
            assert watched.taken == asked + ahead


def test_while_a_batch_is_used_the_next_ones_are_made(corpus):
    with DecoderPool(corpus, 2) as decoders, BatchPrefetcher(decoders, plan(corpus), 2) as batches:
        next(batches)
        deadline = time.monotonic() + 20
        while not all(row.done() for pending in batches._pending for row in pending._row_futures):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(batches._pending) == 2


def test_the_loaders_settings_are_obeyed_and_the_choice_of_threads_is_told(corpus):
    told: list[object] = []

    class Ear:
        def emit(self, event, /) -> None:
            told.append(event)

    watched = CountingPlan(plan(corpus))
    settings = LoaderSettings(prefetch_batches=3, num_workers=2)
    with open_prefetcher(corpus, watched, settings, host=HostFacts(), sink=Ear()) as batches:
        assert watched.taken == 3 and len(decode_threads()) == 2
        assert sum(len(batch) for batch in batches) == 23
    assert decode_threads() == [] and told == [DecisionEvent("loader.num_workers", 2, "as configured")]


def decode_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_no_thread_is_left_when_the_consumer_raises(corpus):
    with (
        pytest.raises(KeyError),
        DecoderPool(corpus, 3) as decoders,
        BatchPrefetcher(decoders, plan(corpus), 3) as batches,
    ):
        next(batches)
        raise KeyError
    assert decode_threads() == []


def test_no_thread_is_left_when_the_consumer_walks_away(corpus):
    decoders = DecoderPool(corpus, 3)
    batches = BatchPrefetcher(decoders, plan(corpus), 3)
    next(batches)
    del decoders, batches
    gc.collect()
    deadline = time.monotonic() + 20
    while decode_threads():
        assert time.monotonic() < deadline, decode_threads()
        time.sleep(0.01)


def test_torch_computes_alone_in_decoders_and_as_before_elsewhere():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = single_threaded_torch_pool(3)
        try:
            inside = [pool.submit(torch.get_num_threads).result() for _ in range(6)]
            elsewhere: list[int] = []
            fresh = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
            fresh.start()
            fresh.join()
            assert inside == [1] * 6 and elsewhere == [2] and torch.get_num_threads() == 2
        finally:
            pool.shutdown()
    finally:
        torch.set_num_threads(before)


def test_a_large_datasets_buckets_are_shared_through_an_arena_and_found_again(corpus, tmp_path):
    home = ArenaHome(tmp_path / "home")
    for part in corpus.parts:
        own = assign_buckets(part.settings, part.samples)
        for _ in range(2):
            shared = shared_bucket_members(part.settings, part.samples, home, shared_min_entries=1)
            assert shared.buckets == own.buckets
            for column in ("begins", "samples", "left_out"):
                assert np.array_equal(getattr(shared, column), getattr(own, column))
            assert not shared.samples.flags.writeable
    assert len(home.list_arenas()) == len(corpus.parts)


def test_the_table_of_buckets_is_another_one_when_a_rule_of_buckets_changes(corpus):
    part = corpus.parts[0]
    names = {
        bucket_arena_name(part.settings.model_copy(update=update), part.samples)
        for update in ({}, {"resolution": (256,)}, {"bucket_step": 16}, {"upscale": False}, {"max_aspect_ratio": 3.0})
    }
    same_name = bucket_arena_name(part.settings.model_copy(update={"repeats": 9}), part.samples)
    assert len(names) == 5 and same_name in names


def test_every_sample_is_a_member_once_or_left_out_with_its_reason(corpus):
    part = corpus.parts[1]
    strict = part.settings.model_copy(update={"frames": (25,)})
    members = assign_buckets(strict, part.samples)
    together = sorted([*members.samples.tolist(), *members.unassigned.tolist()])
    assert together == list(range(len(part.samples))) and 0 < len(members.unassigned) < len(part.samples)
    reduced = build_corpus([(strict, part.samples)], seed=0, batch_size=1)
    told = list(reduced.datasets[0].unassigned_samples())
    assert len(told) == len(members.unassigned) and all("20 frames" in one.reason for one in told)


def test_each_resolution_gives_each_sample_an_entry(corpus):
    part = corpus.parts[0]
    both = part.settings.model_copy(update={"resolution": (96, 128), "resolution_mode": "each"})
    members = assign_buckets(both, part.samples)
    assert Counter(members.samples.tolist()) == {n: 2 for n in range(len(part.samples))}
    near = part.settings.model_copy(update={"resolution": (127, 128), "resolution_mode": "each"})
    assert Counter(assign_buckets(near, part.samples).samples.tolist()) == {n: 1 for n in range(len(part.samples))}
