"""Callbacks see the steps, validations and checkpoints of a run in order, and a run that one stopped can be resumed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

import supertuner as st
from supertuner.core.errors import TrainError
from tests.train.runs import config as write_config

STEPS = 6
CHANGES = {
    "train": {"max_steps": STEPS},
    "checkpoints": {"every_steps": 2, "keep": 9},
    "validation": {"every_steps": 4, "at_end": False},
}


class Recorder(st.TrainingCallback):
    """Records what it sees, and stops after a step."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.stop_after = stop_after
        self.steps: list[st.StepRecord] = []
        self.validations: list[st.ValidationReport] = []
        self.checkpoints: list[st.SavedCheckpoint] = []

    def on_step(self, step: st.StepRecord, control: st.TrainingControl) -> None:
        self.steps.append(step)
        if step.step >= self.stop_after:
            control.stop()

    def on_validation(self, validation: st.ValidationReport, control: st.TrainingControl) -> None:
        self.validations.append(validation)

    def on_checkpoint(self, checkpoint: st.SavedCheckpoint, control: st.TrainingControl) -> None:
        self.checkpoints.append(checkpoint)


def load(folder: Path, name: str) -> st.LoadedConfig:
    return st.load_config(write_config(folder, name, **CHANGES))


def test_a_stopped_run_is_exported_and_resumes_to_the_same_losses(tmp_path: Path) -> None:
    whole, first, second = Recorder(), Recorder(stop_after=3), Recorder()
    complete = st.train(load(tmp_path, "whole"), callbacks=[whole], show_progress=False)
    stopped = st.train(load(tmp_path, "parts"), callbacks=[first], show_progress=False)
    resumed = st.train(load(tmp_path, "parts"), callbacks=[second], show_progress=False)

    assert (complete.steps, complete.stopped_by) == (STEPS, None)
    assert (stopped.steps, stopped.stopped_by) == (3, "callback")
    assert (resumed.steps, resumed.stopped_by) == (STEPS, None)
    assert [step.step for step in first.steps + second.steps] == list(range(1, STEPS + 1))
    assert first.steps + second.steps == whole.steps == complete.losses == resumed.losses
    assert [report.step for report in whole.validations] == [0, 4]
    assert all(report.loss is not None and report.samples_dir.is_dir() for report in whole.validations)
    assert [saved.step for saved in whole.checkpoints] == [2, 4, 6]
    assert [saved.step for saved in first.checkpoints] == [2, 3]
    assert all(saved.path.is_dir() for saved in whole.checkpoints)
    for ours, theirs in zip(complete.adapters, resumed.adapters, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert [path.name for path in stopped.adapters] == [
        f"run-step00000003_{expert}.safetensors" for expert in ("high_noise", "low_noise")
    ]
    for result in (complete, whole.validations[0], whole.checkpoints[0]):
        assert json.loads(json.dumps(result.to_dict()))


def test_an_error_of_a_callback_ends_the_run(tmp_path: Path) -> None:
    class Failing(st.TrainingCallback):
        def on_step(self, step: st.StepRecord, control: st.TrainingControl) -> None:
            raise TrainError(f"step {step.step} is not wanted")

    with pytest.raises(TrainError, match="step 1 is not wanted"):
        st.train(load(tmp_path, "failing"), callbacks=[Failing()], show_progress=False)
    assert st.train(load(tmp_path, "failing"), show_progress=False).steps == STEPS


def test_a_run_in_another_thread_than_the_main_one(tmp_path: Path) -> None:
    results: list[st.TrainingResult] = []
    settings = load(tmp_path, "thread")

    def work() -> None:
        results.append(st.train(settings, callbacks=[Recorder(stop_after=1)], show_progress=False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [(result.steps, result.stopped_by) for result in results] == [(1, "callback")]


def test_nothing_is_printed_without_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    st.train(load(tmp_path, "silent"), callbacks=[Recorder(stop_after=1)], show_progress=False)
    assert capfd.readouterr() == ("", "")


def test_equal_runs_save_equal_states_of_the_global_generators(tmp_path: Path) -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # whatever the process drew before
        result = st.train(load(tmp_path, f"run-{seed}"), show_progress=False)
        newest = max((result.run_dir / "checkpoints").glob("step-*"))
        states.append((newest / "random.safetensors").read_bytes())
    assert states[0] == states[1]
