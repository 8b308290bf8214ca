"""docs/ramp.md agrees with the functions that the trainer uses."""

from __future__ import annotations

import json
import re
from pathlib import Path

from supertuner.config.settings.run_config import RunConfig
from supertuner.optim.schedule import (
    BatchRamp,
    TrainingSchedule,
    accumulation_steps,
    build_training_schedule,
    ramp_change_text,
    ramp_text,
    window_samples,
    windows,
)

PAGE = (Path(__file__).parents[2] / "docs" / "ramp.md").read_text()


def tables() -> list[list[list[int]]]:
    """Every table of the page that consists of whole numbers."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE)
    found = [[re.findall(r"[^|]+", row) for row in block.splitlines()[2:]] for block in blocks]
    return [
        [[int(cell) for cell in row] for row in rows]
        for rows in found
        if all(cell.strip().isdigit() for row in rows for cell in row)
    ]


def example() -> RunConfig:
    block = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return RunConfig.model_validate(json.loads("{" + block[1] + "}"))


def second_example() -> RunConfig:
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 4}
    return RunConfig.model_validate({"train": {"batch_size": 32}, "gh200_optimizations": ramp})


def check_rows(rows: list[list[int]], schedule: TrainingSchedule, batch_size: int) -> None:
    for step, consumed, size, micro_batches in rows:
        assert schedule.window_at(step).start == consumed
        assert window_samples(consumed, schedule.ramp) == size
        assert accumulation_steps(size, batch_size, world_size=1) == micro_batches


def test_the_tables_of_windows_are_right() -> None:
    first, second, _ = tables()
    schedule = build_training_schedule(example(), lambda epochs: 100_000 * epochs, world_size=1)
    check_rows(first, schedule, batch_size=1)
    last = schedule.spans[-1]
    assert (last.first_step, last.first_position) == (first[-1][0], first[-1][1])
    assert f"The ramp is over after {last.first_step} steps and {last.first_position} samples" in PAGE
    wide = build_training_schedule(second_example(), lambda epochs: 100_000 * epochs, world_size=1)
    check_rows(second, wide, batch_size=32)
    assert f"{wide.ramp.samples:,} samples long" in PAGE


def test_the_table_of_steps_is_right() -> None:
    *_, steps = tables()
    assert len(steps) == 4
    for samples, with_ramp, without in steps:
        assert sum(1 for _ in windows(samples, BatchRamp(4, 32, 400))) == with_ramp
        assert sum(1 for _ in windows(samples, BatchRamp(32, 32))) == without


def test_the_quoted_log_lines_are_right() -> None:
    schedule = build_training_schedule(example(), lambda epochs: 100_000 * epochs, world_size=1)
    assert ramp_text(schedule.ramp, batch_size=1, world_size=1) in PAGE
    assert ramp_change_text(schedule.spans[1].window_size, batch_size=1, world_size=1) in PAGE
