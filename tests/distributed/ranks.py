"""Several processes that work together in a test: started by a fork server, connected by a store of the test process.

The test owns the store, as torchrun does for its processes, so no other process can take the port before the ranks
meet. No process is left behind: leaving the block ends those that still run, and they end with the fork server.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore

from supertuner.config.sources.launcher import LauncherEnvironment
from tests import children

Value = TypeVar("Value")
PR_SET_PDEATHSIG = 1
VERY_LONG_S = 3600.0


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a rank ended."""

    value: Any = None
    error: str | None = None
    """The traceback of what it raised; None: it returned."""
    exitcode: int = 0
    """Negative: the signal that killed it."""

    @property
    def ended_well(self) -> bool:
        return self.error is None and self.exitcode == 0


class RankProcesses:
    """Running ranks, for tests that interfere with one of them."""

    def __init__(self, processes: list[ForkServerProcess], ends: list[Connection]) -> None:
        self._processes, self._ends = processes, ends
        self._outcomes: dict[int, RankOutcome] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def running(self, rank: int) -> bool:
        return self._processes[rank].exitcode is None

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def wait_for(self, file: Path, seconds: float = VERY_LONG_S) -> None:
        """Wait until a rank has created that file; TimeoutError after the limit."""
        end = time.monotonic() + seconds
        while not file.exists():
            assert all(map(self.running, range(len(self._processes)))), f"one ended before there was {file}"
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.02)

    def ended(self) -> list[RankOutcome]:
        """Wait until every rank has ended by itself."""
        for rank in range(len(self._processes)):
            self._outcome(rank)
        return [self._outcomes[rank] for rank in range(len(self._processes))]

    def values(self) -> list[Any]:
        """The results of all ranks. The first rank that fails ends the test, whatever the others wait for."""
        self._wait_until_one_fails()
        failed = [rank for rank, outcome in self._outcomes.items() if not outcome.ended_well]
        assert not failed, "\n".join(map(self._how, failed))
        return [self._outcomes[rank].value for rank in range(len(self._processes))]

    def close(self) -> None:
        for process in self._processes:
            children.kill(process)
        for end in self._ends:
            end.close()

    def _wait_until_one_fails(self) -> None:
        """Other ranks that lost their connection report it a moment earlier or later: collect all of them."""
        waiting = {end: rank for rank, end in enumerate(self._ends) if rank not in self._outcomes}
        patience_s = None
        while waiting and (answered := wait(list(waiting), patience_s)):
            for end in answered:
                assert isinstance(end, Connection)
                if not self._outcome(waiting.pop(end)).ended_well:
                    patience_s = 2.0

    def _how(self, rank: int) -> str:
        outcome = self._outcomes[rank]
        how = outcome.error or f"exit code {outcome.exitcode}, and it said nothing"
        return f"rank {rank} of {len(self._processes)} ended with\n{how}"

    def _outcome(self, rank: int) -> RankOutcome:
        if rank not in self._outcomes:
            try:
                value, error = self._ends[rank].recv()
            except EOFError:  # killed, or ended by os._exit: its exit code says how
                value, error = None, None
            self._outcomes[rank] = RankOutcome(value, error, children.ended(self._processes[rank]))
        return self._outcomes[rank]


@dataclass(frozen=True, slots=True)
class LauncherProcess:
    """A process that only serves the store, for tests that interfere with it."""

    process: ForkServerProcess
    port: int

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def a_launcher() -> Iterator[LauncherProcess]:
    mine, its = Pipe(duplex=False)
    process = children.begin(_launcher, its)
    try:
        yield LauncherProcess(process, mine.recv())
    finally:
        children.kill(process)


@contextmanager
def launched_ranks(
    count: int, work: Callable[..., object], *of: object, launcher: LauncherProcess | None = None
) -> Iterator[RankProcesses]:
    """Run `work(place, *of)` in each of `count` processes with the environment that torchrun would set.

    `work` is a module-level function; its arguments and result can be pickled. The store is the launcher's, if there is
    one.
    """
    store = None if launcher else _own_store()
    port = launcher.port if store is None else store.port
    processes: list[ForkServerProcess] = []
    ends: list[Connection] = []
    ranks = RankProcesses(processes, ends)
    try:
        for rank in range(count):
            mine, its = Pipe(duplex=False)
            ends.append(mine)
            processes.append(children.begin(_rank, its, LauncherEnvironment(rank, count, rank, count), port, work, of))
            its.close()
        yield ranks
    finally:
        ranks.close()


def run_launched(count: int, work: Callable[..., Value], *of: object) -> list[Value]:
    """The results of `work(place, *of)` in `count` processes that look as if a launcher had started them."""
    with launched_ranks(count, work, *of) as ranks:
        return ranks.values()


@contextmanager
def joined_ranks(count: int, work: Callable[..., object], *of: object) -> Iterator[RankProcesses]:
    """Run `work(group, *of)` in each of `count` processes that have joined a process group."""
    with launched_ranks(count, _joined, work, *of) as ranks:
        yield ranks


def run_ranks(count: int, work: Callable[..., Value], *of: object) -> list[Value]:
    """The results of `work(group, *of)` in `count` joined processes, in the order of ranks."""
    with joined_ranks(count, work, *of) as ranks:
        return ranks.values()


def command(place: LauncherEnvironment, logs: Path, *arguments: str) -> int:
    """For `run_launched`: run `supertuner arguments…`; returns its exit code. Output: `logs / "rank-N.txt"`."""
    log = os.open(logs / f"rank-{place.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    from supertuner.cli import main

    sys.argv = ["supertuner", *arguments]
    try:
        main()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def rank_log(logs: Path, rank: int) -> str:
    """The output of a `command` of this rank."""
    return (logs / f"rank-{rank}.txt").read_text(errors="replace")


def all_messages(logs: Path, outcomes: list[RankOutcome]) -> str:
    """What all ranks printed, and the errors they ended with."""
    texts = [rank_log(logs, rank) + (outcome.error or "") for rank, outcome in enumerate(outcomes)]
    return "\n".join(texts)


def _own_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=VERY_LONG_S))


def _launcher(answer: Connection) -> None:
    """A launcher's side."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    store = _own_store()
    answer.send(store.port)
    signal.pause()


def _rank(
    answer: Connection, place: LauncherEnvironment, port: int, work: Callable[..., object], of: tuple[object, ...]
) -> None:
    """A rank's side."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the fork server, if nothing ends it before
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists already: rank 0 creates none
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    try:
        value = work(place, *of)
    except BaseException:  # noqa: BLE001 — any error is reported to the test
        answer.send((None, traceback.format_exc()))
    else:
        answer.send((value, None))


def _joined(place: LauncherEnvironment, work: Callable[..., object], *of: object) -> object:
    from supertuner.distributed.torch_process_group import join_process_group

    with join_process_group(place, torch.device("cpu"), timeout_s=VERY_LONG_S) as group:
        return work(group, *of)
