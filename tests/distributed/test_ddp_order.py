"""The order of samples is the same on any number of ranks, and each sample of a window belongs to exactly one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.distributed.process_group import ProcessGroup, SingleProcess
from supertuner.optim.schedule import BatchRamp, TrainingSchedule
from supertuner.train.run.dataloader import LoaderOptions, TrainingDataLoader
from tests.train.run.test_dataloader import EXPERTS, NumberedSamples, build_collator, build_schedule


@dataclass(frozen=True)
class RankStub(SingleProcess):
    """A process group that only has a rank and a world size."""

    rank: int = 0
    world_size: int = 1
    forward_is_collective: bool = False


def trained_by(
    parallel: ProcessGroup, sizes: tuple[int, ...], run: TrainingSchedule, batch_size: int, begin: int = 0
) -> list[Any]:
    """For each window, what this rank trains: position → the bytes of its sample, noise and sigma."""
    loader = TrainingDataLoader(
        build_collator(sizes, batch_size, NumberedSamples()),
        run,
        EXPERTS,
        LoaderOptions(batch_size, switch_every=2, batches_ahead=1),
        parallel,
        start_step=begin,
    )
    with loader:
        return [
            {
                position: (window.plan.expert_index, *(t[row].numpy().tobytes() for t in batch.tensors()))
                for batch in window
                if not batch.idle
                for row, position in enumerate(batch.positions)
            }
            for window in loader
        ]


def fingerprint(ranks: int, *of: Any, collective: bool = False) -> str:
    """A hash over all windows of all ranks, in the order of positions."""
    shares = [trained_by(RankStub(rank, ranks, forward_is_collective=collective), *of) for rank in range(ranks)]
    digest = xxhash.xxh3_128()
    for own in zip(*shares, strict=True):
        together: dict[int, tuple[Any, ...]] = {}
        for one in own:
            assert not together.keys() & one.keys(), "a sample was trained twice"
            together |= one
        for position in sorted(together):
            digest.update(repr((position, together[position])).encode())
        digest.update(b"window")
    return digest.hexdigest()


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, 9),) * 3),
    batch_size=st.integers(1, 4),
    start=st.integers(1, 5),
    grow=st.integers(0, 6),
    total=st.integers(1, 30),
    collective=st.booleans(),
)
def test_the_order_hash_does_not_depend_on_the_number_of_processes(
    sizes: tuple[int, int, int], batch_size: int, start: int, grow: int, total: int, collective: bool
) -> None:
    of = (sizes, build_schedule(BatchRamp(start, start + grow, 20), total), batch_size)
    alone = fingerprint(1, *of)
    assert {fingerprint(ranks, *of, collective=collective) for ranks in (2, 4)} == {alone}


@settings(max_examples=6, deadline=None)
@given(sizes=st.tuples(*(st.integers(1, 9),) * 3), total=st.integers(6, 30), data=st.data())
def test_a_run_may_resume_on_another_number_of_ranks_at_any_step(
    sizes: tuple[int, int, int], total: int, data: st.DataObject
) -> None:
    run = build_schedule(BatchRamp(3, 7, 20), total)
    step = data.draw(st.integers(0, run.total_steps - 1))
    whole = trained_by(SingleProcess(), sizes, run, 2)[step:]
    shares = [trained_by(RankStub(rank, 4), sizes, run, 2, step) for rank in range(4)]
    for window, own in zip(whole, zip(*shares, strict=True), strict=True):
        assert {position: sample for one in own for position, sample in one.items()} == window


def test_ranks_that_shard_weights_compute_equally_many_batches_per_window() -> None:
    run = build_schedule(BatchRamp(1, 9, 30), 60)
    for ranks in (2, 4):
        plans = []
        for rank in range(ranks):
            loader = TrainingDataLoader(
                build_collator((9, 4, 7), 2, NumberedSamples()),
                run,
                EXPERTS,
                LoaderOptions(2, switch_every=2, batches_ahead=1),
                RankStub(rank, ranks, forward_is_collective=True),
            )
            with loader:
                plans.append([(window.plan.local_batches, len(list(window))) for window in loader])
        assert all(own == plans[0] for own in plans)
        assert all(planned == made > 0 for planned, made in plans[0])
