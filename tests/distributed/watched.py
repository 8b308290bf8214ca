"""What ranks do under the watchdog: wait for each other, and then one of them fails in some way."""

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
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.errors import PeerError, StageError
from supertuner.distributed.process_group import ProcessGroup
from supertuner.distributed.torch_process_group import open_process_group
from supertuner.distributed.watchdog import watch
from supertuner.distributed.watchdog.heartbeat import Heartbeat
from supertuner.distributed.watchdog.watch import HEARTBEAT_S
from supertuner.train.signals import TrainingSignals

VERY_LONG_S = 3600.0


def together(place: LauncherEnvironment, logs: Path, fault: str, timeout_s: float) -> int:
    """Meet, work together, and let rank 1 do `fault`; the others wait for it in a collective."""
    log_to(logs, place)
    heartbeat = Heartbeat()
    with open_process_group(ParallelSettings(timeout_s=timeout_s), place, torch.device("cpu"), heartbeat) as parallel:
        parallel.all_reduce_max([1])
        if place.rank == 1 or fault == "failing together" or (place.rank == 0 and fault == "two killed"):
            heartbeat.activity = "painting"
            FAULTS[fault](parallel)
        return parallel.all_reduce_max([place.rank])[0]


def stopped_for_a_while(place: LauncherEnvironment, logs: Path, timeout_s: float) -> int:
    """`together`, in which rank 1 is stopped and the others soon report it."""
    watch.STOPPED_NOTE_S = 0.5
    return together(place, logs, "stopped", timeout_s)


def signalled_after_a_death(place: LauncherEnvironment, logs: Path) -> str:
    """`together`, in which rank 1 is killed; the other one gets SIGTERM on its way out, and returns its message."""
    try:
        together(place, logs, "killed", VERY_LONG_S)
    except PeerError as error:
        os.kill(os.getpid(), signal.SIGTERM)
        return str(error)
    return "no error"


Lost = Literal["goes on", "prepares", "hangs", "fails", "is done"]


def until_asked(place: LauncherEnvironment, logs: Path, then: Lost, timeout_s: float) -> str:
    """Step with the other ranks until a signal requests a stop, or the file `lost` exists and rank 1 does `then`."""
    log_to(logs, place)
    heartbeat, lost = Heartbeat(), logs / "lost"
    with (
        open_process_group(ParallelSettings(timeout_s=timeout_s), place, torch.device("cpu"), heartbeat) as parallel,
        nullcontext() if then == "prepares" else TrainingSignals() as signals,
    ):
        (logs / f"works-{place.rank}").touch()
        while True:
            asked, seen = parallel.all_reduce_max([0 if signals is None else signals.stop_number, lost.exists()])
            heartbeat.mark()
            if asked:
                time.sleep(2 * HEARTBEAT_S)  # as long as a save takes: meanwhile each rank has noticed the loss
                return f"saved after {signal.Signals(asked).name}"
            if seen and then == "is done":
                return "done"
            if seen and then == "hangs" and place.rank == 1:
                _hang(parallel)
            if seen and then == "fails" and place.rank == 1:
                time.sleep(2 * HEARTBEAT_S)  # so that the watchdog calls the launcher first
                _fail(parallel)
            time.sleep(0.01)


def log_to(logs: Path, place: LauncherEnvironment) -> None:
    log = os.open(logs / f"rank-{place.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)


def _kill(parallel: ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(parallel: ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(parallel: ProcessGroup) -> None:
    time.sleep(VERY_LONG_S)


def _fail(parallel: ProcessGroup) -> None:
    raise StageError("the disk is full; free some")


def _leave_early(parallel: ProcessGroup) -> None:
    os._exit(3)


def _out_of_step(parallel: ProcessGroup) -> None:
    """Call a collective that the others do not call: no rank gets any further."""
    parallel.all_gather(b"more than a number")


def _terminate(parallel: ProcessGroup) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(VERY_LONG_S)


def _terminate_late(parallel: ProcessGroup) -> None:
    """The launcher's signal comes while this rank is finding out why it has to end."""
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    raise PeerError("process 0 of this node is gone")


def _nothing(parallel: ProcessGroup) -> None:
    pass


FAULTS: dict[str, Callable[[ProcessGroup], None]] = {
    "killed": _kill,
    "two killed": _kill,
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
