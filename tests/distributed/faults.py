"""Runs of several ranks in which something happens to one of them; shared by the suite and `make torture`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from supertuner.api.session import open_session
from supertuner.api.training import train_in_session
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.config.sources.load import load_config
from supertuner.core.errors import StageError
from supertuner.distributed import gradient_sum
from tests.distributed.ranks import RankOutcome, launched_ranks
from tests.distributed.runs import STEPS, ActingSink, a_run, train
from tests.train.runs import artefacts

LASTING = {"every_steps": 2, "keep": 2}


def failing(place: LauncherEnvironment, path: Path, rank: int, step: int) -> None:
    """Train, and let `rank` fail after a step."""

    def action() -> None:
        if place.rank == rank:
            raise StageError("the disk is full; free some")

    with open_session(load_config(path), place) as work:
        train_in_session(work, extra_sink=ActingSink(step, action))


def signalled_in_callback(place: LauncherEnvironment, path: Path, rank: int, step: int) -> str | None:
    """Train; after a step, `rank` gets SIGTERM inside a weak-reference callback, where Python only prints what a signal
    handler raises. Returns what stopped the run."""

    class Released:
        pass

    def action() -> None:
        if place.rank == rank:
            released = Released()
            reference = weakref.ref(released, lambda _: signal.raise_signal(signal.SIGTERM))
            del released
            assert reference() is None

    with open_session(load_config(path), place) as work:
        return train_in_session(work, extra_sink=ActingSink(step, action)).stopped_by


def killed_at(path: Path, ranks: int, rank: int, step: int) -> list[RankOutcome]:
    """Train on `ranks` processes; `rank` is killed after a step."""
    with launched_ranks(ranks, train, path, rank, step, signal.SIGKILL) as begun:
        return begun.ended()


def killed_after(path: Path, ranks: int, rank: int, seconds: float) -> bool:
    """Kill `rank` after some seconds; returns whether the run had not ended before. The other ranks get the SIGTERM
    that a launcher sends then, which must not cause a save: nothing that they could save is complete."""
    with launched_ranks(ranks, train, path) as begun:
        time.sleep(seconds)
        alive = begun.running(rank)
        if alive:
            os.kill(begun.pids[rank], signal.SIGKILL)
            for other in set(range(ranks)) - {rank}:
                with suppress(ProcessLookupError):  # it had ended
                    begun.signal(other, signal.SIGTERM)
        outcomes = begun.ended()
    if not alive:
        assert all(outcome.ended_well for outcome in outcomes), outcomes
    return alive


def killed_run(folder: Path, name: str, ranks: int, kills: int, seed: int, usual_s: float) -> int:
    """Start a run repeatedly, killing a random rank at a random moment each time, then let it finish. Whenever it
    finishes before all kills are used up, it is compared and restarted. Returns how often it finished."""
    chance, done, ends = random.Random(seed), 0, 0
    path = a_run(folder, name, ranks, checkpoints=LASTING)
    while done < kills:
        longest = chance.choice((usual_s * 0.3, usual_s * 1.1))  # half come early: staging, encoding, reading
        done += killed_after(path, ranks, chance.randrange(ranks), chance.uniform(0, longest))
        if (folder / name / "run" / "exports" / f"step-{STEPS:08d}").is_dir():
            _end(path, folder, name, ranks)
            ends += 1
    _end(path, folder, name, ranks)
    return ends + 1


def _end(path: Path, folder: Path, name: str, ranks: int) -> None:
    with launched_ranks(ranks, train, path) as begun:
        begun.values()
    check_same(folder, name)
    shutil.rmtree(folder / name)


def check_same(folder: Path, name: str) -> None:
    """The run's files equal, to the bit, those of the undisturbed run `whole`."""
    expected, found = artefacts(folder / "whole" / "run"), artefacts(folder / name / "run")
    assert sorted(found) == sorted(expected)
    assert [file for file in expected if found[file] != expected[file]] == []


def interrupted_in_sum(place: LauncherEnvironment, path: Path, rank: int, bucket: int, number: int) -> int:
    """Train; `rank` sends itself a signal before it sends its `bucket`-th bucket, while the others wait for its sum."""
    start, count = gradient_sum._start_all_reduce, iter(range(bucket + 1))

    def start_or_end(tensors: list[torch.Tensor]) -> gradient_sum._BucketInFlight:
        if place.rank == rank and next(count, None) == bucket:
            os.kill(os.getpid(), number)
        return start(tensors)

    gradient_sum._start_all_reduce = start_or_end
    return train(place, path).step
