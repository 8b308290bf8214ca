"""The state of runs at a glance: what each is doing, its step, loss and remaining time, from the ends of its files.

A run writes whole lines, so that the last complete line of a file is the newest record; large files are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias

from supertuner.core.errors import RunFolderError
from supertuner.core.types import JSON
from supertuner.runs.loss_files import LOSSES_FILE
from supertuner.runs.run_reader import find_runs, open_run
from supertuner.sinks.run_folder import EVENTS_FILE
from supertuner.sinks.training_events import TRAIN_BEGIN, TRAIN_END

RunState: TypeAlias = Literal["preparing", "training", "finished", "stopped", "died", "new", "damaged"]
LOSSES_AVERAGED = 20
"""The loss that is shown is the mean of this many last steps."""
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run at a glance."""

    path: str
    name: str
    state: RunState
    """"died": its process ended without saying so; "preparing": before the first step of this session."""
    step: int
    steps: int | None
    """The last step; None: not known yet."""
    loss: float | None
    """Mean over the last steps."""
    seconds_per_step: float | None
    """Of the current or last session; the time for validations and checkpoints is included."""
    remaining_s: float | None
    """While it trains: the time to the last step at this speed."""
    last_sample: str | None
    """The picture of the newest samples."""
    problem: str = ""
    """For a damaged run folder: what is wrong."""

    def to_dict(self) -> dict[str, JSON]:
        return asdict(self)


def list_runs(folder: Path) -> list[RunStatus]:
    """The runs directly below `folder`, or the run that `folder` is. RunFolderError if there is none."""
    paths = find_runs(folder) or [open_run(folder).path]
    return [read_status(path) for path in paths]


def read_status(path: Path) -> RunStatus:
    """The state of one run. A damaged folder is reported in the result."""
    try:
        run = open_run(path)
        return _read_status(path, run.name, run.holder() is not None)
    except (RunFolderError, OSError) as error:
        return RunStatus(str(path), path.name, "damaged", 0, None, None, None, None, None, str(error))


def _read_status(path: Path, name: str, is_running: bool) -> RunStatus:
    begin = _last_event(path / EVENTS_FILE, TRAIN_BEGIN)
    end = _last_event(path / EVENTS_FILE, TRAIN_END)
    records = _last_steps(path / LOSSES_FILE)
    step = _as_int(records[-1].get("step")) if records else 0
    losses = [loss for record in records if isinstance(loss := record.get("loss"), float)]
    figures = _figures(begin)
    steps = _as_int(figures.get("steps")) if "steps" in figures else None
    has_ended = end is not None and begin is not None and str(end["at"]) >= str(begin["at"])
    speed = _seconds_per_step(path / LOSSES_FILE, begin, step)
    state = _state(is_running, begin is not None, has_ended, bool(steps) and step == steps)
    remaining_s = (steps - step) * speed if state == "training" and steps is not None and speed is not None else None
    samples = sorted((path / "samples").glob("step-*/grid.png"))
    return RunStatus(
        path=str(path),
        name=name,
        state=state,
        step=step,
        steps=steps,
        loss=sum(losses) / len(losses) if losses else None,
        seconds_per_step=speed,
        remaining_s=remaining_s,
        last_sample=str(samples[-1]) if samples else None,
    )


def _state(is_running: bool, has_begun: bool, has_ended: bool, is_complete: bool) -> RunState:
    if is_running:
        return "training" if has_begun and not has_ended else "preparing"
    if not has_begun:
        return "new"
    if is_complete:
        return "finished"
    return "stopped" if has_ended else "died"


def _seconds_per_step(losses: Path, begin: Mapping[str, JSON] | None, step: int) -> float | None:
    """From the begin of the session to the last line of its losses; None before its first step."""
    first = _as_int(_figures(begin).get("step")) if begin is not None else step
    if begin is None or step <= first:
        return None
    try:
        seconds = losses.stat().st_mtime - datetime.fromisoformat(str(begin["at"])).timestamp()
    except ValueError:
        return None
    return max(0.0, seconds) / (step - first)


def _last_steps(path: Path) -> list[dict[str, JSON]]:
    """The last records of losses.jsonl, oldest first."""
    found = []
    for record in _records_backwards(path):
        found.append(record)
        if len(found) == LOSSES_AVERAGED:
            break
    return found[::-1]


def _last_event(path: Path, what: str) -> dict[str, JSON] | None:
    """The newest event of this name."""
    marked = json.dumps(what).encode()
    return next(_records_backwards(path, lambda line: marked in line), None)


def _records_backwards(path: Path, wanted: Callable[[bytes], bool] = lambda line: True) -> Iterator[dict[str, JSON]]:
    """The complete records of a file, newest first, of lines that are `wanted`. RunFolderError at a damaged line."""
    for line in _lines_backwards(path):
        if wanted(line):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RunFolderError(f"{path} has a line that is not JSON ({error}); remove that line") from error
            if not isinstance(record, dict):
                raise RunFolderError(f"{path} has a line that is not a JSON object; remove that line")
            yield record


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, last first, read in blocks from its end."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        end, carried, has_newline = file.seek(0, os.SEEK_END), b"", False
        while end > 0:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            carried, *lines = (file.read(end - begin) + carried).split(b"\n")
            if lines and not has_newline:
                lines.pop()  # what follows the last newline is incomplete
                has_newline = True
            yield from filter(None, reversed(lines))
            end = begin
        if has_newline and carried:
            yield carried


def _figures(event: Mapping[str, JSON] | None) -> Mapping[str, JSON]:
    figures = None if event is None else event.get("figures")
    return figures if isinstance(figures, Mapping) else {}


def _as_int(value: JSON) -> int:
    return value if isinstance(value, int) else 0
