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

from supertuner.arena.home import Home
from supertuner.config.settings.data import AudioSettings, Augment, Captions, Dataset, LoaderSettings
from supertuner.core.errors import ArenaDamaged, BrokenMedia
from supertuner.core.events import Decided, Silence
from supertuner.core.host import Host
from supertuner.core.types import MediaKind
from supertuner.data.batching.batches import Batch, Decoders, pinned_pool
from supertuner.data.batching.prefetch import Prefetcher, prefetched
from supertuner.data.batching.render import render
from supertuner.data.corpus import Corpus, corpus_of
from supertuner.data.ordering.members import members_of, shared_members, table_name
from supertuner.data.ordering.windows import MicroBatch, single
from supertuner.data.staging.stage import Stager
from supertuner.tools.sample_data import make_sample_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("sample")
    make_sample_data(made, images=15, videos=4, sounds=4)
    return made


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory) -> Corpus:
    return corpus_in(folder, tmp_path_factory.mktemp("arenas"))


def settings_for(folder: Path) -> list[Dataset]:
    colour = Augment(flip=0.5, brightness=0.2, hue=0.1)
    return [
        Dataset(
            id="images",
            instance_data_dir=folder / "images",
            resolution=128,
            bucket_step=32,
            crop="random",
            augment=colour,
            captions=Captions(shuffle_tags=True, keep_tags=1),
        ),
        Dataset(
            id="videos",
            dataset_type=MediaKind.VIDEO,
            instance_data_dir=folder / "videos",
            resolution=64,
            bucket_step=32,
            frames=(5, 25),
            crop="random",
            augment=colour,
        ),
        Dataset(
            id="sounds",
            dataset_type=MediaKind.AUDIO,
            instance_data_dir=folder / "sounds",
            audio=AudioSettings(sample_rate=16_000, channels=1, max_seconds=2),
            crop="random",
        ),
    ]


def corpus_in(folder: Path, home: Path) -> Corpus:
    stager = Stager(Home(home), Host(), Silence(), Silence())
    datasets = [(settings, stager.open(settings)[1]) for settings in settings_for(folder)]
    return corpus_of(datasets, seed=7, batch_size=3)


def plan(corpus: Corpus, begin: int = 0, end: int | None = None) -> list[MicroBatch]:
    stop = corpus.order.epoch_length(0) if end is None else end
    return [single(corpus.order, draws) for draws in corpus.order.batches(begin, stop)]


def made(corpus: Corpus, threads: int, ahead: int) -> list[Batch]:
    with Decoders(corpus, threads) as decoders, Prefetcher(decoders, plan(corpus), ahead) as batches:
        return list(batches)


def same(one: Batch, other: Batch) -> bool:
    facts = [(b.bucket, b.captions, b.keys, b.datasets, b.positions, b.turns) for b in (one, other)]
    return facts[0] == facts[1] and torch.equal(one.media, other.media)


def test_an_epoch_has_every_sample_once_in_the_shape_of_its_bucket(corpus):
    seen: Counter[tuple[int, str]] = Counter()
    for batch in made(corpus, 2, 2):
        assert batch.media.shape == (len(batch), *batch.bucket.shape)
        assert batch.media.dtype == (torch.float32 if batch.bucket.kind is MediaKind.AUDIO else torch.uint8)
        assert batch.media.is_contiguous() and len(batch.captions) == len(batch)
        seen.update(zip(batch.datasets, batch.keys, strict=True))
    assert len(seen) == 23 and set(seen.values()) == {1}


def test_batches_are_the_same_whatever_the_threads_and_how_far_ahead(corpus):
    alone, crowd = made(corpus, 1, 0), made(corpus, 5, 4)
    assert len(alone) == len(crowd) and all(map(same, alone, crowd))


def test_a_sample_is_the_same_in_whatever_batch_it_comes(corpus):
    whole = {p: row for b in made(corpus, 2, 1) for p, row in zip(b.positions, b.media, strict=True)}
    with Decoders(corpus, 2) as decoders:
        for micro in plan(corpus, begin=2):
            batch = decoders.make(micro)
            for position, row in zip(batch.positions, batch.media, strict=True):
                assert torch.equal(row, whole[position])


def test_another_epoch_changes_crops_and_captions_and_another_order_does_not(corpus):
    part = corpus.parts[0]
    bucket = part.members.buckets[0]
    sample = int(part.members.of(0)[0])
    rows = [torch.empty(bucket.shape, dtype=torch.uint8) for _ in range(4)]
    for turn, row in zip((0, 1, 2, 0), rows, strict=True):
        render(corpus.seed, part, sample, turn, bucket, row)
    assert torch.equal(rows[0], rows[3])
    assert not torch.equal(rows[0], rows[1]) and not torch.equal(rows[1], rows[2])


def test_all_frames_of_a_clip_get_the_same_change(folder, corpus):
    """The ground of a drawn clip does not move: its colour must stay the same from frame to frame."""
    part = corpus.parts[1]
    for place, bucket in enumerate(part.members.buckets):
        row = torch.empty(bucket.shape, dtype=torch.uint8)
        render(corpus.seed, part, int(part.members.of(place)[0]), 0, bucket, row)
        ground = row[:, :, 1, 1].float()
        assert (ground - ground[:, :1]).abs().max() <= 6


