"""Homes in host memory for single tensors: each has its place there once, and copies go to and fro.

What is being sent lives on the device until the computation has waited for the copy, so that nobody overwrites it too
early; what was sent may be read by the host after `arrived`.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import torch

from supertuner.train.offload.host_memory import HostMemory, placed
from supertuner.train.offload.param_storage import Leaf
from supertuner.train.offload.transfer import Carrier, Mark, Pair

Key: TypeAlias = tuple[str, str]
"""The parameter's name, and what of it: `weight`, `gradient`, `average`, `state.exp_avg`."""
AT_ONCE = 8
"""Copies home that may be under way together: each holds device memory as long as it lasts."""


class Homes:
    def __init__(self, carrier: Carrier, host: HostMemory) -> None:
        self._carrier, self.host = carrier, host
        self._homes: dict[Key, torch.Tensor] = {}
        self._under_way: deque[tuple[Mark, list[torch.Tensor]]] = deque()
        self._last: Mark = None

    def of(self, key: Key, like: torch.Tensor) -> torch.Tensor:
        """The home of a tensor; it is made where there is none."""
        home = self._homes.get(key)
        if home is None or (home.shape, home.dtype) != (like.shape, like.dtype):
            home = self._homes[key] = placed(self.host.take(like.nbytes), like)
        return home

    def settle(self, name: str, leaf: Leaf) -> torch.Tensor:
        """Put a copy at home in the place of a parameter's tensor, unless it is there; what is there now is freed."""
        there, key = leaf.get(), (name, leaf.what)
        if not self.is_home(key, there):
            home = self.of(key, there)
            home.copy_(there)
            leaf.put(home)
        return leaf.get()

    def is_home(self, key: Key, tensor: torch.Tensor) -> bool:
        return key in self._homes and self._homes[key].data_ptr() == tensor.data_ptr()

    def send(self, pairs: list[Pair]) -> None:
        """Begin to copy (home, tensor on the device)."""
        if not pairs:
            return
        self._last = self._carrier.send(pairs)
        self._under_way.append((self._last, [source for _, source in pairs]))
        while len(self._under_way) > AT_ONCE:
            self._carrier.await_(self._under_way.popleft()[0])

    def fetch(self, homes: list[torch.Tensor]) -> tuple[list[torch.Tensor], Mark]:
        """Begin to copy these to the device: after what was sent before, which may be the same."""
        there = [torch.empty_like(home, device=self._carrier.device) for home in homes]
        after = [] if self._last is None else [self._last]
        return there, self._carrier.fetch(list(zip(there, homes, strict=True)), after=after)

    def arrived(self) -> None:
        """Wait until the host may read all that was sent."""
        for mark, _ in self._under_way:
            self._carrier.await_(mark)
        self._under_way.clear()
        if self._last is not None:
            self._carrier.arrived(self._last)
            self._last = None
