"""Marks in the code that say what a thread waits for or works on; the watchdog reads them when nothing moves.

A mark is pushed when its `with` block begins and popped when the block ends, by the thread that runs the block. The
list of marks is an attribute of the thread object, where the watchdog's thread finds it. Each thread changes only its
own list, so no lock is needed; a reader may see a list that is one mark old.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import NamedTuple


class MarkKind(Enum):
    WAITS_FOR_RANKS = "waits for other ranks"
    WAITS_FOR_THREAD = "waits for another thread of this process"
    WORKS = "works on what another thread waits for"
    WORKS_FOR_RANKS = "works on what other ranks may wait for, too"


class ThreadMark(NamedTuple):
    kind: MarkKind
    task: str
    """What is waited for or worked on. A thread that waits for a task is where the thread is that works on it."""


_ATTRIBUTE = "_supertuner_marks"
_OPERATION = "_supertuner_operation"


class _MarkedBlock:
    """A context manager for one thread and one use. (`contextlib.contextmanager` takes three times as long.)"""

    __slots__ = ("_mark", "_marks")

    def __init__(self, mark: ThreadMark) -> None:
        self._mark = mark

    def __enter__(self) -> None:
        self._marks: list[ThreadMark] = vars(threading.current_thread()).setdefault(_ATTRIBUTE, [])
        self._marks.append(self._mark)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        mark = self._marks.pop()
        if isinstance(error, RuntimeError) and mark.kind is MarkKind.WAITS_FOR_RANKS:
            vars(error)[_OPERATION] = mark.task


def waiting_for_other_ranks(operation: str) -> _MarkedBlock:
    """Mark a block in which this thread waits for other processes of the job: `with waiting_for_other_ranks("…"):`."""
    return _MarkedBlock(ThreadMark(MarkKind.WAITS_FOR_RANKS, operation))


def failed_operation(error: BaseException) -> str | None:
    """The wait for other ranks in which torch raised this error; None if it was raised elsewhere."""
    operation: str | None = vars(error).get(_OPERATION)
    return operation


def waiting_for_thread(task: str) -> _MarkedBlock:
    """Mark a block in which this thread waits until another thread of this process has done `task`."""
    return _MarkedBlock(ThreadMark(MarkKind.WAITS_FOR_THREAD, task))


def working_on(task: str, *, for_other_ranks: bool = False) -> _MarkedBlock:
    """Mark a block in which this thread does `task`. `for_other_ranks`: other ranks may wait for the result, too."""
    return _MarkedBlock(ThreadMark(MarkKind.WORKS_FOR_RANKS if for_other_ranks else MarkKind.WORKS, task))


def marks_by_thread() -> dict[int | None, tuple[ThreadMark, ...]]:
    """Thread id → its marks at this moment, outermost first. Threads without marks are absent."""
    marks = {thread.ident: tuple(vars(thread).get(_ATTRIBUTE, ())) for thread in threading.enumerate()}
    return {thread_id: found for thread_id, found in marks.items() if found}
