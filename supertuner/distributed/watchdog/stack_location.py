"""Where this process is, told by the stacks of its threads: in which line of ours, and whether it waits for others.

The main thread waits for threads of its own too, for the next batch or the next epoch's entries: then it is where they
are. Nobody has to say so: what does not come on cannot.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import torch

from supertuner.distributed.watchdog.collective_errors import TORCH_DISTRIBUTED_PREFIX

FunctionKey: TypeAlias = tuple[str, str]
"""A file of ours, and a name in it."""

PACKAGE_PREFIX = str(Path(__file__).parents[2]) + os.sep
WAITING_FUNCTIONS: frozenset[FunctionKey] = frozenset(
    {
        ("distributed/gradient_sum.py", "arrive"),  # gloo's wait is a method that has no line in Python
        ("step/window.py", "_to_host"),  # for the GPU, which is in a collective
        ("cache/work_queue.py", "_wait_for_others"),
        ("cache/store.py", "_build"),
    }
)
"""In which one waits for other processes, beside torch's collectives."""
PRODUCER_FUNCTION: FunctionKey = ("train/encoding/epochs.py", "make")
"""In which a thread makes what other processes may wait for."""
PRODUCER_BY_CONSUMER: dict[FunctionKey, FunctionKey] = {
    ("train/dataloader.py", "take"): ("train/dataloader.py", "_make"),
    ("cache/epoch_rotation.py", "at"): PRODUCER_FUNCTION,
}
"""In which a thread waits for another one of this process → in which that one works."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
COMPILER_FILES = (f"{_TORCH}_dynamo/convert_frame.py", f"{_TORCH}_inductor/compile_fx.py")


@dataclass(frozen=True, slots=True)
class StackLocation:
    where: str = ""
    """In our code."""
    waits_for_ranks: bool = False
    """For other processes, and none of them may wait for it."""
    outside_window: bool = False
    """What goes on is no pass of a window: a batch is made, or what others wait for, or code is compiled."""


def current_location() -> StackLocation:
    frames = sys._current_frames()
    main_stack = _ThreadStack(frames.pop(threading.main_thread().ident or 0, None))
    other_stacks = [_ThreadStack(frame) for frame in frames.values()]
    stack = main_stack
    while (
        producer := next(
            (one for one in other_stacks if PRODUCER_BY_CONSUMER.get(stack.innermost) in one.functions), None
        )
    ) is not None:
        stack = producer
    if stack.waits_for_ranks:
        stack = next(
            (one for one in other_stacks if PRODUCER_FUNCTION in one.functions and not one.waits_for_ranks), stack
        )
    outside_window = stack is not main_stack or any(one.compiles for one in (main_stack, *other_stacks))
    return StackLocation(stack.where, stack.waits_for_ranks, outside_window)


class _ThreadStack:
    """Of one thread, from where it is to where it began."""

    def __init__(self, frame: FrameType | None) -> None:
        self.functions: list[FunctionKey] = []
        self.where = ""
        self.waits_for_ranks = self.compiles = False
        for caller in _frames_outwards(frame):
            code = caller.f_code
            if code.co_filename.startswith(PACKAGE_PREFIX):
                function = (code.co_filename.removeprefix(PACKAGE_PREFIX), code.co_name)
                self.where = self.where or f"supertuner/{function[0]}:{caller.f_lineno}, {function[1]}"
                self.waits_for_ranks = self.waits_for_ranks or function in WAITING_FUNCTIONS
                self.functions.append(function)
            elif not self.functions and code.co_filename.startswith(TORCH_DISTRIBUTED_PREFIX):
                self.waits_for_ranks = True
            elif code.co_filename in COMPILER_FILES:
                self.compiles = True

    @property
    def innermost(self) -> FunctionKey:
        return self.functions[0] if self.functions else ("", "")


def _frames_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
