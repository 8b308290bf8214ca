"""The loss curve: read from a run's log as it is, and drawn so that a person sees what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from supertuner.core.errors import RunFolderError
from supertuner.tools.axes import linear_axis, log_axis, round_step
from supertuner.tools.loss_curve import (
    COLOURS,
    HEIGHT,
    SUPERSAMPLING,
    TOP,
    WIDTH,
    _loss_axis,
    build_curve,
    draw_curve,
    smooth_losses,
)


def a_log(folder: Path, losses: list[float | None], experts: tuple[str, ...] = ("model",)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "losses.jsonl").open("w") as log:
        for number, loss in enumerate(losses):
            expert = experts[number % len(experts)]
            log.write(json.dumps(record(number + 1, expert, loss, 4 if number < len(losses) // 2 else 8)) + "\n")
    return folder / "losses.jsonl"


def record(step: int, expert: str, loss: float | None, window: int = 4) -> dict[str, Any]:
    facts = {"step": step, "samples": 4 * step, "window": window, "expert": expert}
    return {**facts, "loss": loss, "grad_norm": 1.0, "rate": 1e-4}


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"))


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))


def heights(picture: np.ndarray, colour: str, columns: slice) -> np.ndarray:
    """Rows in which a colour is seen, or one like it: making the picture smaller blends colours a little."""
    distance = np.abs(picture[:, columns].astype(int) - rgb(colour)).max(axis=2)
    return np.flatnonzero((distance < 24).any(axis=1))


def test_each_expert_has_its_colour_and_a_falling_loss_falls(tmp_path: Path) -> None:
    losses = [(1.0 if n % 2 else 0.4) * (1.2 - n / 200) for n in range(200)]
    draw_curve(a_log(tmp_path, [float(x) for x in losses], ("low_noise", "high_noise")), tmp_path / "c.png")
    picture = pixels(tmp_path / "c.png")
    assert picture.shape == (HEIGHT, WIDTH, 3)
    for colour in COLOURS[:2]:
        left, right = (heights(picture[TOP:], colour, columns) for columns in (slice(90, 200), slice(1100, 1240)))
        assert left.mean() < right.mean()
    assert not len(heights(picture, COLOURS[2], slice(0, WIDTH)))


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    log = a_log(tmp_path, [1 / (n + 1) for n in range(50)])
    for name in ("one.png", "two.png"):
        draw_curve(log, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_held_out_losses_are_found_beside_the_log(tmp_path: Path) -> None:
    log = a_log(tmp_path, [1.0] * 20)
    draw_curve(log, tmp_path / "without.png")
    rows = [{"step": 10, "expert": "model", "level": level, "loss": 0.5} for level in (0.5, None)]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curve(log, tmp_path / "with.png")
    assert (pixels(tmp_path / "with.png") != pixels(tmp_path / "without.png")).any()
    curve = build_curve([record(1, "model", 1.0)], rows)
    assert curve.series[0].held_out == ((10.0, 0.5),)


@pytest.mark.parametrize(
    "losses", [[0.5], [0.5, None], [None], [0.0, 0.0], [1e-9, 1e9], [1.0] * 3, [5.0] * 5000, [1e300, 1.0]]
)
def test_any_log_can_be_drawn(tmp_path: Path, losses: list[float | None]) -> None:
    draw_curve(a_log(tmp_path, losses), tmp_path / "c.png")
    assert pixels(tmp_path / "c.png").shape == (HEIGHT, WIDTH, 3)


def test_a_log_that_is_still_written_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    log = a_log(tmp_path, [1.0, 0.5])
    with log.open("a") as more:
        more.write('{"step": 3, "sam')
    draw_curve(log, tmp_path / "c.png")


def test_an_empty_log_and_a_foreign_one_are_errors_that_say_so(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no curve to draw before the first step"):
        draw_curve(tmp_path / "losses.jsonl", tmp_path / "c.png")
    (tmp_path / "losses.jsonl").write_text('{"step": 1, "loss": "much"}\n')
    with pytest.raises(RunFolderError, match="lacks step, window, expert or loss"):
        draw_curve(tmp_path / "losses.jsonl", tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_one_bad_step_does_not_squeeze_the_others_flat() -> None:
    losses = [0.5 + 0.1 * np.sin(n) for n in range(400)]
    losses[200] = 1e6
    curve = build_curve([record(n + 1, "model", float(loss)) for n, loss in enumerate(losses)], [])
    assert _loss_axis(curve).high < 3
    assert smooth_losses(np.array(losses)).max() < 1.0


def test_the_trend_of_a_constant_is_that_constant_and_keeps_to_its_neighbours() -> None:
    assert np.allclose(smooth_losses(np.full(500, 0.3)), 0.3)
    step = np.concatenate([np.full(300, 1.0), np.full(300, 0.5)])
    trend = smooth_losses(step)
    assert np.allclose(trend[:250], 1.0) and np.allclose(trend[350:], 0.5)
    assert smooth_losses(np.array([3.0, 1.0])).tolist() == [3.0, 1.0]


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low: float, span: float) -> None:
    axis = linear_axis(low, low + span, 0.0, 100.0)
    assert 2 <= len(axis.ticks) <= 8
    assert all(-1e-3 <= axis.to_pixel(tick) <= 100 + 1e-3 for tick in axis.ticks)


@given(st.floats(1e-9, 1e6), st.floats(20, 1e9))
def test_ticks_of_a_logarithmic_axis_are_few_and_inside(low: float, ratio: float) -> None:
    axis = log_axis(low, low * ratio, 100.0, 0.0)
    assert 1 <= len(axis.ticks) <= 20
    assert all(low * 0.9 <= tick <= low * ratio * 1.1 for tick in axis.ticks)


def test_values_lie_where_they_should() -> None:
    axis = linear_axis(0, 10, 0.0, 100.0 * SUPERSAMPLING)
    assert (
        axis.to_pixel(5) == 50 * SUPERSAMPLING
        and axis.to_clamped_pixel(20) == 100 * SUPERSAMPLING
        and axis.is_above(10.1)
    )
    assert axis.ticks == (0, 2, 4, 6, 8, 10) and axis.tick_label(4) == "4"
    assert linear_axis(0, 1, 0, 1).tick_label(0.2) == "0.2" and round_step(0.3) == 0.5
    assert linear_axis(1, 3, 0, 1, whole_numbers=True).ticks == (1, 2, 3)
