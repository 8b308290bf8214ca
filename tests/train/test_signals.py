"""Signals request the loop to stop or to validate; afterwards the previous handlers are restored."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from supertuner.train.signals import TrainingSignals

OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_requests_save_and_stop_with_a_message(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with TrainingSignals() as signals:
        assert signals.stop_number == 0
        send(number)
        assert signals.stop_number == number and not signals.pop_validate_request()
    assert "saving and stopping after this window" in capfd.readouterr().err


def test_of_several_processes_only_one_announces_the_stop(capfd: pytest.CaptureFixture[str]) -> None:
    with TrainingSignals(announces=False) as signals:
        send(signal.SIGTERM)
        assert signals.stop_number == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_a_second_ctrl_c_stops_at_once() -> None:
    with TrainingSignals() as signals:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.stop_number == signal.SIGINT


def test_a_second_sigterm_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with TrainingSignals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)  # the first of its kind: saving is still possible
        assert signals.stop_number == signal.SIGTERM
    assert capfd.readouterr().err.count("saving and stopping") == 1


def test_sigusr1_requests_one_validation() -> None:
    with TrainingSignals() as signals:
        assert not signals.pop_validate_request()
        send(signal.SIGUSR1)
        send(signal.SIGUSR1)
        assert signals.pop_validate_request() and not signals.pop_validate_request()
        assert signals.stop_number == 0


def test_previous_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in OURS]
    with pytest.raises(RuntimeError), TrainingSignals():
        assert [signal.getsignal(number) for number in OURS] != before
        raise RuntimeError
    assert [signal.getsignal(number) for number in OURS] == before


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with TrainingSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.stop_number == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_standard_error_does_not_matter() -> None:
    kept = os.dup(2)
    os.close(2)
    try:
        with TrainingSignals() as signals:
            send(signal.SIGTERM)
            assert signals.stop_number == signal.SIGTERM
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_another_thread_than_the_main_one_leaves_the_handlers_alone() -> None:
    before = [signal.getsignal(number) for number in OURS]
    stops: list[int] = []

    def work() -> None:
        with TrainingSignals() as signals:
            assert [signal.getsignal(number) for number in OURS] == before
            stops.append(signals.stop_number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stops == [0]
