"""SampleOrder: no sample is lost or repeated early, and any position is computed without the ones before it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.core.errors import SourceError
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.epoch_layout import locate_positions
from supertuner.data.ordering.micro_batches import micro_batches, shard_window
from supertuner.data.ordering.sample_order import BucketGroup, SampleOrder, draws_per_epoch


def group(dataset: int, size: int, width: int = 64, rate: Fraction = Fraction(1)) -> BucketGroup:
    bucket = Bucket(MediaKind.IMAGE, width, 64, 1, channels=3)
    return BucketGroup(dataset, f"set{dataset}", bucket, np.arange(size, dtype=np.uint32) + 1000 * width, rate)


RATES = st.sampled_from([Fraction(1), Fraction(2), Fraction(1, 2), Fraction(3, 7), Fraction(13, 4)])


@st.composite
def orders(draw: st.DrawFn, drop_last: bool | None = None) -> SampleOrder:
    count = draw(st.integers(1, 6))
    rates = [draw(RATES) for _ in range(3)]
    groups = [
        group(number % 3, draw(st.integers(1, 40)), 64 * (1 + number // 3), rates[number % 3])
        for number in range(count)
    ]
    drop = draw(st.booleans()) if drop_last is None else drop_last
    batch = draw(st.integers(1, min(7, max(len(g.sample_indices) for g in groups))) if drop else st.integers(1, 7))
    try:
        return SampleOrder(groups, seed=draw(st.integers(0, 2**40)), batch_size=batch, drop_last=drop)
    except SourceError:  # a rate below one can leave no full batch
        return SampleOrder(groups, seed=0, batch_size=1, drop_last=drop)


def listed(order: SampleOrder, begin: int, end: int) -> list[tuple[int, ...]]:
    draws = order.slice(begin, end)
    columns = (draws.position, draws.epoch, draws.group, draws.sample, draws.cycle)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(orders(drop_last=False))
@settings(max_examples=60, deadline=None)
def test_no_sample_is_lost_or_repeated_early(order):
    """After every epoch, the numbers of draws of a group's samples differ by at most one."""
    seen: Counter[tuple[int, int]] = Counter()
    for epoch in range(6):
        for _, _, number, sample, _ in listed(order, order.epoch_begin(epoch), order.epoch_begin(epoch + 1)):
            seen[number, sample] += 1
        for number, g in enumerate(order.groups):
            times = [seen[number, int(sample)] for sample in g.sample_indices]
            assert max(times) - min(times) <= 1
            assert abs(sum(times) - (epoch + 1) * len(times) * g.draws_per_epoch) <= 1


@given(orders(), st.integers(0, 300), st.integers(0, 60))
@settings(max_examples=80, deadline=None)
def test_a_slice_equals_that_part_of_the_whole_order(order, begin, length):
    whole = listed(order, 0, begin + length)
    assert listed(order, begin, begin + length) == whole[begin:]
    assert [row[0] for row in whole] == list(range(begin + length))
    draw = order.draw_at(begin)
    first = listed(order, begin, begin + 1)[0]
    assert (draw.epoch, draw.sample, draw.cycle) == (first[1], first[3], first[4])
    assert order.epoch_begin(draw.epoch) <= begin < order.epoch_begin(draw.epoch + 1)


