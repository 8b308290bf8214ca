"""Copies of tensors in host memory, for what is written while training changes the tensors themselves.

The memory of the last copies is used again for the next: a page that is touched for the first time costs more than its
copy, and who has room for one checkpoint's copy needs that room at every checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch


class HostCopies:
    """Copies lent out until all of them are given back. For one thread."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, torch.Size], list[torch.Tensor]] = defaultdict(list)
        self._in_use: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """What is held, lent out or not."""
        return sum(one.nbytes for kept in (*self._free.values(), self._in_use) for one in kept)

    def copy_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each in memory that nobody else writes to, its rows one after the other. Complete when this returns."""
        return {name: self._copy(tensor.detach()) for name, tensor in tensors.items()}

    def release_all(self) -> None:
        """Nobody reads them any more."""
        for tensor in self._in_use:
            self._free[tensor.dtype, tensor.shape].append(tensor)
        self._in_use.clear()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free[tensor.dtype, tensor.shape]
        copy = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._in_use.append(copy)
        return copy.copy_(tensor)
