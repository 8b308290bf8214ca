"""Opens the launcher's store and waits until every rank has joined, before anything else begins.

Waiting for a rank that was never started ends after a set time and names the missing ranks. Afterwards collectives have
no timeout in practice: rank 0 may validate for an hour. The watchdog finds ranks that are gone.
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
"""Added to the timeout of the whole call, so that the inner one, which names the missing ranks, ends first."""
MAX_RANKS_NAMED = 8
"""How many missing ranks a message names."""


class _MissingRanksError(Exception):
    """Ranks that did not join in time; the message names them."""


def open_rendezvous_store(launch_env: LauncherEnvironment, *, timeout_s: float) -> Store:
    """The store of this start of the job, once every rank has joined. Keys of an earlier start are not in it."""
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
        if launch_env.is_main_process:
            job_store = _serve_job_store(launcher_store, arrival_keys, timeout_s)
        else:
            job_store = _request_job_store(launcher_store, launch_env, timeout)
        job_store.set(arrival_keys[launch_env.rank], "")
        job_store.wait(arrival_keys, timeout)
    except RuntimeError as error:
        problem = "rank 0 did not join" if job_store is None else _missing_ranks_text(job_store, arrival_keys)
        raise _rendezvous_error(launch_env, timeout_s, problem or str(error).splitlines()[0]) from error
    except _MissingRanksError as error:
        raise _rendezvous_error(launch_env, timeout_s, str(error)) from error
    return job_store


def _request_job_store(launcher_store: Store, launch_env: LauncherEnvironment, timeout: timedelta) -> Store:
    """The key prefix that rank 0 chose for this start.

    A launcher that restarts its processes may keep its store, with everything the killed ones wrote. So this rank
    writes a random question, which only the rank 0 of this start can answer.
    """
    question = secrets.token_hex(8)
    launcher_store.set(f"ask/{launch_env.rank}", question)
    answer = f"answer/{question}"
    launcher_store.wait([answer], timeout)
    return PrefixStore(launcher_store.get(answer).decode(), launcher_store)


def _serve_job_store(launcher_store: Store, arrival_keys: list[str], timeout_s: float) -> Store:
    """Rank 0's side: answer the questions until all ranks have joined; _MissingRanksError after `timeout_s`."""
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
    """Names the ranks that have not joined; empty if the store is gone."""
    try:
        missing = [str(rank) for rank, key in enumerate(arrival_keys) if rank and not store.check([key])]
    except RuntimeError:
        return ""
    more = f" and {len(missing) - MAX_RANKS_NAMED} more" if len(missing) > MAX_RANKS_NAMED else ""
    return f"rank {', '.join(missing[:MAX_RANKS_NAMED])}{more} did not join" if missing else ""


def _rendezvous_error(launch_env: LauncherEnvironment, timeout_s: float, reason: str) -> TrainError:
    return TrainError(
        f"rank {launch_env.rank} of {launch_env.world_size} did not meet the other ranks within {timeout_s:g} s "
        f"(parallel.timeout_s): {reason}; check that every process was started, and that MASTER_ADDR and MASTER_PORT "
        "can be reached from here"
    )