@given(orders(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_position_of_inverts_locate_positions(order, epoch):
    layout = order.epoch_layout(epoch)
    positions = np.arange(layout.length)
    assert layout.position_of(*locate_positions([(layout, positions)])).tolist() == positions.tolist()
    assert layout.length == order.epoch_length(epoch)


@given(orders(), st.integers(0, 120))
@settings(max_examples=60, deadline=None)
def test_batches_have_one_bucket_and_cover_all_positions(order, begin):
    end = begin + 100
    expected = begin
    for batch in order.batches(begin, end):
        assert batch.position.tolist() == list(range(expected, expected + len(batch)))
        assert 1 <= len(batch) <= order.batch_size
        assert len({order.groups[g].bucket for g in batch.group}) == 1
        expected += len(batch)
    assert expected == end


@given(orders(drop_last=True))
@settings(max_examples=40, deadline=None)
def test_with_drop_last_every_batch_is_full(order):
    sizes = [len(batch) for batch in order.batches(0, order.batch_size * 40)]
    assert set(sizes) == {order.batch_size}


def test_without_drop_last_only_the_last_batch_of_a_bucket_is_short():
    order = SampleOrder([group(0, 10), group(0, 7, 128), group(1, 3)], seed=5, batch_size=4)
    sizes = Counter(len(batch) for batch in order.batches(0, order.epoch_length(0)))
    assert sizes == {4: 3, 2: 1, 3: 2}  # 10 = 4 + 4 + 2, 7 = 4 + 3, 3


def test_with_drop_last_the_dropped_samples_change_from_epoch_to_epoch():
    order = SampleOrder([group(0, 10)], seed=1, batch_size=4, drop_last=True)
    seen = {row[3] for row in listed(order, 0, order.epoch_begin(12))}
    assert order.epoch_length(0) == 8 and len(seen) == 10


def test_never_drawn_lists_groups_that_drop_last_always_drops():
    order = SampleOrder([group(0, 10), group(0, 3, 128)], seed=1, batch_size=4, drop_last=True)
    assert [len(g.sample_indices) for g in order.never_drawn()] == [3]
    assert SampleOrder([group(0, 10), group(0, 3, 128)], seed=1, batch_size=4).never_drawn() == []


def test_the_order_does_not_depend_on_the_order_in_which_datasets_are_listed():
    sets = [group(0, 9), group(1, 12, 128), group(2, 5)]
    forward, backward = (SampleOrder(listing, seed=3, batch_size=2) for listing in (sets, sets[::-1]))
    assert listed(forward, 0, 200) == listed(backward, 0, 200)


def test_another_process_computes_the_same_order():
    """The order must not depend on anything that differs between processes, such as Python's hash seed."""
    code = (
        "from tests.data.test_order import group, listed\n"
        "from supertuner.data.ordering.sample_order import SampleOrder, draws_per_epoch\n"
        "order = SampleOrder([group(0, 9), group(1, 12, 128, draws_per_epoch(2, 0.3))], seed=3, batch_size=2)\n"
        "print(listed(order, 0, 100))"
    )
    order = SampleOrder([group(0, 9), group(1, 12, 128, draws_per_epoch(2, 0.3))], seed=3, batch_size=2)
    for salt in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == str(listed(order, 0, 100))


def test_the_order_differs_between_seeds_and_between_epochs():
    order, reseeded = (SampleOrder([group(0, 50)], seed=seed, batch_size=1) for seed in (1, 2))
    first, second = ([row[3] for row in listed(order, 50 * e, 50 * e + 50)] for e in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert first != [row[3] for row in listed(reseeded, 0, 50)]


def test_every_sample_is_equally_likely_at_every_position_of_an_epoch():
    order = SampleOrder([group(0, 5), group(0, 4, 128)], seed=11, batch_size=2)
    epochs = 1000
    rows = np.array(listed(order, 0, 9 * epochs))
    table = np.zeros((9, 9))
    np.add.at(table, (rows[:, 0] % 9, np.unique(rows[:, 3], return_inverse=True)[1]), 1)
    even = table[:, :5]  # samples of the first bucket, whose short batch is at a random position
    spread = (even - even.mean(axis=1, keepdims=True)) ** 2 / even.mean(axis=1, keepdims=True)
    assert spread.sum() < 36 + 6 * np.sqrt(2 * 36)


def test_fractional_weights_are_exact_and_spread_over_epochs():
    assert draws_per_epoch(3, 0.1) == Fraction(3, 10)
    order = SampleOrder([group(0, 1, 64 * n, draws_per_epoch(1, 0.5)) for n in range(1, 201)], seed=0, batch_size=1)
    lengths = [order.epoch_length(epoch) for epoch in range(4)]
    assert lengths[0] + lengths[1] == 200 and all(70 < length < 130 for length in lengths)


def test_an_order_without_samples_is_refused():
    with pytest.raises(SourceError, match="drop_last"):
        SampleOrder([group(0, 3)], seed=0, batch_size=4, drop_last=True)
    with pytest.raises(SourceError, match="set-aside"):
        SampleOrder([], seed=0, batch_size=4)


def test_a_position_among_ten_million_samples_is_computed_within_a_tenth_of_a_second():
    groups = [group(d, 50_000, 64 * w, draws_per_epoch(1, 0.3)) for d in range(4) for w in range(1, 51)]
    begin = time.process_time()
    order = SampleOrder(groups, seed=1, batch_size=4)
    draw = order.draw_at(123_456_789)
    assert time.process_time() - begin < 0.1
    assert draw.epoch == order.epoch_at(123_456_789) and draw.position == 123_456_789


@given(orders(), st.integers(0, 200), st.integers(0, 90), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_micro_batches_cover_a_window_exactly_once_with_one_bucket_each(order, begin, length, size):
    window = range(begin, begin + length)
    batches = micro_batches(order, window, size)
    assert sorted(p for batch in batches for p in batch.draws.position.tolist()) == list(window)
    short = Counter(batch.bucket for batch in batches if len(batch) < size)
    assert all(1 <= len(batch) <= size for batch in batches) and set(short.values()) <= {1}
    for batch in batches:
        assert {order.groups[g].bucket for g in batch.draws.group} == {batch.bucket}


@given(st.integers(0, 10**9), st.integers(0, 500), st.integers(1, 40))
def test_the_shares_of_all_ranks_cover_the_window_and_differ_by_at_most_one(begin, length, world_size):
    window = range(begin, begin + length)
    shares = [shard_window(window, rank, world_size) for rank in range(world_size)]
    assert [p for share in shares for p in share] == list(window)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
