"""A training run as TensorBoard shows it: event files below a folder, written by the tensorboard package's own writer.

    train/      the loss by expert, gradient norm, learning rate, window, samples per second, waiting, of each step
    held_out/   the held-out loss by expert, under the same names, so that both are drawn in one chart
    samples/    the grids of samples
    memory/     the machine's memory
    rates/      the mean and the quantiles of single weights' learning rates, by expert

Steps of one of these only go up. Where a step comes that is not above the last (a run went on from a checkpoint), the
file says so with a session mark, and readers forget what they have from that step on: no point is shown twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from supertuner.core.errors import RunFolderError
from supertuner.core.events import MEMORY, Event, Measured
from supertuner.core.types import JSON
from supertuner.sinks.training import HELD_OUT, RATES, SAMPLES, STEP, memory_values, rate_values, rows_of

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

SCALARS = ("grad_norm", "rate", "samples_in_window", "samples_per_s", "waited_s")
PREFIX = "events.out.tfevents."


class TensorBoard:
    """A sink. What was emitted is in the file at once: a kill takes nothing that a checkpoint counts as done."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._files: dict[str, EventFile] = {}

    def emit(self, event: Event, /) -> None:
        if not isinstance(event, Measured):
            return
        if event.what == STEP:
            self._write("train", event.figures, _step_summary(event.figures))
        elif event.what == HELD_OUT:
            self._write("held_out", event.figures, _held_out_summary(event.figures))
        elif event.what == SAMPLES:
            self._write("samples", event.figures, _grid_summary(event.figures))
        elif event.what == MEMORY:
            self._write("memory", event.figures, _scalars(memory_values(event.figures)))
        elif event.what == RATES:
            self._write("rates", event.figures, _scalars(rate_values(event.figures)))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, name: str, figures: Mapping[str, JSON], summary: Summary) -> None:
        if name not in self._files:
            self._files[name] = EventFile(self._folder / name, self._clock)
        step = figures["step"]
        assert isinstance(step, int)
        self._files[name].write(step, summary)


class EventFile:
    """One event file, new for each session; its steps go up, or a session mark takes back what stood there."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._clock = clock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Readers go through the files of a folder in the order of their names.
            number = 1 + max((_session(file.name) for file in folder.iterdir()), default=0)
            self.path = folder / f"{PREFIX}{number:010d}"
            self._records = RecordWriter(self.path.open("xb", buffering=1 << 16))
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from error
        self._last: int | None = None if number > 1 else -1
        """The last step written; None: whatever an earlier session wrote."""
        self._append(file_version="brain.Event:2")

    def write(self, step: int, summary: Summary) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        if self._last is None or step <= self._last:
            self._append(step=step, session_log=SessionLog(status=SessionLog.START))
        self._last = step
        self._append(step=step, summary=summary)

    def close(self) -> None:
        self._guarded(self._records.close)

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        record = Record(wall_time=self._clock(), **fields).SerializeToString()
        self._guarded(lambda: self._records.write(record))
        self._guarded(self._records.flush)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}") from error


def _session(name: str) -> int:
    """The number of the session that wrote a file; 0 for one that is not ours."""
    number = name.removeprefix(PREFIX)
    return int(number) if number != name and number.isascii() and number.isdigit() else 0


def _step_summary(figures: Mapping[str, JSON]) -> Summary:
    values = {f"loss/{figures['expert']}": figures["loss"], **{name: figures.get(name) for name in SCALARS}}
    return _scalars({tag: value for tag, value in values.items() if isinstance(value, int | float)})


def _held_out_summary(figures: Mapping[str, JSON]) -> Summary:
    """Means as `loss/EXPERT`, beside the training loss of the same expert; levels as `level/EXPERT/0.50`."""
    values = {}
    for row in rows_of(figures):
        tag = f"loss/{row.expert or 'all'}" if row.level is None else f"level/{row.expert or 'all'}/{row.level:.2f}"
        values[tag] = row.loss
    return _scalars(values)


def _grid_summary(figures: Mapping[str, JSON]) -> Summary:
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    grid = Path(str(figures["grid"]))
    try:
        content = grid.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{grid} cannot be read: {error.strerror}") from error
    with Image.open(grid) as picture:
        width, height = picture.size
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)
    return Summary(value=[Summary.Value(tag="samples", image=image)])


def _scalars(values: Mapping[str, float]) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
