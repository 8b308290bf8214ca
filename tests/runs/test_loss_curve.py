"""The loss curve: what is read from a run's log, and what the picture shows of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from supertuner.core.errors import RunFolderError
from supertuner.core.types import MIB
from supertuner.runs.binned_series import smooth_series
from supertuner.runs.loss_curve import (
    COLOURS,
    HEIGHT,
    LEFT,
    PLOT_WIDTH,
    TOP,
    WIDTH,
    build_curve,
    draw_curve,
    loss_limits,
    render_curve,
)
from supertuner.runs.loss_files import encode_step, read_held_out_losses
from supertuner.sinks.training_events import StepRecord


def a_log(folder: Path, losses: list[float | None], experts: tuple[str, ...] = ("model",)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "losses.jsonl").open("wb") as log:
        for number, loss in enumerate(losses):
            expert = experts[number % len(experts)]
            log.write(encode_step(record(number + 1, expert, loss, 4 if number < len(losses) // 2 else 8)))
    return folder / "losses.jsonl"


def record(step: int, expert: str, loss: float | None, window: int = 4) -> StepRecord:
    return StepRecord(step, 4 * step, window, expert, math.nan if loss is None else loss, 1.0, 1e-4)


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"))


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))


def heights(picture: np.ndarray, colour: str, columns: slice) -> np.ndarray:
    """Rows that contain a colour, or one close to it: antialiasing blends colours."""
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
    curve = build_curve([record(1, "model", 1.0)], read_held_out_losses(tmp_path / "validation.jsonl"))
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
    with pytest.raises(RunFolderError, match="line 1 is not a line of a loss log"):
        draw_curve(tmp_path / "losses.jsonl", tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_one_bad_step_does_not_squeeze_the_others_flat() -> None:
    losses = [0.5 + 0.1 * np.sin(n) for n in range(400)]
    losses[200] = 1e6
    curve = build_curve([record(n + 1, "model", float(loss)) for n, loss in enumerate(losses)], [])
    assert loss_limits(curve)[1] < 3
    assert smooth_series(curve.series[0].losses).max() < 1.0


def test_a_long_log_is_drawn_in_little_memory_with_every_spike_and_the_same_trend(tmp_path: Path) -> None:
    losses = np.random.default_rng(0).lognormal(0, 0.7, 200_000)
    losses[123_457] = 1e4
    log = a_log(tmp_path, losses.tolist())
    command = [sys.executable, "-c", MEASURE, str(log), str(tmp_path / "c.png")]
    used_bytes = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert used_bytes < 50 * MIB, "200,000 records alone would take twice as much"
    picture = pixels(tmp_path / "c.png")
    place = LEFT + round(123_457 / 200_000 * PLOT_WIDTH)
    triangles = np.abs(picture[TOP - 8 : TOP - 1, place - 3 : place + 4].astype(int) - 255).max(axis=2)
    assert (triangles > 20).any()


MEASURE = """
import resource, sys
from pathlib import Path
from supertuner.runs.loss_curve import draw_curve
log, out = map(Path, sys.argv[1:])
short = out.with_name("short.jsonl")
with log.open("rb") as lines:
    short.write_bytes(b"".join(next(lines) for _ in range(2000)))
draw_curve(short, out)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
draw_curve(log, out)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_the_loss_axis_is_logarithmic_only_for_losses_that_span_much() -> None:
    narrow = build_curve([record(1, "model", 1.0), record(2, "model", 0.5)], [])
    wide = build_curve([record(1, "model", 1.0), record(2, "model", 0.01)], [])
    assert loss_limits(narrow) == (0.47, 1.03, False)
    low, high, logarithmic = loss_limits(wide)
    assert logarithmic and low < 0.02 and high > 0.9


def test_a_name_is_drawn_as_it_is_and_shortened_if_it_is_too_long() -> None:
    """A dollar sign starts a formula in matplotlib, and a sign that the font lacks raises a warning."""
    curve = build_curve([record(1, "$model_$", 1.0)], [])
    texts = [text.get_text() for text in render_curve(curve, "run $x^2$ 模型 " + "m" * 200).texts]
    title = next(text for text in texts if text.startswith("run"))
    assert title.startswith("run $x^2$") and title.endswith("…")
