"""Staging on a node with several processes: the first one stages, the others show its progress and attach to its arena.

Only the first process lists the source, so that all processes use the same listing.
"""

from __future__ import annotations

from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NodePeers
from supertuner.arena.reader import VerifyMode
from supertuner.arena.run_context import RunContext
from supertuner.core.errors import ArenaMissingError
from supertuner.data.staging.staged_dataset import StagedDataset


def announce_arena(peers: NodePeers, dataset: str, arena: str) -> None:
    """Called by the first process: publish the name of the arena that it is going to build or reuse."""
    peers.publish(f"{dataset} goes to", arena.encode())


def announce_staged(peers: NodePeers, dataset: str, arena: str) -> None:
    """Called by the first process: publish that the arena is complete, validated, and locked by it."""
    peers.publish(f"{dataset} is in", arena.encode())


def follow_staging(home: ArenaHome, dataset: str, verify: VerifyMode, context: RunContext) -> StagedDataset:
    """Wait until the first process has staged the dataset, and attach to it. Raises PeerError if that process fails."""
    peers, shown_bytes = context.peers, 0
    with context.progress.phase(f"following the process of this node that stages {dataset}") as phase:

        def advance() -> None:
            nonlocal shown_bytes
            arena = peers.read_published(f"{dataset} goes to")
            nbytes = 0 if arena is None else home.stored_bytes(arena.decode())
            phase.advance(nbytes=max(0, nbytes - shown_bytes))
            shown_bytes = max(shown_bytes, nbytes)

        name = peers.wait_for(f"{dataset} is in", advance).decode()
    try:
        return StagedDataset.open(home, name, verify=verify)
    except ArenaMissingError:
        peers.check_peers()  # raises PeerError if the first process died and its arena with it
        raise
