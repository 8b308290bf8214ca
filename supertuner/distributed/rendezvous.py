"""Where the processes of a job meet: the launcher's store, and all of them there before anything else begins.

Waiting for somebody who was never started ends after a set time and names who is missing. Afterwards collectives wait
as long as it takes: rank 0 may validate for an hour. Whether somebody is gone is for the watch to say.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from supertuner.config.sources.launcher import Launched
from supertuner.core.errors import TrainError
from supertuner.distributed.watchdog.timeout import within

COLLECTIVES_WAIT = timedelta(days=30)
LOOKS_EVERY_S = 0.02
MOMENT_S = 2.0
"""Longer than it takes to find out who is missing, which says more than that somebody is."""
NAMED = 8
"""Of those who are missing, as many are named."""


class _Missing(Exception):
    """Processes that did not come."""


def meet(place: Launched, *, timeout_s: float) -> Store:
    """The store of the job, once every process has come there: what was written by an earlier start is not in it."""
    try:
        return within(timeout_s + MOMENT_S, lambda: _met(place, timeout_s))
    except TimeoutError as error:
        raise _alone(place, timeout_s, "the launcher does not answer; it may be stopped") from error


def _met(place: Launched, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    try:
        found, _, _ = next(rendezvous("env://", place.rank, place.ranks, timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise _alone(place, timeout_s, str(error).splitlines()[0]) from error
    assert isinstance(found, Store)
    met = [f"met/{rank}" for rank in range(place.ranks)]
    called: Store | None = None
    try:
        called = _called_by_first(found, met, timeout_s) if place.first else _called(found, place, timeout)
        called.set(met[place.rank], "")
        called.wait(met, timeout)
    except RuntimeError as error:
        missing = "rank 0 did not come" if called is None else _missing(called, met)
        raise _alone(place, timeout_s, missing or str(error).splitlines()[0]) from error
    except _Missing as error:
        raise _alone(place, timeout_s, str(error)) from error
    return called


def _called(found: Store, place: Launched, timeout: timedelta) -> Store:
    """The part of the store that the first process names for this start. A launcher that restarts processes may keep
    its store, with all that the killed ones wrote: only one that lives answers a question of now."""
    question = secrets.token_hex(8)
    found.set(f"ask/{place.rank}", question)
    answer = f"answer/{question}"
    found.wait([answer], timeout)
    return PrefixStore(found.get(answer).decode(), found)


def _called_by_first(found: Store, met: list[str], timeout_s: float) -> Store:
    """The first process's side: answers until all have come, or until it has been long enough."""
    name, end = f"start/{secrets.token_hex(8)}", time.monotonic() + timeout_s
    store, waited_for = PrefixStore(name, found), set(range(1, len(met)))
    while waited_for and time.monotonic() < end:
        for rank in sorted(waited_for):
            if found.check([f"ask/{rank}"]):
                found.set(f"answer/{found.get(f'ask/{rank}').decode()}", name)
            if store.check([met[rank]]):
                waited_for.remove(rank)
        time.sleep(LOOKS_EVERY_S)
    if waited_for:
        raise _Missing(_missing(store, met))
    return store


def _missing(store: Store, met: list[str]) -> str:
    """Who has not come; nothing if the store cannot be asked any more."""
    try:
        missing = [str(rank) for rank, key in enumerate(met) if rank and not store.check([key])]
    except RuntimeError:
        return ""
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return f"rank {', '.join(missing[:NAMED])}{more} did not come" if missing else ""


def _alone(place: Launched, timeout_s: float, reason: str) -> TrainError:
    return TrainError(
        f"rank {place.rank} of {place.ranks} did not meet the others within {timeout_s:g} s (parallel.timeout_s): "
        f"{reason}; see that every process was started, and that MASTER_ADDR and MASTER_PORT can be reached from here"
    )
