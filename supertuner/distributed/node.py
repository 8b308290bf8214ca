"""Which processes of a job are on one node, and where they meet: they share one copy of the data and make it together.

Who is a neighbour is found by what the processes say of their machines, not by counting: launchers number differently.
"""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from supertuner.arena.home import Home, default_home
from supertuner.arena.peers import ALONE, Peers, meet
from supertuner.config.settings.tree import RunConfig
from supertuner.core import processes
from supertuner.core.errors import TrainError
from supertuner.data.corpus import Corpus, Part
from supertuner.distributed.process_group import Parallel


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a process of the job runs."""

    machine: str
    local_rank: int


def neighbours(seats: Sequence[Seat], rank: int) -> list[int]:
    """Ranks of those that were started together with `rank` on its machine, itself included, in the order of their
    local numbers. A launcher's processes begin with a local 0; two launchers on one machine are two nodes."""

    def leader(of: int) -> int:
        firsts = [r for r, seat in enumerate(seats) if seat.machine == seats[of].machine and seat.local_rank == 0]
        return max((first for first in firsts if first <= of), default=of)

    return sorted((r for r in range(len(seats)) if leader(r) == leader(rank)), key=lambda r: seats[r].local_rank)


@contextmanager
def open_peers(config: RunConfig, parallel: Parallel) -> Iterator[Peers]:
    """Meet the other processes of this node; all processes of the job come here. Alone on a node there is nobody."""
    if parallel.ranks == 1:
        yield ALONE
        return
    own = {"machine": _machine(), "local_rank": parallel.local_rank, "job": uuid.uuid4().hex}
    said = [json.loads(content) for content in parallel.gather(json.dumps(own).encode())]
    here = neighbours([Seat(one["machine"], one["local_rank"]) for one in said], parallel.rank)
    if len(here) == 1:
        parallel.agree([0])
        yield ALONE
        return
    home = Home(config.arena.home or default_home())
    name = f"{said[0]['job']}-{here[0]}"
    with meet(home, name, here.index(parallel.rank), len(here), lambda: _wait_for_all(parallel)) as peers:
        yield peers


def require_same_data(parallel: Parallel, peers: Peers, corpora: Sequence[Corpus]) -> None:
    """TrainError, naming dataset and machines, unless every node staged the same samples and captions: positions mean
    the same sample everywhere. Called by all processes; one of each node looks."""
    if parallel.ranks == 1:
        return
    parts = [part for corpus in corpora for part in corpus.parts]
    seen = {part.samples.id: [len(part.samples), _digest(part)] for part in parts} if peers.first else None
    said = [json.loads(content) for content in parallel.gather(json.dumps([_machine(), seen]).encode())]
    looked = [(machine.split()[0], data) for machine, data in said if data is not None]
    first, expected = looked[0]
    for machine, data in looked:
        for name, (count, digest) in data.items():
            if [count, digest] != expected[name]:
                others = "as many, but not the same" if count == expected[name][0] else str(count)
                raise TrainError(
                    f"datasets[{name}] has {expected[name][0]} samples on {first} and {others} on {machine}; give "
                    "every node the same files and captions: which sample a process takes is decided by its number"
                )


def _digest(part: Part) -> str:
    """What the samples of a dataset are known by, whatever their files are called and whenever they were written."""
    digest = xxhash.xxh3_128(part.samples.caption_digest().encode())
    digest.update(np.ascontiguousarray(part.samples.contents()).view(np.uint8).data)
    digest.update(np.ascontiguousarray(part.members.samples).view(np.uint8).data)
    return digest.hexdigest()


def _wait_for_all(parallel: Parallel) -> None:
    parallel.agree([0])


def _machine() -> str:
    """This machine since it was started; containers with names of their own are machines of their own."""
    return f"{platform.node() or 'localhost'} {processes.boot()}"
