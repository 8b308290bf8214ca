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

from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.node_peers import NO_PEERS, NodePeers, join_node_peers
from supertuner.config.settings.run_config import RunConfig
from supertuner.core import processes
from supertuner.core.errors import TrainError
from supertuner.data.corpus import Corpus, CorpusDataset
from supertuner.distributed.process_group import ProcessGroup


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a process of the job runs."""

    machine: str
    local_rank: int


def ranks_on_same_node(locations: Sequence[RankLocation], rank: int) -> list[int]:
    """Ranks of those that were started together with `rank` on its machine, itself included, in the order of their
    local numbers. A launcher's processes begin with a local 0; two launchers on one machine are two nodes."""

    def leader_of(of: int) -> int:
        firsts = [
            r for r, seat in enumerate(locations) if seat.machine == locations[of].machine and seat.local_rank == 0
        ]
        return max((first for first in firsts if first <= of), default=of)

    return sorted(
        (r for r in range(len(locations)) if leader_of(r) == leader_of(rank)), key=lambda r: locations[r].local_rank
    )


@contextmanager
def open_node_peers(config: RunConfig, process_group: ProcessGroup) -> Iterator[NodePeers]:
    """Meet the other processes of this node; all processes of the job come here. Alone on a node there is nobody."""
    if process_group.world_size == 1:
        yield NO_PEERS
        return
    introduction = {"machine": _machine_id(), "local_rank": process_group.local_rank, "job": uuid.uuid4().hex}
    introductions = [json.loads(content) for content in process_group.all_gather(json.dumps(introduction).encode())]
    node_ranks = ranks_on_same_node(
        [RankLocation(one["machine"], one["local_rank"]) for one in introductions], process_group.rank
    )
    if len(node_ranks) == 1:
        process_group.all_reduce_max([0])
        yield NO_PEERS
        return
    home = ArenaHome(config.arena.home or default_home())
    name = f"{introductions[0]['job']}-{node_ranks[0]}"
    with join_node_peers(
        home, name, node_ranks.index(process_group.rank), len(node_ranks), lambda: _barrier(process_group)
    ) as peers:
        yield peers


def require_same_data(process_group: ProcessGroup, peers: NodePeers, corpora: Sequence[Corpus]) -> None:
    """TrainError, naming dataset and machines, unless every node staged the same samples and captions: positions mean
    the same sample everywhere. Called by all processes; one of each node looks."""
    if process_group.world_size == 1:
        return
    parts = [part for corpus in corpora for part in corpus.datasets]
    own_digests = (
        {part.samples.id: [len(part.samples), _dataset_digest(part)] for part in parts} if peers.is_first else None
    )
    messages = [
        json.loads(content) for content in process_group.all_gather(json.dumps([_machine_id(), own_digests]).encode())
    ]
    digests_by_machine = [(machine.split()[0], data) for machine, data in messages if data is not None]
    first_machine, expected = digests_by_machine[0]
    for machine, data in digests_by_machine:
        for name, (count, digest) in data.items():
            if [count, digest] != expected[name]:
                difference = "as many, but not the same" if count == expected[name][0] else str(count)
                raise TrainError(
                    f"datasets[{name}] has {expected[name][0]} samples on {first_machine} and {difference} on {machine}; give "
                    "every node the same files and captions: which sample a process takes is decided by its number"
                )


def _dataset_digest(part: CorpusDataset) -> str:
    """What the samples of a dataset are known by, whatever their files are called and whenever they were written."""
    digest = xxhash.xxh3_128(part.samples.caption_digest().encode())
    digest.update(np.ascontiguousarray(part.samples.content_digests()).view(np.uint8).data)
    digest.update(np.ascontiguousarray(part.members.samples).view(np.uint8).data)
    return digest.hexdigest()


def _barrier(process_group: ProcessGroup) -> None:
    process_group.all_reduce_max([0])


def _machine_id() -> str:
    """This machine since it was started; containers with names of their own are machines of their own."""
    return f"{platform.node() or 'localhost'} {processes.boot_id()}"
