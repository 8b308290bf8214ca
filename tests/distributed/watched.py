"""What ranks of tests do under the watch: wait for each other, and then one of them fails in some way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.sources.launcher import Launched
from supertuner.core.errors import PeerError, StageError
from supertuner.distributed.process_group import Parallel
from supertuner.distributed.setup import open_parallel
from supertuner.distributed.watchdog.heartbeat import Pulse
from supertuner.distributed.watchdog.watch import BEAT_S
from supertuner.train.signals import Signals

VERY_LONG_S = 3600.0


def together(place: Launched, logs: Path, fault: str, timeout_s: float) -> int:
    """Meet, work together, and let rank 1 do `fault`; the others wait for it in a collective."""
    log_to(logs, place)
    pulse = Pulse()
    with open_parallel(ParallelSettings(timeout_s=timeout_s), place, torch.device("cpu"), pulse) as parallel:
        parallel.agree([1])
        if place.rank == 1 or fault == "failing together":
            pulse.doing = "painting"
            FAULTS[fault](parallel)
        return parallel.agree([place.rank])[0]


Lost = Literal["goes on", "prepares", "hangs", "fails", "is done"]


def until_asked(place: Launched, logs: Path, then: Lost, timeout_s: float) -> str:
    """Step by step with the others, until a signal asks to stop, or until the file `lost` is there and rank 1 does
    `then`."""
    log_to(logs, place)
    pulse, lost = Pulse(), logs / "lost"
    with (
        open_parallel(ParallelSettings(timeout_s=timeout_s), place, torch.device("cpu"), pulse) as parallel,
        nullcontext() if then == "prepares" else Signals() as signals,
    ):
        (logs / f"works-{place.rank}").touch()
        while True:
            asked, seen = parallel.agree([0 if signals is None else signals.number, lost.exists()])
            pulse.mark()
            if asked:
                time.sleep(2 * BEAT_S)  # as a save takes its time: meanwhile each has noticed for itself
                return f"saved after {Signals.name_of(asked)}"
            if seen and then == "is done":
                return "done"
            if seen and then == "hangs" and place.rank == 1:
                _hang(parallel)
            if seen and then == "fails" and place.rank == 1:
                time.sleep(2 * BEAT_S)  # so that the watch asks the launcher before
                _fail(parallel)
            time.sleep(0.01)


def log_to(logs: Path, place: Launched) -> None:
    log = os.open(logs / f"rank-{place.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)


def _kill(parallel: Parallel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(parallel: Parallel) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(parallel: Parallel) -> None:
    time.sleep(VERY_LONG_S)


def _fail(parallel: Parallel) -> None:
    raise StageError("the disk is full; free some")


def _leave_early(parallel: Parallel) -> None:
    os._exit(3)


def _out_of_step(parallel: Parallel) -> None:
    """A call that the others do not make: nobody comes on from there."""
    parallel.gather(b"more than a number")


def _terminate(parallel: Parallel) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(VERY_LONG_S)


def _terminate_late(parallel: Parallel) -> None:
    """The launcher's signal comes while this process asks the others why it has to end."""
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    raise PeerError("process 0 of this node is gone")


def _nothing(parallel: Parallel) -> None:
    pass


FAULTS: dict[str, Callable[[Parallel], None]] = {
    "killed": _kill,
    "stopped": _stop,
    "hanging": _hang,
    "failing": _fail,
    "failing together": _fail,
    "leaving": _leave_early,
    "out of step": _out_of_step,
    "terminated": _terminate,
    "terminated late": _terminate_late,
    "nothing": _nothing,
}
