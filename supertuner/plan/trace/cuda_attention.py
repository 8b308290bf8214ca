"""The kernel that torch selects for attention on CUDA, and the workspaces of its backward pass. Pure.

Facts of PyTorch 2.13 (`ATen/native/transformers/cuda/sdp_utils.cpp` and the backward functions next to it; for cuDNN,
the SDPA nodes of its frontend). tests/phantom/test_kernels.py compares each with torch's CUDA build on the phantom.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CUDNN_PREFERRED = frozenset({(9, 0), (10, 0)})
"""Compute capabilities on which torch tries cuDNN first. On others cuDNN comes after a kernel that accepts every
call."""
MAX_HEAD_DIM = 256
"""Limit of cuDNN on these chips, and of flash attention."""


class AttentionKernel(StrEnum):
    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one attention call."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    element_bytes: int

    @classmethod
    def from_tensors(cls, query: torch.Tensor, key: torch.Tensor) -> AttentionShape:
        batch, heads, queries, width = query.shape
        return cls(batch, heads, queries, key.shape[-2], width, query.element_size())

    @property
    def batch_heads(self) -> int:
        return self.batch * self.heads


def select_attention_kernel(
    shape: AttentionShape,
    *,
    capability: tuple[int, int],
    masked: bool = False,
    mask_requires_grad: bool = False,
    dropout: bool = False,
) -> AttentionKernel:
    """The first kernel in torch's order of preference that accepts this call."""
    half = shape.element_bytes == 2
    fits = half and shape.head_dim <= MAX_HEAD_DIM
    if capability in CUDNN_PREFERRED and fits and shape.head_dim % 8 == 0 and not mask_requires_grad and not dropout:
        return AttentionKernel.CUDNN
    if fits and not masked:
        return AttentionKernel.FLASH
    if shape.head_dim * shape.element_bytes % 16 == 0:
        return AttentionKernel.EFFICIENT
    return AttentionKernel.MATH


def attention_backward_workspaces(attention_kernel: AttentionKernel, shape: AttentionShape) -> tuple[int, ...]:
    """Sizes of the backward pass's buffers: the queries' gradient accumulated in fp32, and one number per query.

    None for the math kernel: it consists of ordinary operators.
    """
    dim = shape.head_dim
    if attention_kernel is AttentionKernel.CUDNN:
        return (shape.batch_heads * shape.queries * (dim + 1) * 4,)
    if attention_kernel is AttentionKernel.FLASH:
        width, queries = _round_up(dim, 32 if dim <= 128 else 64), _round_up(shape.queries, 128)
        return shape.batch_heads * queries * width * 4, shape.batch_heads * queries * 4
    if attention_kernel is AttentionKernel.EFFICIENT:
        width = dim if dim <= 64 else _round_up(dim, 128 if dim <= 128 else 64)
        return shape.batch_heads * _round_up(shape.queries, 64) * width * 4, shape.batch_heads * shape.queries * 4
    return ()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
