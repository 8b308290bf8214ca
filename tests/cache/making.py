"""What tests of the cache share: places, spaces, and an encoder that counts what it was asked for."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch

from supertuner.arena.home import ArenaHome
from supertuner.cache.capacity import CacheLocation
from supertuner.cache.fill import EntryRequest
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.store import CacheStore
from supertuner.core.events import NullSink

SPACE = CacheNamespace("latents", "encoder-1", "bfloat16")


def place(path: Path, **changed) -> CacheLocation:
    given = {
        "home": ArenaHome(path),
        "life": "until_removed",
        "in_memory": False,
        "verify": "on_demand",
        "remedy": "start again",
        "more_room": "set cache_config.cache_dir",
    }
    return CacheLocation(**{**given, **changed})


def store(path: Path, space: CacheNamespace = SPACE, sink=None, **changed) -> CacheStore:
    return CacheStore(place(path, **changed), space, sink or NullSink())


class CountingEncoder:
    """Entries that follow from the content alone; remembers how often it made each."""

    def __init__(
        self, contents: list[bytes], space: CacheNamespace = SPACE, shape: tuple[int, ...] = (4, 5, 6)
    ) -> None:
        self.contents, self.shape = contents, shape
        self.keys = space.entry_keys(contents)
        self.made: list[bytes] = []

    def request(self) -> EntryRequest:
        return EntryRequest(self.keys, self.make)

    def make(self, places) -> Generator[tuple[int, dict[str, torch.Tensor]], None, None]:
        for number in places.tolist():
            self.made.append(self.contents[number])
            yield number, self.entry(number)

    def entry(self, number: int) -> dict[str, torch.Tensor]:
        chance = np.random.default_rng(list(self.contents[number]))
        latents = torch.from_numpy(chance.normal(size=self.shape)).to(torch.bfloat16)
        return {"latents": latents, "mask": torch.tensor(list(self.contents[number])[:2], dtype=torch.int64)}


def contents(count: int, prefix: str = "sample") -> list[bytes]:
    return [f"{prefix} {number}".encode() for number in range(count)]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
