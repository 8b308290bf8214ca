"""Finds the ranks that share this node and opens the folder through which they share one copy of the data.

Ranks compare the machine that each of them reports, instead of computing nodes from rank numbers: launchers number
ranks differently.
"""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from supertuner.arena.home import ArenaHome, default_home
from supertuner.arena.node_peers import NO_PEERS, NodePeers, join_node_peers
from supertuner.config.settings.run_config import RunConfig
from supertuner.core import processes
from supertuner.distributed.process_group import ProcessGroup, barrier


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs."""

    machine: str
    local_rank: int


def ranks_on_same_node(locations: Sequence[RankLocation], rank: int) -> list[int]:
    """The ranks that one launcher started on `rank`'s machine, `rank` included, in the order of their local ranks.

    A launcher's ranks begin with local rank 0; two launchers on one machine count as two nodes.
    """

    def leader_of(rank: int) -> int:
        """The rank with local rank 0 of the same launcher: the last one on this machine up to `rank`."""
        machine = locations[rank].machine
        leaders = [r for r, place in enumerate(locations) if place.machine == machine and place.local_rank == 0]
        return max((leader for leader in leaders if leader <= rank), default=rank)

    same_node = (r for r in range(len(locations)) if leader_of(r) == leader_of(rank))
    return sorted(same_node, key=lambda r: locations[r].local_rank)


@contextmanager
def open_node_peers(config: RunConfig, process_group: ProcessGroup) -> Iterator[NodePeers]:
    """Join the other ranks of this node; NO_PEERS if there are none. Collective over all ranks of the job."""
    if process_group.world_size == 1:
        yield NO_PEERS
        return
    introduction = {"machine": machine_id(), "local_rank": process_group.local_rank, "job": uuid.uuid4().hex}
    introductions = [json.loads(content) for content in process_group.all_gather(json.dumps(introduction).encode())]
    locations = [RankLocation(facts["machine"], facts["local_rank"]) for facts in introductions]
    node_ranks = ranks_on_same_node(locations, process_group.rank)
    if len(node_ranks) == 1:
        barrier(process_group)
        yield NO_PEERS
        return
    home = ArenaHome(config.arena.home or default_home())
    name, number = f"{introductions[0]['job']}-{node_ranks[0]}", node_ranks.index(process_group.rank)
    with join_node_peers(home, name, number, len(node_ranks), partial(barrier, process_group)) as peers:
        yield peers


def machine_id() -> str:
    """Host name and boot id. Containers with different host names count as different machines."""
    return f"{platform.node() or 'localhost'} {processes.boot_id()}"
