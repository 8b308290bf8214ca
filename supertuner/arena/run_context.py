"""The context that every part of a run reports to and reads from: created once in setup, passed down, never global.

It is in this package because this is the lowest one that knows the other processes of a node, so that `data`, `cache`,
`plan` and `train` can all receive it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.core.events import NullSink, Progress, Sink
from supertuner.core.host import HostFacts


@dataclass(frozen=True, eq=False, slots=True)
class RunContext:
    """Receivers of events and progress, the resources of the host, the processes that share the node, and the run's
    folder.
    """

    run_dir: Path
    sink: Sink
    progress: Progress
    host: HostFacts
    peers: NodePeers = NO_PEERS

    @classmethod
    def silent(cls, run_dir: Path) -> RunContext:
        """A context that reports nothing, for a single process."""
        return cls(run_dir, NullSink(), NullSink(), HostFacts())

    def with_peers(self, peers: NodePeers) -> RunContext:
        """A copy of this context with the other processes of this node."""
        return replace(self, peers=peers)
