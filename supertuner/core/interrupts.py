"""Remembers interrupts that signal handlers raise, so that an interrupt wins over any error that it is turned into.

A handler may run anywhere in the main thread, and what it raises can get lost. Libraries turn it into an error of their
own: safetensors raises ValueError for a KeyboardInterrupt inside a load, which looks like a damaged file. Python itself
only prints what is raised inside a weak-reference callback, a `__del__` method or a callback of the garbage collector.
Therefore a handler remembers what it raises, and `interrupts_win` raises it at the end of a unit of work, whatever came
out of that. Without a remembered interrupt, errors stay what they are.

Units of work are commands and functions of the API (outermost), the training loop, validations, loads of a model
component or a checkpoint, and the block in which a process watches other ranks. In between, `raise_lost_interrupt`
stands where work can stop: after a window, at each update of a progress display, and before files get their names.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeAlias

SignalHandler: TypeAlias = Callable[[int, FrameType | None], Any]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request the end of a process: Ctrl-C, a scheduler or `kill`, a closed terminal."""
_ATTRIBUTE = "_supertuner_interrupts"
"""Of the main thread, the only one that runs handlers: a list with the remembered interrupts; it exists in a block."""


@contextmanager
def interrupts_win() -> Iterator[None]:
    """If a handler raised an interrupt inside this block or an enclosing one, the block ends with it, in any case.

    The outermost block lets the handlers that it finds remember what they raise; at its end it restores them, and
    forgets. Other threads than the main one run no handlers: there the block does nothing. Also a decorator.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    attributes = vars(threading.main_thread())
    if _ATTRIBUTE in attributes:
        with _raising_remembered(attributes[_ATTRIBUTE]):
            yield
        return
    remembered = attributes[_ATTRIBUTE] = list[BaseException]()
    try:
        with _raising_remembered(remembered), _remembering_handlers(), _without_traces_of(remembered):
            yield
    finally:
        del attributes[_ATTRIBUTE]


def raise_interrupt(interrupt: BaseException) -> NoReturn:
    """For signal handlers: remember the interrupt, and raise it."""
    _remembered().append(interrupt)
    raise interrupt


def forget_interrupts() -> None:
    """Forget remembered interrupts: the caller has handled them, and decides which error comes out."""
    _remembered().clear()


def raise_lost_interrupt() -> None:
    """Raise the remembered interrupt, if there is one. Call it where work can stop, such as between two windows.

    Does nothing while an exception is handled: the interrupt may be on its way, and cleaning up must go on.
    """
    remembered = _remembered()
    if remembered and threading.current_thread() is threading.main_thread() and sys.exception() is None:
        raise _copy_of(remembered[0])


@contextmanager
def _raising_remembered(remembered: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if remembered and (type(error), error.args) != (type(remembered[0]), remembered[0].args):
            raise _copy_of(remembered[0]) from error
        raise
    if remembered:
        raise _copy_of(remembered[0])


def _remembered() -> list[BaseException]:
    """The interrupts that handlers raised in the current block; outside of blocks nothing is remembered."""
    interrupts: list[BaseException] = vars(threading.main_thread()).get(_ATTRIBUTE, [])
    return interrupts


def _copy_of(interrupt: BaseException) -> BaseException:
    """A new exception: raising the same one twice would make it its own cause."""
    return type(interrupt)(*interrupt.args)


@contextmanager
def _remembering_handlers() -> Iterator[None]:
    """Wrap the stop signals' Python handlers, so that they remember what they raise.

    A signal that ends the process or is ignored raises nothing and keeps its disposition.
    """
    previous: dict[signal.Signals, SignalHandler] = {}
    try:
        for number in STOP_SIGNALS:
            if callable(handler := signal.getsignal(number)):
                previous[number] = handler
                signal.signal(number, _remembering(handler))
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _without_traces_of(remembered: list[BaseException]) -> Iterator[None]:
    """Do not print the traceback of an interrupt where Python ignores it: it will be raised elsewhere."""
    print_unraisable = sys.unraisablehook

    def print_others(unraisable: sys.UnraisableHookArgs, /) -> None:
        if not any(unraisable.exc_value is interrupt for interrupt in remembered):
            print_unraisable(unraisable)

    sys.unraisablehook = print_others
    try:
        yield
    finally:
        sys.unraisablehook = print_unraisable


def _remembering(handler: SignalHandler) -> SignalHandler:
    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as interrupt:
            _remembered().append(interrupt)
            raise

    return handle
