"""TensorBoard's reader finds every point exactly once, also after kills and resumes."""

from __future__ import annotations

import os
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from supertuner.core.errors import RunFolderError, SuperTunerError
from supertuner.core.events import MEMORY_MEASUREMENT, MeasurementEvent, WarningEvent
from supertuner.sinks.tensorboard import TensorBoardSink
from supertuner.sinks.training_events import (
    EveryNStepsSink,
    HeldOutLoss,
    memory_scalars,
    train_held_out_event,
    train_rates_event,
    train_samples_event,
)
from supertuner.sinks.wandb import WandbSink, held_out_scalars, require_wandb, step_scalars, wandb_run_id
from tests.sinks.test_training_display import step_event


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in read(folder).Scalars(tag)]


def test_every_figure_of_a_step_is_a_scalar(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as board:
        board.emit(WarningEvent("not", "a figure"))
        board.emit(step_event(1, loss=0.5))
        board.emit(step_event(2, loss=0.25, expert="low_noise", window=8))
        board.emit(step_event(3, loss=float("nan")))
    train = tmp_path / "train"
    assert points(train, "loss/high_noise") == [(1, 0.5)]
    assert points(train, "loss/low_noise") == [(2, 0.25)]
    assert points(train, "samples_in_window") == [(1, 4.0), (2, 8.0), (3, 4.0)]
    assert points(train, "samples_per_s") == [(1, 8.0), (2, 16.0), (3, 8.0)]
    assert [step for step, _ in points(train, "grad_norm")] == [1, 2, 3]
    assert points(train, "rate")[0] == (1, pytest.approx(1e-4))


def test_numeric_memory_figures_are_scalars(tmp_path: Path) -> None:
    figures = {"host.available_bytes": 1 << 33, "uvm.stage": "managed", "nvml.power_w": 412.5, "a.switch": True}
    with TensorBoardSink(tmp_path) as board:
        board.emit(MeasurementEvent(MEMORY_MEASUREMENT, {"step": 3, **figures}))
        board.emit(MeasurementEvent(MEMORY_MEASUREMENT, {"step": 5, "host.available_bytes": 1 << 32}))
    memory = tmp_path / "memory"
    assert points(memory, "memory/host.available_bytes") == [(3, float(1 << 33)), (5, float(1 << 32))]
    assert points(memory, "memory/nvml.power_w") == [(3, 412.5)], "absent at step 5, and not zero"
    assert read(memory).Tags()["scalars"] == ["memory/host.available_bytes", "memory/nvml.power_w"]


def test_rates_of_both_experts_have_the_same_step(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as board:
        for step in (10, 20):
            board.emit(
                train_rates_event(step, {"high_noise": {"mean": 0.5, "q50": 0.25}, "low_noise": {"mean": 0.125}})
            )
    rates = tmp_path / "rates"
    assert points(rates, "rates/high_noise/q50") == [(10, 0.25), (20, 0.25)]
    assert points(rates, "rates/low_noise/mean") == [(10, 0.125), (20, 0.125)]


def test_a_resumed_run_shows_no_point_twice_and_loses_none(tmp_path: Path) -> None:
    for begin, end, loss in ((1, 10, 0.5), (6, 8, 0.25), (6, 12, 0.125)):
        with TensorBoardSink(tmp_path) as board:
            for step in range(begin, end + 1):
                board.emit(step_event(step, loss=loss))
    assert points(tmp_path / "train", "loss/high_noise") == [
        *((step, 0.5) for step in range(1, 6)),
        *((step, 0.125) for step in range(6, 13)),
    ]


def test_a_validation_at_the_resumed_step_removes_no_loss(tmp_path: Path) -> None:
    for _ in range(2):
        with TensorBoardSink(tmp_path) as board:
            if not (tmp_path / "train").exists():
                board.emit(step_event(5))
            board.emit(
                train_held_out_event(5, [HeldOutLoss("high_noise", None, 0.75), HeldOutLoss("high_noise", 0.9, 0.5)])
            )
            board.emit(
                train_held_out_event(5, [HeldOutLoss("high_noise", None, 0.75), HeldOutLoss("high_noise", 0.9, 0.5)])
            )
    assert points(tmp_path / "train", "loss/high_noise") == [(5, 0.5)]
    assert points(tmp_path / "held_out", "loss/high_noise") == [(5, 0.75)]
    assert points(tmp_path / "held_out", "level/high_noise/0.90") == [(5, 0.5)]


def test_a_truncated_record_loses_only_that_point(tmp_path: Path) -> None:
    board = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        board.emit(step_event(step))
    [file] = (tmp_path / "train").iterdir()
    os.truncate(file, file.stat().st_size - 7)
    with TensorBoardSink(tmp_path) as again:
        again.emit(step_event(3, loss=0.125))
        again.emit(step_event(4, loss=0.125))
    board.close()
    assert points(tmp_path / "train", "loss/high_noise") == [(1, 0.5), (2, 0.5), (3, 0.125), (4, 0.125)]


def test_points_are_flushed_at_once(tmp_path: Path) -> None:
    board = TensorBoardSink(tmp_path)
    board.emit(step_event(1))
    assert points(tmp_path / "train", "loss/high_noise") == [(1, 0.5)]
    board.close()


def test_grids_are_images(tmp_path: Path) -> None:
    grid = tmp_path / "grid.png"
    Image.new("RGB", (20, 10), "red").save(grid)
    with TensorBoardSink(tmp_path / "board") as board:
        for step in (0, 40):
            board.emit(train_samples_event(step=step, folder=tmp_path, grid=grid, video=None, weights="EMA"))
    images = read(tmp_path / "board" / "samples").Images("samples")
    assert [(image.step, image.width, image.height) for image in images] == [(0, 20, 10), (40, 20, 10)]
    assert images[1].encoded_image_string == grid.read_bytes()


def test_points_can_be_limited_to_every_nth_step(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as board:
        thin = EveryNStepsSink(board, 5)
        for step in range(1, 13):
            thin.emit(step_event(step))
    assert [step for step, _ in points(tmp_path / "train", "rate")] == [5, 10]


def test_a_folder_that_cannot_be_created_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "board").write_text("a file")
    board = TensorBoardSink(tmp_path / "board")
    with pytest.raises(RunFolderError, match="board/train cannot be written: Not a directory"):
        board.emit(step_event(1))


def test_a_file_that_cannot_grow_is_an_error_with_its_name(tmp_path: Path) -> None:
    board = TensorBoardSink(tmp_path)
    board.emit(step_event(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        with pytest.raises(RunFolderError, match=r"tfevents\.0000000001 cannot be written: File too large"):
            board.emit(step_event(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    board.close()


@pytest.mark.requires(find_spec("wandb") is None, reason="wandb is installed")
def test_without_the_package_wandb_the_error_names_the_remedy(tmp_path: Path) -> None:
    for attempt in (require_wandb, lambda: WandbSink("project", "run", tmp_path, {})):
        with pytest.raises(SuperTunerError, match=r"pip install 'supertuner\[wandb\]'"):
            attempt()


def test_the_name_of_a_run_becomes_a_valid_wandb_id() -> None:
    assert wandb_run_id("cats: 50% #1/\\?") == "cats- 50- -1---" and len(wandb_run_id("x" * 200)) == 128


def test_wandb_receives_figures_by_expert_and_level() -> None:
    values = step_scalars(step_event(3, loss=float("nan")).figures)
    assert "train/loss/high_noise" not in values and values["train/samples"] == 12
    rows = [HeldOutLoss(None, None, 0.5), HeldOutLoss("low_noise", None, 0.25), HeldOutLoss("low_noise", 0.3, 0.125)]
    assert held_out_scalars(train_held_out_event(3, rows).figures) == {
        "held_out/loss/all": 0.5,
        "held_out/loss/low_noise": 0.25,
        "held_out/loss/low_noise/0.30": 0.125,
    }


def test_wandb_receives_memory_figures_under_the_tags_of_tensorboard() -> None:
    assert memory_scalars({"step": 3, "gpu.free_bytes": 5, "uvm.stage": "device"}) == {"memory/gpu.free_bytes": 5}
