"""Kills staging processes at random moments; used by the default suite and by `make torture`."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path

from supertuner.arena.home import ArenaHome
from tests.data.staging import contents, dataset, names, stager


def stage_in_child(folder: Path, home: Path) -> int:
    """Fork a child that stages `folder` immediately; returns its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests are idle
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            stager(home).stage(dataset(folder, in_memory={"num_workers": 3}))
            code = 0
        finally:
            os._exit(code)
    return pid


def kill_stagers(folder: Path, home: Path, times: int, seed: int) -> int:
    """Kill `times` staging processes at random moments and check the home after each.

    Returns how many were killed before they were done.
    """
    expected = {path.stem: path.read_bytes() for path in folder.glob("*.jpg")}
    longest_s = 1.1 * _usual_seconds(folder, home)
    rng = random.Random(seed)
    died = 0
    for _ in range(times):
        pid = stage_in_child(folder, home)
        time.sleep(rng.uniform(0, longest_s))
        os.kill(pid, signal.SIGKILL)
        was_killed = os.waitpid(pid, 0)[1] != 0
        died += was_killed
        longest_s *= (
            1.2 if was_killed else 0.7
        )  # the machine may have become less busy, or busier, since it was measured
        result = stager(home).stage(dataset(folder))
        assert {key: stored[0] for key, stored in contents(home, result.arena).items()} == expected
        assert names(home) == [result.arena], "leftovers of the killed process"
        ArenaHome(home).remove(result.arena)
    assert names(home) == []
    return died


def _usual_seconds(folder: Path, home: Path) -> float:
    """The shortest of three runs: the first has cold caches, and on a busy machine any run may take much longer."""
    durations = []
    for _ in range(3):
        began = time.perf_counter()
        os.waitpid(stage_in_child(folder, home), 0)
        durations.append(time.perf_counter() - began)
        for name in names(home):
            ArenaHome(home).remove(name)
    return min(durations)
