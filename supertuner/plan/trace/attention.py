"""Which kernel CUDA computes attention with, and what its backward pass takes beside its results. Pure.

Facts of PyTorch 2.13 (`ATen/native/transformers/cuda/sdp_utils.cpp` and the backward functions beside it; of cuDNN, the
SDPA nodes of its frontend), each compared with what torch's own CUDA build does on the phantom:
tests/phantom/test_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CUDNN_PREFERRED = frozenset({(9, 0), (10, 0)})
"""Compute capabilities on which torch asks cuDNN first. On others it comes last, behind a kernel that takes all."""
LARGEST_HEAD = 256
"""Of cuDNN on these chips, and of flash attention."""


class Kernel(StrEnum):
    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values of one call."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    """Of a head."""
    element_bytes: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads


def kernel(
    heads: Heads, *, capability: tuple[int, int], masked: bool = False, mask_learns: bool = False, dropout: bool = False
) -> Kernel:
    """The first in torch's order that takes this call."""
    half = heads.element_bytes == 2
    fits = half and heads.width <= LARGEST_HEAD
    if capability in CUDNN_PREFERRED and fits and heads.width % 8 == 0 and not mask_learns and not dropout:
        return Kernel.CUDNN
    if fits and not masked:
        return Kernel.FLASH
    if heads.width * heads.element_bytes % 16 == 0:
        return Kernel.EFFICIENT
    return Kernel.MATH


def backward_bytes(which: Kernel, heads: Heads) -> tuple[int, ...]:
    """What the backward pass takes and gives back: sums of the gradient of queries in fp32, and one number per query.

    Of the math kernel nothing: its parts are operators by themselves.
    """
    if which is Kernel.CUDNN:
        return (heads.rows * heads.queries * (heads.width + 1) * 4,)
    if which is Kernel.FLASH:
        width = _up(heads.width, 32 if heads.width <= 128 else 64)
        queries = _up(heads.queries, 128)
        return heads.rows * queries * width * 4, heads.rows * queries * 4
    if which is Kernel.EFFICIENT:
        width = heads.width if heads.width <= 64 else _up(heads.width, 128 if heads.width <= 128 else 64)
        return heads.rows * _up(heads.queries, 64) * width * 4, heads.rows * heads.queries * 4
    return ()


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