def test_the_source_folder_may_go_once_it_is_staged(folder, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    make_sample_data(moved, images=3, videos=1, sounds=1)
    corpus = corpus_in(moved, tmp_path / "arenas")
    moved.rename(tmp_path / "elsewhere")
    assert sum(len(batch) for batch in made(corpus, 2, 1)) == 5


class Damaged:
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
    damaged = corpus_of([(part.settings, Damaged(part.samples, 6))], seed=7, batch_size=3)
    micros = plan(damaged)
    guilty = next(n for n, micro in enumerate(micros) if 6 in micro.draws.sample)
    with Decoders(damaged, 2) as decoders, Prefetcher(decoders, micros, ahead=len(micros)) as batches:
        for _ in range(guilty):
            next(batches)
        with pytest.raises(BrokenMedia, match=rf"datasets\[images\], sample '{part.samples.key(6)}'"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


class Rotten(Damaged):
    """A staged dataset whose arena is damaged under one of its samples."""

    def media(self, i: int) -> memoryview:
        if i == self._broken:
            raise ArenaDamaged("segment", "a checksum differs")
        return self._samples.media(i)


def test_a_damaged_arena_is_not_blamed_on_the_file(corpus):
    part = corpus.parts[0]
    rotten = corpus_of([(part.settings, Rotten(part.samples, 6))], seed=7, batch_size=3)
    with Decoders(rotten, 2) as decoders, pytest.raises(ArenaDamaged, match="checksum"):
        list(Prefetcher(decoders, plan(rotten), 1))


class Watched:
    """A plan that counts how much of it was taken."""

    def __init__(self, micros: list[MicroBatch]) -> None:
        self.taken, self._micros = 0, micros

    def __iter__(self):
        for micro in self._micros:
            self.taken += 1
            yield micro


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_batches_are_begun_than_asked_for_and_allowed_ahead(corpus, ahead):
    watched = Watched(plan(corpus))
    with Decoders(corpus, 2) as decoders, Prefetcher(decoders, watched, ahead) as batches:
        assert watched.taken == ahead
        for asked in range(1, 4):
            next(batches)
            time.sleep(0.01)
            assert watched.taken == asked + ahead


def test_while_a_batch_is_used_the_next_ones_are_made(corpus):
    with Decoders(corpus, 2) as decoders, Prefetcher(decoders, plan(corpus), 2) as batches:
        next(batches)
        deadline = time.monotonic() + 20
        while not all(row.done() for pending in batches._begun for row in pending._rows):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(batches._begun) == 2


def test_the_loaders_settings_are_obeyed_and_the_choice_of_threads_is_told(corpus):
    told: list[object] = []

    class Ear:
        def emit(self, event, /) -> None:
            told.append(event)

    watched = Watched(plan(corpus))
    settings = LoaderSettings(prefetch_batches=3, num_workers=2)
    with prefetched(corpus, watched, settings, host=Host(), sink=Ear()) as batches:
        assert watched.taken == 3 and len(decode_threads()) == 2
        assert sum(len(batch) for batch in batches) == 23
    assert decode_threads() == [] and told == [Decided("loader.num_workers", 2, "as configured")]


def decode_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_no_thread_is_left_when_the_consumer_raises(corpus):
    with (
        pytest.raises(KeyError),
        Decoders(corpus, 3) as decoders,
        Prefetcher(decoders, plan(corpus), 3) as batches,
    ):
        next(batches)
        raise KeyError
    assert decode_threads() == []


def test_no_thread_is_left_when_the_consumer_walks_away(corpus):
    decoders = Decoders(corpus, 3)
    batches = Prefetcher(decoders, plan(corpus), 3)
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
        pool = pinned_pool(3)
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
    home = Home(tmp_path / "home")
    for part in corpus.parts:
        own = members_of(part.settings, part.samples)
        for _ in range(2):
            shared = shared_members(part.settings, part.samples, home, shared_from=1)
            assert shared.buckets == own.buckets
            for column in ("begins", "samples", "left_out"):
                assert np.array_equal(getattr(shared, column), getattr(own, column))
            assert not shared.samples.flags.writeable
    assert len(home.ls()) == len(corpus.parts)


def test_the_table_of_buckets_is_another_one_when_a_rule_of_buckets_changes(corpus):
    part = corpus.parts[0]
    names = {
        table_name(part.settings.model_copy(update=update), part.samples)
        for update in ({}, {"resolution": (256,)}, {"bucket_step": 16}, {"upscale": False}, {"max_aspect_ratio": 3.0})
    }
    same_name = table_name(part.settings.model_copy(update={"repeats": 9}), part.samples)
    assert len(names) == 5 and same_name in names


def test_every_sample_is_a_member_once_or_left_out_with_its_reason(corpus):
    part = corpus.parts[1]
    strict = part.settings.model_copy(update={"frames": (25,)})
    members = members_of(strict, part.samples)
    together = sorted([*members.samples.tolist(), *members.left_out.tolist()])
    assert together == list(range(len(part.samples))) and 0 < len(members.left_out) < len(part.samples)
    reduced = corpus_of([(strict, part.samples)], seed=0, batch_size=1)
    told = list(reduced.parts[0].left_out())
    assert len(told) == len(members.left_out) and all("20 frames" in one.reason for one in told)


def test_each_resolution_gives_each_sample_an_entry(corpus):
    part = corpus.parts[0]
    both = part.settings.model_copy(update={"resolution": (96, 128), "resolution_mode": "each"})
    members = members_of(both, part.samples)
    assert Counter(members.samples.tolist()) == {n: 2 for n in range(len(part.samples))}
    near = part.settings.model_copy(update={"resolution": (127, 128), "resolution_mode": "each"})
    assert Counter(members_of(near, part.samples).samples.tolist()) == {n: 1 for n in range(len(part.samples))}
