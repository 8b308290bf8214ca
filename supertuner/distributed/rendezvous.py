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

from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.errors import TrainError
from supertuner.distributed.watchdog.timeout import call_with_timeout

COLLECTIVE_TIMEOUT = timedelta(days=30)
POLL_S = 0.02
GRACE_S = 2.0
"""Longer than it takes to find out who is missing, which says more than that somebody is."""
MAX_RANKS_NAMED = 8
"""Of those who are missing, as many are named."""


class _MissingRanksError(Exception):
    """Processes that did not come."""


def open_rendezvous_store(launch_env: LauncherEnvironment, *, timeout_s: float) -> Store:
    """The store of the job, once every process has come there: what was written by an earlier start is not in it."""
    try:
        return call_with_timeout(timeout_s + GRACE_S, lambda: _open_store(launch_env, timeout_s))
    except TimeoutError as error:
        raise _rendezvous_error(launch_env, timeout_s, "the launcher does not answer; it may be stopped") from error


def _open_store(launch_env: LauncherEnvironment, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    try:
        launcher_store, _, _ = next(rendezvous("env://", launch_env.rank, launch_env.world_size, timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise _rendezvous_error(launch_env, timeout_s, str(error).splitlines()[0]) from error
    assert isinstance(launcher_store, Store)
    arrival_keys = [f"met/{rank}" for rank in range(launch_env.world_size)]
    job_store: Store | None = None
    try:
        job_store = (
            _serve_job_store(launcher_store, arrival_keys, timeout_s)
            if launch_env.is_main_process
            else _request_job_store(launcher_store, launch_env, timeout)
        )
        job_store.set(arrival_keys[launch_env.rank], "")
        job_store.wait(arrival_keys, timeout)
    except RuntimeError as error:
        problem = "rank 0 did not come" if job_store is None else _missing_ranks_text(job_store, arrival_keys)
        raise _rendezvous_error(launch_env, timeout_s, problem or str(error).splitlines()[0]) from error
    except _MissingRanksError as error:
        raise _rendezvous_error(launch_env, timeout_s, str(error)) from error
    return job_store


def _request_job_store(launcher_store: Store, launch_env: LauncherEnvironment, timeout: timedelta) -> Store:
    """The part of the store that the first process names for this start. A launcher that restarts processes may keep
    its store, with all that the killed ones wrote: only one that lives answers a question of now."""
    question = secrets.token_hex(8)
    launcher_store.set(f"ask/{launch_env.rank}", question)
    answer = f"answer/{question}"
    launcher_store.wait([answer], timeout)
    return PrefixStore(launcher_store.get(answer).decode(), launcher_store)


def _serve_job_store(launcher_store: Store, arrival_keys: list[str], timeout_s: float) -> Store:
    """The first process's side: answers until all have come, or until it has been long enough."""
    name, end = f"start/{secrets.token_hex(8)}", time.monotonic() + timeout_s
    store, pending_ranks = PrefixStore(name, launcher_store), set(range(1, len(arrival_keys)))
    while pending_ranks and time.monotonic() < end:
        for rank in sorted(pending_ranks):
            if launcher_store.check([f"ask/{rank}"]):
                launcher_store.set(f"answer/{launcher_store.get(f'ask/{rank}').decode()}", name)
            if store.check([arrival_keys[rank]]):
                pending_ranks.remove(rank)
        time.sleep(POLL_S)
    if pending_ranks:
        raise _MissingRanksError(_missing_ranks_text(store, arrival_keys))
    return store


def _missing_ranks_text(store: Store, arrival_keys: list[str]) -> str:
    """Who has not come; nothing if the store cannot be asked any more."""
    try:
        missing = [str(rank) for rank, key in enumerate(arrival_keys) if rank and not store.check([key])]
    except RuntimeError:
        return ""
    more = f" and {len(missing) - MAX_RANKS_NAMED} more" if len(missing) > MAX_RANKS_NAMED else ""
    return f"rank {', '.join(missing[:MAX_RANKS_NAMED])}{more} did not come" if missing else ""


def _rendezvous_error(launch_env: LauncherEnvironment, timeout_s: float, reason: str) -> TrainError:
    return TrainError(
        f"rank {launch_env.rank} of {launch_env.world_size} did not meet the others within {timeout_s:g} s (parallel.timeout_s): "
        f"{reason}; see that every process was started, and that MASTER_ADDR and MASTER_PORT can be reached from here"
    )
