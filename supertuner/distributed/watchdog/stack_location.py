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

from supertuner.distributed.watchdog.collective_errors import COLLECTIVES

Function: TypeAlias = tuple[str, str]
"""A file of ours, and a name in it."""

OURS = str(Path(__file__).parents[2]) + os.sep
WAITS: frozenset[Function] = frozenset(
    {
        ("distributed/gradient_sum.py", "arrive"),  # gloo's wait is a method that has no line in Python
        ("step/window.py", "_to_host"),  # for the GPU, which is in a collective
        ("cache/work_queue.py", "_wait_for_others"),
        ("cache/store.py", "_build"),
    }
)
"""In which one waits for other processes, beside torch's collectives."""
MAKES: Function = ("train/encoding/epochs.py", "make")
"""In which a thread makes what other processes may wait for."""
HANDED: dict[Function, Function] = {
    ("train/dataloader.py", "take"): ("train/dataloader.py", "_make"),
    ("cache/epoch_rotation.py", "at"): MAKES,
}
"""In which a thread waits for another one of this process → in which that one works."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
COMPILES = (f"{_TORCH}_dynamo/convert_frame.py", f"{_TORCH}_inductor/compile_fx.py")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    where: str = ""
    """In our code."""
    waits: bool = False
    """For other processes, and none of them may wait for it."""
    apart: bool = False
    """What goes on is no pass of a window: a batch is made, or what others wait for, or code is compiled."""


def whereabouts() -> Whereabouts:
    frames = sys._current_frames()
    main = _Stack(frames.pop(threading.main_thread().ident or 0, None))
    others = [_Stack(frame) for frame in frames.values()]
    last = main
    while (made := next((one for one in others if HANDED.get(last.at) in one.functions), None)) is not None:
        last = made
    if last.waits:
        last = next((one for one in others if MAKES in one.functions and not one.waits), last)
    apart = last is not main or any(one.compiles for one in (main, *others))
    return Whereabouts(last.where, last.waits, apart)


class _Stack:
    """Of one thread, from where it is to where it began."""

    def __init__(self, frame: FrameType | None) -> None:
        self.functions: list[Function] = []
        self.where = ""
        self.waits = self.compiles = False
        for one in _outwards(frame):
            code = one.f_code
            if code.co_filename.startswith(OURS):
                function = (code.co_filename.removeprefix(OURS), code.co_name)
                self.where = self.where or f"supertuner/{function[0]}:{one.f_lineno}, {function[1]}"
                self.waits = self.waits or function in WAITS
                self.functions.append(function)
            elif not self.functions and code.co_filename.startswith(COLLECTIVES):
                self.waits = True
            elif code.co_filename in COMPILES:
                self.compiles = True

    @property
    def at(self) -> Function:
        return self.functions[0] if self.functions else ("", "")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
