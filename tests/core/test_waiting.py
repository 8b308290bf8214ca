"""Marks that say what a thread waits for: each thread has its own, and they end with their block."""

from __future__ import annotations

import threading

import pytest

from supertuner.core.waiting import (
    MarkKind,
    ThreadMark,
    marks_by_thread,
    waiting_for_other_ranks,
    waiting_for_thread,
    working_on,
)


def own_marks() -> tuple[ThreadMark, ...]:
    return marks_by_thread().get(threading.get_ident(), ())


def test_marks_are_nested_and_end_with_their_block() -> None:
    with working_on("an epoch", for_other_ranks=True):
        with waiting_for_other_ranks("gradient all-reduce"):
            assert own_marks() == (
                ThreadMark(MarkKind.WORKS_FOR_RANKS, "an epoch"),
                ThreadMark(MarkKind.WAITS_FOR_RANKS, "gradient all-reduce"),
            )
        assert [mark.task for mark in own_marks()] == ["an epoch"]
    assert own_marks() == ()


def test_an_error_ends_the_mark() -> None:
    with pytest.raises(ValueError), waiting_for_thread("next batch"):
        raise ValueError
    assert own_marks() == ()


def test_each_thread_has_its_own_marks() -> None:
    marked, done = threading.Event(), threading.Event()

    def wait() -> None:
        with working_on("next batch"):
            marked.set()
            done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    marked.wait()
    with waiting_for_thread("next batch"):
        marks = marks_by_thread()
    assert marks[thread.ident] == (ThreadMark(MarkKind.WORKS, "next batch"),)
    assert marks[threading.get_ident()] == (ThreadMark(MarkKind.WAITS_FOR_THREAD, "next batch"),)
    done.set()
    thread.join()
    assert thread.ident not in marks_by_thread()
