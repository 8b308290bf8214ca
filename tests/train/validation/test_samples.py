"""Samples of a tiny Wan2.2 in training: which files are written, that they repeat, and that training is unchanged."""

from __future__ import annotations

import hashlib
import json
import random
import resource
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from supertuner.arena.run_context import RunContext
from supertuner.core.errors import TrainError
from supertuner.core.events import MeasurementEvent
from supertuner.data.decode.video import decode_video
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelSource, SampleRequest
from supertuner.plan.sample_requests import ValidationSamplePlan
from supertuner.train.validation.sample_images import (
    EvaluationWeights,
    make_samples,
    preserve_training_state,
    select_evaluation_weights,
)
from tests.train.validation.making import CPU, TrainingStub, a_plan, training

RUN_CONTEXT = RunContext.silent(Path("r"))


def samples(
    run: TrainingStub,
    folder: Path,
    plan: ValidationSamplePlan,
    step: int = 40,
    weights: EvaluationWeights | None = None,
) -> MeasurementEvent:
    modules = [expert_state.module for expert_state in run.expert_states]
    return make_samples(
        plan, run.sampler, RunContext.silent(Path("a run")), step=step, modules=modules, folder=folder, weights=weights
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_images_are_written_with_a_grid_and_samples_json(tiny_wan: ModelSource, tmp_path: Path) -> None:
    event = samples(training(tiny_wan), tmp_path, a_plan("a red circle", "漢字 \udcff 😀", seeds=(0, 7)))
    folder = tmp_path / "step-00000040"
    assert event.figures["path"] == str(folder) and event.figures["film"] is None
    names = [f"prompt-{row:02d}-seed-{seed}.png" for row in (0, 1) for seed in (0, 7)]
    assert sorted(contents(folder)) == sorted(["grid.png", "samples.json", *names])
    facts = json.loads((folder / "samples.json").read_bytes())
    assert [one["files"] for one in facts["samples"]] == [[name] for name in names]
    assert facts["samples"][1]["seed"] == 7 and facts["samples"][1]["width"] == 32
    assert (facts["run"], facts["step"], facts["weights"]) == ("a run", 40, "weights in training")
    for name, digest in facts["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    pictures = [np.asarray(Image.open(folder / name)) for name in names]
    assert pictures[0].shape == (32, 32, 3) and (pictures[0] != pictures[1]).any()


def test_videos_are_written_as_mp4_with_frames_as_image(tiny_wan: ModelSource, tmp_path: Path) -> None:
    event = samples(training(tiny_wan), tmp_path, a_plan(frames=5))
    folder = tmp_path / "step-00000040"
    assert sorted(contents(folder)) == [
        "grid.mp4", "grid.png", "prompt-00-seed-0.frames.png", "prompt-00-seed-0.mp4", "samples.json",
    ]  # fmt: skip
    assert event.figures["film"] == str(folder / "grid.mp4")
    film = memoryview((folder / "prompt-00-seed-0.mp4").read_bytes())
    frames = np.stack(list(decode_video(film, 0, 5, None)))
    strip = np.asarray(Image.open(folder / "prompt-00-seed-0.frames.png"))
    assert frames.shape == (5, 32, 32, 3) and strip.shape == (32, 3 * 32 + 2 * 2, 3)
    assert np.abs(frames[2].astype(int) - strip[:, 34:66]).mean() < 40  # noise, since colours have half the resolution
    assert json.loads((folder / "samples.json").read_bytes())["samples"][0]["frames"] == 5


def test_the_same_weights_give_the_same_bytes_and_others_do_not(tiny_wan: ModelSource, tmp_path: Path) -> None:
    one, other = training(tiny_wan), training(tiny_wan)
    plan = a_plan(frames=5, seeds=(3,))
    torch.manual_seed(1)
    samples(one, tmp_path / "one", plan)
    torch.manual_seed(2)
    samples(other, tmp_path / "other", plan)
    assert contents(tmp_path / "one" / "step-00000040") == contents(tmp_path / "other" / "step-00000040")
    for number in range(6):
        one.window(number)
    samples(one, tmp_path / "one", plan)
    assert contents(tmp_path / "one" / "step-00000040") != contents(tmp_path / "other" / "step-00000040")


@pytest.mark.parametrize(("optimizer", "ema"), [("adamw", 0.5), ("schedule_free", None), ("adamw", None)])
def test_training_goes_on_to_the_bit_as_without_samples(
    tiny_wan: ModelSource, tmp_path: Path, optimizer: str, ema: float | None
) -> None:
    ends = []
    for looks in (False, True):
        run = training(tiny_wan, optimizer=optimizer, ema=ema)
        torch.manual_seed(5)
        losses = []
        for number in range(6):
            losses.append(run.window(number))
            if looks and number in (1, 2, 4):
                samples(
                    run, tmp_path, a_plan(), number, select_evaluation_weights(run.expert_states, run.trainable_experts)
                )
        ends.append((losses, run.weights()))
    (losses, weights), (same_losses, same_weights) = ends
    assert losses == same_losses
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


def test_random_states_modes_and_gradients_are_unchanged() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5).eval(), nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with pytest.raises(ValueError), preserve_training_state([module]):
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)
        module.eval()
        assert not module(torch.ones(1, 2)).requires_grad
        raise ValueError
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]
    assert [part.training for part in module.modules()] == [True, True, False, True]
    assert all(now.grad is then for now, then in zip(module.parameters(), gradients, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "ema", "label"), [("adamw", 0.9, "moving average"), ("schedule_free", None, "schedule-free average")]
)
def test_samples_use_averages_if_there_are_any(
    tiny_wan: ModelSource, tmp_path: Path, optimizer: str, ema: float | None, label: str
) -> None:
    run = training(tiny_wan, optimizer=optimizer, ema=ema, dropout=0.0)
    for number in range(8):
        run.window(number)
    weights = select_evaluation_weights(run.expert_states, run.trainable_experts)
    assert weights.label == label
    samples(run, tmp_path / "averaged", a_plan(), weights=weights)
    samples(run, tmp_path / "trained", a_plan())
    pictures = [(tmp_path / n / "step-00000040" / "prompt-00-seed-0.png").read_bytes() for n in ("averaged", "trained")]
    assert pictures[0] != pictures[1]
    assert json.loads((tmp_path / "averaged/step-00000040/samples.json").read_bytes())["weights"] == label


