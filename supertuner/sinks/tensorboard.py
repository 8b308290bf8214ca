"""Writes a training run as TensorBoard event files, with the writer of the tensorboard package.

    train/      per step: loss by expert, gradient norm, learning rate, window, samples per second, waiting time
    held_out/   the held-out loss by expert, under the tags of the training loss, so that charts show both
    samples/    the grids of samples
    memory/     the machine's memory
    rates/      mean and quantiles of the learning rates of single weights, by expert

Steps in each of these increase. If a step does not (a run resumed from a checkpoint), a session mark is written, and
readers drop their points from that step on: no point is shown twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import RunFolderError
from supertuner.core.events import MEMORY_MEASUREMENT, Event, MeasurementEvent
from supertuner.core.types import JSON
from supertuner.sinks import training_events as training

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

STEP_SCALARS = ("grad_norm", "rate", "samples_in_window", "samples_per_s", "waited_s")
EVENT_FILE_PREFIX = "events.out.tfevents."


class TensorBoardSink(CloseOnExit):
    """A sink. Each event is flushed at once, so that a kill loses nothing that a checkpoint counts as done."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._files: dict[str, TensorBoardEventFile] = {}

    def emit(self, event: Event, /) -> None:
        if not isinstance(event, MeasurementEvent):
            return
        if event.what == training.TRAIN_SAMPLES:
            self._write("samples", event.figures, _grid_summary(event.figures))
        elif event.what in SCALARS:
            folder, scalars = SCALARS[event.what]
            self._write(folder, event.figures, _scalar_summary(scalars(event.figures)))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, figures: Mapping[str, JSON], summary: Summary) -> None:
        if name not in self._files:
            self._files[name] = TensorBoardEventFile(self._folder / name, self._clock)
        step = figures["step"]
        assert isinstance(step, int)
        self._files[name].write(step, summary)


class TensorBoardEventFile:
    """One event file per session. Its steps increase; otherwise a session mark invalidates the later points."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._clock = clock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            number = 1 + max((_session_number(file.name) for file in folder.iterdir()), default=0)
            self.path = folder / f"{EVENT_FILE_PREFIX}{number:010d}"
            self._record_writer = RecordWriter(self.path.open("xb", buffering=1 << 16))
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from error
        self._last_step: int | None = None if number > 1 else -1
        """The last step written; None: an earlier session may have written any step."""
        self._append(file_version="brain.Event:2")

    def write(self, step: int, summary: Summary) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        if self._last_step is None or step <= self._last_step:
            self._append(step=step, session_log=SessionLog(status=SessionLog.START))
        self._last_step = step
        self._append(step=step, summary=summary)

    def close(self) -> None:
        self._with_write_errors(self._record_writer.close)

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        record = Record(wall_time=self._clock(), **fields).SerializeToString()
        self._with_write_errors(lambda: self._record_writer.write(record))
        self._with_write_errors(self._record_writer.flush)

    def _with_write_errors(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be written: {error.strerror}") from error


def _session_number(name: str) -> int:
    """The session number in the name of an event file; 0 for other files."""
    number = name.removeprefix(EVENT_FILE_PREFIX)
    return int(number) if number != name and number.isascii() and number.isdigit() else 0


def _step_scalars(figures: Mapping[str, JSON]) -> dict[str, float]:
    values = {f"loss/{figures['expert']}": figures["loss"], **{name: figures.get(name) for name in STEP_SCALARS}}
    return {tag: value for tag, value in values.items() if isinstance(value, int | float)}


def _held_out_scalars(figures: Mapping[str, JSON]) -> dict[str, float]:
    """Means as `loss/EXPERT`, beside the training loss of the same expert; levels as `level/EXPERT/0.50`."""
    values = {}
    for row in training.held_out_losses(figures):
        tag = f"loss/{row.expert or 'all'}" if row.sigma is None else f"level/{row.expert or 'all'}/{row.sigma:.2f}"
        values[tag] = row.loss
    return values


SCALARS: Mapping[str, tuple[str, Callable[[Mapping[str, JSON]], Mapping[str, float]]]] = {
    training.TRAIN_STEP: ("train", _step_scalars),
    training.TRAIN_HELD_OUT: ("held_out", _held_out_scalars),
    training.TRAIN_RATES: ("rates", training.rate_scalars),
    MEMORY_MEASUREMENT: ("memory", training.memory_scalars),
}
"""Event → the folder of its event files, and its scalars by tag."""


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


def _scalar_summary(values: Mapping[str, float]) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
