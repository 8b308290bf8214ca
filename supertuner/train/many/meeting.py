"""Where the processes of a job meet: the launcher's store, and all of them there before anything else begins.

Waiting for somebody who was never started ends after a set time and names who is missing. Afterwards collectives wait
as long as it takes: rank 0 may validate for an hour. Whether somebody is gone is for the watch to say.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from supertuner.config.launched import Launched
from supertuner.core.errors import TrainError

COLLECTIVES_WAIT = timedelta(days=30)
NAMED = 8
"""Of those who are missing, as many are named."""


def meet(place: Launched, *, timeout_s: float) -> Store:
    """The store of the job, once every process has come there."""
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.ranks, timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise _alone(place, timeout_s, str(error).splitlines()[0]) from error
    assert isinstance(store, Store)
    met = [f"met/{rank}" for rank in range(place.ranks)]
    try:
        store.set(met[place.rank], "")
        store.wait(met, timeout)
    except RuntimeError as error:
        raise _alone(place, timeout_s, _missing(store, met) or str(error).splitlines()[0]) from error
    return store


def _missing(store: Store, met: list[str]) -> str:
    """Who has not come; nothing if the store cannot be asked any more."""
    try:
        missing = [str(rank) for rank, key in enumerate(met) if not store.check([key])]
    except RuntimeError:
        return ""
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return f"rank {', '.join(missing[:NAMED])}{more} did not come" if missing else ""


def _alone(place: Launched, timeout_s: float, reason: str) -> TrainError:
    return TrainError(
        f"rank {place.rank} of {place.ranks} did not meet the others within {timeout_s:g} s (parallel.timeout_s): "
        f"{reason}; see that every process was started, and that MASTER_ADDR and MASTER_PORT can be reached from here"
    )
