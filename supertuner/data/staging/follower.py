"""Staging on a node with many processes: the first stages, the others follow how far it is, and attach to the result.

Only the first lists the source: all of them work on what that one found.
"""

from __future__ import annotations

from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NodePeers
from supertuner.arena.reader import VerifyMode
from supertuner.core.errors import ArenaMissingError
from supertuner.core.events import Progress, ProgressPhase
from supertuner.data.staged_dataset import StagedDataset


def announce_arena(peers: NodePeers, dataset: str, arena: str) -> None:
    """The first process says which arena it is going to build or to reuse."""
    peers.publish(f"{dataset} goes to", arena.encode())


def announce_staged(peers: NodePeers, dataset: str, arena: str) -> None:
    """The first process says that the arena is there, held by it, and found good."""
    peers.publish(f"{dataset} is in", arena.encode())


def follow_staging(
    home: ArenaHome, dataset: str, verify: VerifyMode, peers: NodePeers, progress: Progress
) -> StagedDataset:
    """Attach to what the first process stages, as soon as it is there; PeerError if that process fails or is gone."""
    with progress.phase(f"following the process of this node that stages {dataset}") as phase:
        arena_progress = _ArenaProgress(home, dataset, peers, phase)
        name = peers.wait_for(f"{dataset} is in", arena_progress.advance).decode()
    try:
        return StagedDataset.open(home, name, verify=verify)
    except ArenaMissingError:
        peers.check_peers()  # it may have gone together with the first process
        raise


class _ArenaProgress:
    """How many bytes of the arena are there, for people who watch."""

    def __init__(self, home: ArenaHome, dataset: str, peers: NodePeers, phase: ProgressPhase) -> None:
        self._home, self._dataset, self._peers, self._phase = home, dataset, peers, phase
        self._shown_bytes = 0

    def advance(self) -> None:
        name = self._peers.read_published(f"{self._dataset} goes to")
        nbytes = 0 if name is None else self._home.stored_bytes(name.decode())
        self._phase.advance(nbytes=max(0, nbytes - self._shown_bytes))
        self._shown_bytes = max(self._shown_bytes, nbytes)
