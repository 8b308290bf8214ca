"""Where this process is and how long its main thread has made no progress, for its reports to the other ranks.

Where: read off the stacks of its threads and the marks in the code (`core/waiting.py`). The main thread also waits for
other threads of the process, for the next batch or the next epoch's cache entries; the location is then that thread's.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from supertuner.core import processes
from supertuner.core.waiting import MarkKind, ThreadMark, marks_by_thread
from supertuner.distributed.watchdog.collective_errors import TORCH_DISTRIBUTED_PREFIX
from supertuner.distributed.watchdog.heartbeat import Heartbeat

PACKAGE_PREFIX = str(Path(__file__).parents[2]) + os.sep
_TORCH_PREFIX = os.path.dirname(torch.__file__) + os.sep
COMPILER_FILES = (f"{_TORCH_PREFIX}_dynamo/convert_frame.py", f"{_TORCH_PREFIX}_inductor/compile_fx.py")
"""Files of torch whose frames are on the stack while torch.compile works: compiling cannot be marked from outside."""
MAX_BEAT_S = 1.0
"""A longer time between two beats counts as this: this process was stopped, or its machine slept."""
BUSY_CPU_SHARE = 0.05
"""Of one CPU: a process that waits uses less, including its background threads; one that works uses more."""
BUSY_BYTES_PER_S = 1 << 14
"""Bytes read or written: a slow download is not a hang."""


@dataclass(frozen=True, slots=True)
class ThreadLocation:
    where: str = ""
    """Innermost line of this package, and what is awaited there: `supertuner/file.py:line, function, waiting for …`."""
    waits_for_ranks: bool = False
    """The process waits for other ranks, and none of its threads makes anything that they may wait for."""
    outside_window: bool = False
    """The work is not a forward or backward pass: a batch or an epoch's entries are made, or code is compiled."""


def current_location() -> ThreadLocation:
    """The location of the main thread or, where it waits for another thread, of that thread."""
    frames, marks = sys._current_frames(), marks_by_thread()
    stacks = {ident: _ThreadStack(frame, marks.get(ident, ())) for ident, frame in frames.items()}
    main = stacks.pop(threading.main_thread().ident or 0, _ThreadStack(None, ()))
    others = list(stacks.values())
    # Follow the waits from thread to thread: main waits for the batch thread, which may wait for the epoch thread.
    stack, worker = main, _worker(main, others)
    while worker is not None:
        stack, worker = worker, _worker(worker, others)
    # A process that waits for others may still owe them something: while its epoch thread works, that is where it is.
    if stack.waits_for_ranks:
        stack = next((other for other in others if other.works_for_ranks and not other.waits_for_ranks), stack)
    outside_window = stack is not main or any(thread.compiles for thread in (main, *others))
    return ThreadLocation(stack.where, stack.waits_for_ranks, outside_window)


def _worker(waiting: _ThreadStack, others: Sequence[_ThreadStack]) -> _ThreadStack | None:
    """The thread that works on what this one waits for."""
    return next((other for other in others if waiting.awaited_task in other.tasks), None)


class _ThreadStack:
    """What the frames and marks of one thread say. `frame` is the innermost."""

    def __init__(self, frame: FrameType | None, marks: tuple[ThreadMark, ...]) -> None:
        kinds = [mark.kind for mark in marks]
        self.where = ""
        self.compiles = False
        self.waits_for_ranks = MarkKind.WAITS_FOR_RANKS in kinds
        self.works_for_ranks = MarkKind.WORKS_FOR_RANKS in kinds
        self.tasks = {mark.task for mark in marks if mark.kind in (MarkKind.WORKS, MarkKind.WORKS_FOR_RANKS)}
        self.awaited_task = marks[-1].task if marks and marks[-1].kind is MarkKind.WAITS_FOR_THREAD else None
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE_PREFIX):
                file = code.co_filename.removeprefix(PACKAGE_PREFIX)
                self.where = self.where or f"supertuner/{file}:{frame.f_lineno}, {code.co_name}"
            elif not self.where and code.co_filename.startswith(TORCH_DISTRIBUTED_PREFIX):
                self.waits_for_ranks = True  # a collective that FSDP starts inside a pass: no code of ours to mark
            elif code.co_filename in COMPILER_FILES:
                self.compiles = True
            frame = frame.f_back
        awaited = [mark.task for mark in marks if mark.kind is MarkKind.WAITS_FOR_RANKS]
        if awaited:
            self.where += f", waiting for {awaited[-1]}"


class LivenessMonitor:
    """Measures how long the main thread has been idle. Time during which this process was stopped does not count."""

    def __init__(self, heartbeat: Heartbeat, *, chunk_s: float) -> None:
        """`chunk_s`: seconds between two checks of the use of CPU, disk and network."""
        self._heartbeat, self._chunk_s = heartbeat, chunk_s
        self._last_beat_s, self._marks = time.monotonic(), -1
        self._chunk_elapsed_s = 0.0
        self._cpu, self._bytes = _cpu_seconds(), processes.process_io_bytes()
        self.idle_s = 0.0
        """Seconds since the last sign of life."""
        self.location = ThreadLocation()
        """At the last beat."""
        self.elapsed_s = 0.0
        """Seconds between the last two beats, at most MAX_BEAT_S."""

    def beat(self) -> None:
        """Update all of it; called by the watchdog's thread at every beat."""
        now = time.monotonic()
        self.elapsed_s, self._last_beat_s = min(now - self._last_beat_s, MAX_BEAT_S), now
        before, self.location = self.location, current_location()
        self._chunk_elapsed_s += self.elapsed_s
        self.idle_s += self.elapsed_s
        if before.waits_for_ranks and not self.location.waits_for_ranks:
            self.idle_s = 0.0  # the wait has ended: however long it took, this process moves on
        if self._heartbeat.marks != self._marks:
            self._marks, self.idle_s = self._heartbeat.marks, 0.0
        if self._chunk_elapsed_s >= self._chunk_s:
            # Inside a pass only heartbeats count: a loop that never ends uses the CPU as well.
            if self._used_machine() and (self.location.outside_window or not self._heartbeat.in_window):
                self.idle_s = 0.0
            self._chunk_elapsed_s = 0.0

    def _used_machine(self) -> bool:
        """Whether this process used CPU, disk or network since the last call."""
        cpu, total_bytes = _cpu_seconds(), processes.process_io_bytes()
        used_cpu_s, moved_bytes = cpu - self._cpu, total_bytes - self._bytes
        self._cpu, self._bytes = cpu, total_bytes
        elapsed_s = self._chunk_elapsed_s
        return used_cpu_s > BUSY_CPU_SHARE * elapsed_s or moved_bytes > BUSY_BYTES_PER_S * elapsed_s


def _cpu_seconds() -> float:
    """CPU time of this process without the calling thread, which is the watchdog's."""
    return time.process_time() - time.thread_time()
