"""An interrupt wins over whatever a library makes of it, and none is lost; without one, errors stay what they are."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from supertuner.core import interrupts
from supertuner.core.interrupts import interrupts_win, raise_interrupt, raise_lost_interrupt


class Watched:
    """Something that weak references can point to."""


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def lose_in_weak_reference_callback() -> None:
    watched = Watched()
    kept = weakref.ref(watched, lambda _: press_ctrl_c())
    del watched
    assert kept() is None


def lose_in_finalizer() -> None:
    class Closing:
        def __del__(self) -> None:
            press_ctrl_c()

    Closing()


def lose_in_collector_callback() -> None:
    def callback(phase: str, info: object) -> None:
        if phase == "start":
            press_ctrl_c()

    gc.callbacks.append(callback)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(callback)


def lose_in_library() -> None:
    with suppress(BaseException):
        press_ctrl_c()


LOSSES = (lose_in_weak_reference_callback, lose_in_finalizer, lose_in_collector_callback, lose_in_library)


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was not restored"
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_a_library_turns_into_an_error_comes_out_as_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, interrupts_win():
        try:
            press_ctrl_c()
        except KeyboardInterrupt:
            raise ValueError("the file is damaged") from None
    assert str(raised.value.__cause__) == "the file is damaged"


def test_an_error_without_an_interrupt_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="really damaged"), interrupts_win():
        raise ValueError("really damaged")


@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_interrupt_ends_its_block(lose: Callable[[], None]) -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupts_win():
        lose()
        steps.append("work goes on")
    assert steps == ["work goes on"]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_interrupt_is_raised_where_work_can_stop(lose: Callable[[], None]) -> None:
    with interrupts_win():
        raise_lost_interrupt()  # there is none yet
    with pytest.raises(KeyboardInterrupt), interrupts_win():
        lose()
        with pytest.raises(KeyboardInterrupt):
            raise_lost_interrupt()


@pytest.mark.parametrize("lose", LOSSES)
def test_no_traceback_of_a_lost_interrupt_is_printed(
    lose: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest's own collects instead of printing
    with pytest.raises(KeyboardInterrupt), interrupts_win():
        lose()
    assert capsys.readouterr().err == "" and sys.unraisablehook is sys.__unraisablehook__


def test_other_errors_that_python_ignores_are_still_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with interrupts_win():
        Failing()
    assert "ValueError: in a finalizer" in capsys.readouterr().err


def test_cleaning_up_after_an_interrupt_is_not_interrupted_again() -> None:
    cleaned = []
    with pytest.raises(KeyboardInterrupt), interrupts_win():
        try:
            press_ctrl_c()
        finally:
            raise_lost_interrupt()
            cleaned.append(True)
    assert cleaned == [True]


def test_an_inner_block_ends_with_the_interrupt_so_that_no_handler_between_takes_it_for_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_win():
        try:
            with interrupts_win():
                lose_in_library()
                raise OSError("cannot be read")
        except OSError:
            pytest.fail("the interrupt was taken for an unreadable file")


def test_a_block_knows_only_its_own_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_win():
        press_ctrl_c()
    with pytest.raises(ValueError), interrupts_win():
        raise ValueError


def test_an_exit_code_that_a_handler_raises_is_kept() -> None:
    def leave(number: int, frame: object) -> None:
        raise_interrupt(SystemExit(128 + number))

    with pytest.raises(SystemExit) as raised, interrupts_win():
        before = signal.signal(signal.SIGTERM, leave)
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(0) from None
        finally:
            signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 128 + signal.SIGTERM


def test_handlers_that_the_program_has_set_are_called_and_what_they_raise_wins() -> None:
    called = []

    def own_handler(number: int, frame: object) -> None:
        called.append(number)
        raise TimeoutError("the program's own limit")

    signal.signal(signal.SIGINT, own_handler)
    try:
        with pytest.raises(TimeoutError, match="own limit"), interrupts_win():
            lose_in_library()
        assert signal.getsignal(signal.SIGINT) is own_handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert called == [signal.SIGINT]


def test_ignored_signals_and_those_that_end_the_process_keep_their_disposition() -> None:
    before = {number: signal.getsignal(number) for number in interrupts.STOP_SIGNALS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts_win():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_handled_interrupt_can_be_forgotten() -> None:
    with pytest.raises(ValueError), interrupts_win():
        lose_in_library()
        interrupts.forget_interrupts()
        raise ValueError


def test_errors_of_another_thread_stay_its_own_while_the_main_thread_is_interrupted() -> None:
    found: list[BaseException] = []

    @interrupts_win()
    def work() -> None:
        raise ValueError("of the thread")

    def run() -> None:
        try:
            work()
        except (ValueError, KeyboardInterrupt) as error:
            found.append(error)

    with pytest.raises(KeyboardInterrupt), interrupts_win():
        lose_in_library()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert [str(error) for error in found] == ["of the thread"]
