"""A closed terminal saves and stops a run like SIGTERM does, and a closed screen does not end the run."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from supertuner.core.events import WarningEvent
from supertuner.sinks.console import ConsoleSink
from supertuner.train.checkpoint.load import find_checkpoints
from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR
from tests.train.runs import ROOT, config

EXIT = 128 + signal.SIGHUP


def test_a_run_whose_terminal_is_closed_saves_and_stops(tmp_path: Path) -> None:
    quiet = {"at_start": False, "at_end": False, "every_steps": None}
    path = config(tmp_path, "closed", train={"max_steps": 100_000, "batch_size": 1}, validation=quiet)
    terminal, screen = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", "from supertuner.cli import main; main()", "train", str(path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
        preexec_fn=_its_terminal,
    )
    os.close(screen)
    try:
        _read_until(terminal, b"samples/s")  # in the live line during training
        os.close(terminal)
        assert run.wait(120) == EXIT
    finally:
        run.kill()
        run.wait()
    (found,) = find_checkpoints(tmp_path / "closed" / "run" / CHECKPOINTS_DIR)[-1:]
    assert found.step > 0 and found.problem is None
    assert "saved step" in (tmp_path / "closed" / "run" / "events.jsonl").read_text().splitlines()[-2]


def _read_until(terminal: int, words: bytes) -> None:
    seen = b""
    while words not in seen:
        try:
            seen += os.read(terminal, 1 << 16)
        except OSError as error:
            raise AssertionError(f"it ended: {seen[-2000:].decode(errors='replace')}") from error


def _its_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test runner may ignore it


@pytest.mark.parametrize("live", [False, True])
def test_a_closed_screen_does_not_end_the_run(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

        def isatty(self) -> bool:
            return live

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Closed())
    with ConsoleSink() as console, console.phase("staging", items=3) as phase:
        phase.advance(1)
        console.emit(WarningEvent("disk", "is slow"))
        phase.advance(2)


def test_output_of_others_appears_beside_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a display is live, rich prints everything written to standard error above it, through the same console."""
    terminal, screen = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(screen, "w") as shown:
        monkeypatch.setattr(sys, "stderr", shown)
        with ConsoleSink() as console, console.phase("staging", items=3) as phase:
            phase.advance(1)
            sys.stderr.write("by somebody else\n")
            phase.advance(2)
        _read_until(terminal, b"by somebody else")
    os.close(terminal)
