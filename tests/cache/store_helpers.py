"""Helpers for tests of the cache: stores, and an encoder that counts the entries it makes."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch

from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NO_PEERS, NodePeers
from supertuner.arena.run_context import RunContext
from supertuner.cache.entries import EntryRequest
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.location import CacheLocation
from supertuner.cache.store import CacheStore
from supertuner.core.events import NullSink, Progress, Sink
from supertuner.core.host import HostFacts

NAMESPACE = CacheNamespace("latents", "encoder-1", "bfloat16")


def context(
    run_dir: Path,
    sink: Sink | None = None,
    progress: Progress | None = None,
    host: HostFacts | None = None,
    peers: NodePeers = NO_PEERS,
) -> RunContext:
    return RunContext(run_dir, sink or NullSink(), progress or NullSink(), host or HostFacts(), peers)


def store(
    path: Path, namespace: CacheNamespace = NAMESPACE, run_context: RunContext | None = None, **location
) -> CacheStore:
    """The store in the folder `path`; `location` overrides fields of its CacheLocation."""
    defaults = {
        "home": ArenaHome(path),
        "life": "until_removed",
        "in_memory": False,
        "verify": "on_demand",
        "damage_remedy": "start again",
        "room_remedy": "set cache_config.cache_dir",
    }
    return CacheStore(CacheLocation(**{**defaults, **location}), namespace, run_context or context(path))


class CountingEncoder:
    """Makes entries that depend on the content alone, and records every entry that it makes."""

    def __init__(
        self, contents: list[bytes], namespace: CacheNamespace = NAMESPACE, shape: tuple[int, ...] = (4, 5, 6)
    ) -> None:
        self.contents, self.shape = contents, shape
        self.keys = namespace.entry_keys(contents)
        self.made: list[bytes] = []

    def request(self) -> EntryRequest:
        return EntryRequest(self.keys, self.make)

    def make(self, indices) -> Generator[tuple[int, dict[str, torch.Tensor]], None, None]:
        for index in indices.tolist():
            self.made.append(self.contents[index])
            yield index, self.entry(index)

    def entry(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng(list(self.contents[index]))
        latents = torch.from_numpy(rng.normal(size=self.shape)).to(torch.bfloat16)
        return {"latents": latents, "mask": torch.tensor(list(self.contents[index])[:2], dtype=torch.int64)}


def contents(count: int, prefix: str = "sample") -> list[bytes]:
    return [f"{prefix} {number}".encode() for number in range(count)]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