def test_without_averages_the_weights_in_training_are_used(tiny_wan: ModelSource) -> None:
    run = training(tiny_wan)
    assert select_evaluation_weights(run.expert_states, run.trainable_experts).label == "weights in training"


class SeedSampler:
    """A sampler that returns its random seed as a grey image."""

    def __init__(self, shade: int = 0, fail_at: int | None = None) -> None:
        self.shade, self.fail_at, self.asked = shade, fail_at, list[SampleRequest]()

    def sample(self, request: SampleRequest) -> np.ndarray:
        self.asked.append(request)
        if len(self.asked) == self.fail_at:
            raise ValueError("the sampler broke")
        return np.full((request.frames, request.height, request.width, 3), request.seed + self.shade, np.uint8)


def drawn(
    sampler: SeedSampler, folder: Path, plan: ValidationSamplePlan, modules: Sequence[nn.Module] = ()
) -> MeasurementEvent:
    return make_samples(plan, sampler, RUN_CONTEXT, step=1, modules=modules, folder=folder)


def test_an_equal_folder_stays_and_a_different_one_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    drawn(SeedSampler(), tmp_path, a_plan())
    first = folder.stat().st_ino
    drawn(SeedSampler(), tmp_path, a_plan())
    assert folder.stat().st_ino == first
    (folder / "prompt-00-seed-0.png").write_bytes(b"spoilt")
    drawn(SeedSampler(), tmp_path, a_plan())
    assert folder.stat().st_ino != first
    assert np.asarray(Image.open(folder / "prompt-00-seed-0.png")).max() == 0
    drawn(SeedSampler(shade=9), tmp_path, a_plan())
    assert np.asarray(Image.open(folder / "prompt-00-seed-0.png")).max() == 9
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failing_sampler_leaves_only_the_old_folder(tmp_path: Path) -> None:
    drawn(SeedSampler(shade=3), tmp_path, a_plan())
    before = contents(tmp_path / "step-00000001")
    with pytest.raises(ValueError, match="the sampler broke"):
        drawn(SeedSampler(fail_at=2), tmp_path, a_plan(seeds=(0, 1)))
    assert contents(tmp_path / "step-00000001") == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_the_next_samples_clean_up_after_a_kill(tmp_path: Path) -> None:
    drawn(SeedSampler(shade=3), tmp_path, a_plan())
    before = contents(tmp_path / "step-00000001")
    (tmp_path / "step-00000001").rename(tmp_path / ".replaced-step-00000001")  # killed between the two renames
    (tmp_path / ".writing-step-00000009").mkdir()
    (tmp_path / ".writing-step-00000009" / "half.png").write_bytes(b"half")
    plan = a_plan()
    make_samples(plan, SeedSampler(), RUN_CONTEXT, step=2, modules=(), folder=tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert contents(tmp_path / "step-00000001") == before


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file is in the way")
    with pytest.raises(TrainError, match=r"/samples cannot be written: "):
        drawn(SeedSampler(), tmp_path / "samples", a_plan())


def test_a_full_disk_is_an_error_with_the_file_name_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        with pytest.raises(TrainError, match=r"\.writing-step-00000001.* cannot be written: File too large; free"):
            drawn(SeedSampler(), tmp_path, a_plan())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_weights_are_put_back_when_a_sampler_fails(tmp_path: Path) -> None:
    calls = []

    @contextmanager
    def lent():  # type: ignore[no-untyped-def]
        calls.append("lent")
        try:
            yield
        finally:
            calls.append("back")

    with pytest.raises(ValueError):
        make_samples(
            a_plan(),
            SeedSampler(fail_at=1),
            RUN_CONTEXT,
            step=1,
            modules=(),
            folder=tmp_path,
            weights=EvaluationWeights("EMA", lent),
        )
    assert calls == ["lent", "back"]


def test_a_model_that_starts_from_an_image_gets_one(tiny_wan_image_to_video: ModelSource, tmp_path: Path) -> None:
    wan = load_family("wan2.2")
    model = wan.read_model(tiny_wan_image_to_video)
    sampler = wan.build_sampler(model, {}, CPU, torch.float32)
    first = np.full((32, 32, 3), 200, np.uint8)
    plan = a_plan(frames=5)
    with_image = ValidationSamplePlan(
        plan.prompts, (first,), plan.seeds, plan.size, plan.fps, "", plan.inference_steps, plan.guidance_scale
    )
    make_samples(with_image, sampler, RUN_CONTEXT, step=1, modules=(), folder=tmp_path)
    assert (tmp_path / "step-00000001" / "grid.mp4").is_file()
