"""Windows and batches: functions of positions, the same from any step on, and never too many made ahead."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.ordering.micro_batches import MicroBatch
from supertuner.data.ordering.sample_order import BucketGroup, SampleOrder
from supertuner.distributed.process_group import SingleProcess
from supertuner.models.objective.diffusion import TimestepDistribution
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.schedule import BatchRamp, TrainingSchedule, equal_window_spans
from supertuner.train.run.dataloader import BatchCollator, LoaderOptions, TrainingDataLoader, batches_ahead

EXPERTS = (Expert("high_noise", "transformer", 0.875, 1.0), Expert("low_noise", "transformer_2", 0.0, 0.875))
BUCKETS = tuple(Bucket(MediaKind.IMAGE, side, side, channels=3) for side in (16, 32, 48))


class NumberedSamples:
    """Latents that contain the number of their sample; each bucket has its own shape."""

    def __init__(self) -> None:
        self.made = 0
        self.gate = threading.Event()
        self.gate.set()

    def latents(self, micro: MicroBatch) -> Tensors:
        self.gate.wait()
        self.made += 1
        side = micro.bucket.width // 16
        samples = torch.from_numpy(micro.draws.sample.astype(np.float32))
        return {"latents": samples.view(-1, 1, 1).expand(-1, side, side).contiguous()}

    def texts(self, micro: MicroBatch) -> list[Tensors]:
        return [{"embeds": torch.tensor([float(sample)])} for sample in micro.draws.sample]


def build_collator(sizes: tuple[int, ...], batch_size: int, encoded: Any) -> BatchCollator:
    begins = np.concatenate([[0], np.cumsum(sizes)])
    groups = [
        BucketGroup(0, "d", bucket, np.arange(begin, end, dtype=np.uint32))
        for bucket, begin, end in zip(BUCKETS, begins[:-1], begins[1:], strict=False)
    ]
    order = SampleOrder(groups, seed=3, batch_size=batch_size)
    samples = SimpleNamespace(id="d", key=str)
    corpus: Any = SimpleNamespace(order=order, datasets=(SimpleNamespace(samples=samples),), seed=3)
    family: Any = SimpleNamespace(pad_text=lambda model, texts: {"embeds": torch.stack([t["embeds"] for t in texts])})
    model: Any = SimpleNamespace(micro_conditioning=False)
    return BatchCollator(corpus, encoded, family, model, lambda shape: TimestepDistribution("logit_normal"), 3, None)


def build_schedule(ramp: BatchRamp, total: int) -> TrainingSchedule:
    parts = equal_window_spans(ramp)
    made = TrainingSchedule(ramp, total, 0, "", parts)
    steps = 0
    begin = 0
    while begin < total:
        begin += parts[max(i for i, p in enumerate(parts) if p.first_position <= begin)].window_size
        steps += 1
    return TrainingSchedule(made.ramp, total, steps, "", parts)


def build_loader(
    making: BatchCollator, run: TrainingSchedule, batch_size: int, begin: int = 0, ahead: int = 2
) -> TrainingDataLoader:
    return TrainingDataLoader(
        making,
        run,
        EXPERTS,
        LoaderOptions(batch_size, switch_every=2, batches_ahead=ahead),
        SingleProcess(),
        start_step=begin,
    )


def all_windows(
    making: BatchCollator, run: TrainingSchedule, batch_size: int, begin: int = 0, ahead: int = 2
) -> list[tuple[Any, list[Any]]]:
    with build_loader(making, run, batch_size, begin, ahead) as loader:
        return [(window.plan, list(window)) for window in loader]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, 9),) * 3),
    batch_size=st.integers(1, 5),
    start=st.integers(1, 4),
    grow=st.integers(0, 9),
    length=st.integers(1, 60),
    total=st.integers(1, 70),
    data=st.data(),
)
def test_a_loader_started_at_any_step_gives_the_same_batches(sizes, batch_size, start, grow, length, total, data):
    making, run = (
        build_collator(sizes, batch_size, NumberedSamples()),
        build_schedule(BatchRamp(start, start + grow, length), total),
    )
    whole = all_windows(making, run, batch_size)
    assert [p for plan, _ in whole for p in plan.positions] == list(range(total))
    for plan, batches in whole:
        assert sorted(p for batch in batches for p in batch.positions) == list(plan.positions)
        assert all(len(batch) <= batch_size for batch in batches)
    step, ahead = data.draw(st.integers(0, run.total_steps - 1)), data.draw(st.sampled_from([0, 1, 2]))
    again = all_windows(making, run, batch_size, step, ahead)
    for (plan, batches), (expected, known) in zip(again, whole[step:], strict=True):
        assert plan == expected
        for one, other in zip(batches, known, strict=True):
            assert one.positions == other.positions
            for mine, theirs in zip(one.tensors(), other.tensors(), strict=True):
                assert torch.equal(mine, theirs)


@settings(max_examples=20, deadline=None)
@given(sizes=st.tuples(*(st.integers(1, 9),) * 3), cuts=st.tuples(st.integers(1, 7), st.integers(1, 7)))
def test_noise_and_sigma_of_a_sample_do_not_depend_on_its_batch(sizes, cuts):
    run = build_schedule(BatchRamp(6, 6), sum(sizes) * 2)
    making = build_collator(sizes, 4, NumberedSamples())
    found = [
        {
            position: (batch.noise[row], batch.sigmas[row], batch.latents[row])
            for _, batches in all_windows(making, run, cut)
            for batch in batches
            for row, position in enumerate(batch.positions)
        }
        for cut in cuts
    ]
    assert found[0].keys() == found[1].keys()
    for position, tensors in found[0].items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[1][position], strict=True))


def test_sigmas_are_in_the_range_of_the_trained_expert_and_experts_alternate():
    making, run = build_collator((9, 9, 9), 4, NumberedSamples()), build_schedule(BatchRamp(5, 5), 100)
    for plan, batches in all_windows(making, run, 4):
        expert = EXPERTS[plan.expert_index]
        assert plan.expert_index == plan.step // 2 % 2
        for batch in batches:
            assert ((batch.sigmas >= expert.sigma_min) & (batch.sigmas < expert.sigma_max)).all()


def test_without_prefetch_a_batch_is_made_by_the_thread_that_takes_it():
    encoded = NumberedSamples()
    making, run = build_collator((40, 1, 1), 1, encoded), build_schedule(BatchRamp(20, 20), 40)
    before = threading.active_count()
    with build_loader(making, run, 1, ahead=0) as loader:
        window = iter(next(iter(loader)))
        assert encoded.made == 1 and threading.active_count() == before
        next(window)
        assert encoded.made == 1, "the one that the window came with"
        next(window)
        assert encoded.made == 2


@pytest.mark.parametrize(
    ("blocks", "device", "ahead"),
    [
        ({}, "cuda", 2),
        ({}, "cpu", 0),
        ({"cache_config": {"vae_cache_type": "none"}}, "cpu", 2),
        ({"loader": {"prefetch_batches": 5}}, "cpu", 5),
        ({"loader": {"prefetch_batches": 0}}, "cuda", 0),
    ],
)
def test_batches_are_made_ahead_unless_the_model_needs_the_cpu(blocks, device, ahead, tmp_path):
    config = RunConfig.model_validate({"datasets": [{"instance_data_dir": str(tmp_path)}], **blocks})
    assert batches_ahead(config, torch.device(device))[0] == ahead


def test_no_more_batches_are_made_ahead_than_configured():
    encoded = NumberedSamples()
    making, run = build_collator((40, 1, 1), 1, encoded), build_schedule(BatchRamp(20, 20), 200)
    with build_loader(making, run, 1, ahead=3) as loader:
        window = iter(next(iter(loader)))
        next(window)
        deadline = time.monotonic() + 5
        while encoded.made < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert encoded.made == 4, "the one that was taken, and three ahead"


def test_an_error_is_raised_when_its_batch_is_taken():
    class Broken(NumberedSamples):
        def latents(self, micro: MicroBatch) -> Tensors:
            if self.made == 3:
                raise ValueError("broken sample")
            return super().latents(micro)

    making, run = build_collator((9, 9, 9), 2, Broken()), build_schedule(BatchRamp(2, 2), 40)
    taken = 0
    with pytest.raises(ValueError, match="broken sample"), build_loader(making, run, 2) as loader:
        for window in loader:
            taken += len(list(window))
    assert taken == 3


def test_leaving_a_loader_waits_only_for_the_batch_in_progress():
    encoded = NumberedSamples()
    making, run = build_collator((9, 9, 9), 1, encoded), build_schedule(BatchRamp(9, 9), 90)
    loader = build_loader(making, run, 1, ahead=8)
    next(iter(next(iter(loader))))
    encoded.gate.clear()
    made = encoded.made
    threading.Timer(0.1, encoded.gate.set).start()
    loader.close()
    assert encoded.made <= made + 8
    assert not [t for t in threading.enumerate() if t.name.startswith("decode") and t.is_alive()]


def test_a_sample_is_named_by_its_dataset_and_key():
    making = build_collator((3, 3, 3), 2, NumberedSamples())
    positions = range(9)
    assert sorted(map(partial(BatchCollator.sample_name, making), positions)) == sorted(
        f"d/{number}" for number in range(9)
    )
