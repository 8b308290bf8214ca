"""What CUDA's kernels take of memory beside their results: the device that a trace of a GPU's step runs on.

Each rule is arithmetic on shapes with its source beside it, none is fitted to a model; the phantom, torch's real CUDA
build, is compared with all of them (tests/phantom/test_kernels.py). Of cuDNN's convolutions only the phantom's own rule
is known: what lies in another order than cuDNN's kernels want is copied once. Real sizes depend on its version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from supertuner.core.types import KIB, MIB
from supertuner.plan.trace.attention import Heads, Kernel, backward_bytes
from supertuner.plan.trace.cuda_dispatch import as_on_cuda
from supertuner.plan.trace.reductions import GH200, Chip, reduction_bytes

aten = torch.ops.aten

GRANULE = 512
"""torch's caching allocator rounds every request up to a multiple of it (`kMinBlockSize`, CUDACachingAllocator.cpp)."""
CUBLAS_WORKSPACE = 32 * MIB
"""On chips from compute capability 9 on: seen on the phantom as a GH200 and as a GB10."""
CUBLAS_OLDER = (2 * 4096 + 8 * 16) * KIB
"""NVIDIA's and torch's default before (`CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8`)."""
CUBLAS_THREADS = 2
"""The forward pass and the backward pass have a thread each, and each thread a handle with a workspace of its own."""
FOREACH_CHUNK = 65536
"""Elements of one tensor that one block of a foreach kernel takes (`kChunkSize`, MultiTensorApply.cuh)."""


@dataclass(frozen=True, slots=True)
class Cuda:
    """A GPU as a trace sees it. Implements the recorder's `Device`."""

    chip: Chip = GH200
    name: str = "cuda"
    granule: int = GRANULE

    def behaving(self) -> AbstractContextManager[None]:
        return as_on_cuda(self.chip.capability)

    def standing(self) -> Sequence[int]:
        """Bytes that are taken by the first matrix product of each thread, and never given back."""
        return (CUBLAS_WORKSPACE if self.chip.capability[0] >= 9 else CUBLAS_OLDER,) * CUBLAS_THREADS

    def workspace(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Bytes of what an operator takes when it begins and gives back when it ends."""
        if (which := _ATTENTION_BACKWARD.get(operator)) is not None:
            return backward_bytes(which, _heads(args[1], args[2]))
        if operator in _REDUCTIONS:
            return self._reduction(args[0], args[1] if len(args) > 1 else kwargs.get("dim"))
        if operator in _WHOLE:
            return self._reduction(args[0], None)
        if operator is aten._foreach_norm.Scalar:
            return _foreach_norm(args[0])
        if operator is aten.convolution.default:
            return _convolution(*args)
        if operator is aten.convolution_backward.default:
            return self._convolution_backward(*args)
        return ()

    def _reduction(self, values: torch.Tensor, dimensions: Any) -> Sequence[int]:
        if dimensions is None or (isinstance(dimensions, Sequence) and not dimensions):
            dimensions = range(values.dim())
        elif isinstance(dimensions, int):
            dimensions = (dimensions,)
        sums = 8 if values.dtype in (torch.float64, torch.int64) else 4
        return reduction_bytes(
            values.shape, values.stride(), dimensions, values.element_size(), self.chip, sum_bytes=sums
        )

    def _convolution_backward(
        self,
        gradient: torch.Tensor,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Any,
        *rest: Any,
    ) -> Sequence[int]:
        """Its parts run one after the other; the largest is what it takes."""
        wanted = rest[-1]
        copies = sum(map(_copied, (gradient, values, weight))) if wanted[0] or wanted[1] else 0
        others = [dimension for dimension in range(gradient.dim()) if dimension != 1]
        sums = sum(self._reduction(gradient, others)) if wanted[2] else 0
        return (max(copies, sums),) if max(copies, sums) else ()


_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_cudnn_attention_backward.default: Kernel.CUDNN,
    aten._scaled_dot_product_flash_attention_backward.default: Kernel.FLASH,
    aten._scaled_dot_product_efficient_attention_backward.default: Kernel.EFFICIENT,
}
_REDUCTIONS = frozenset(
    {
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
    }
)
_WHOLE = frozenset({aten.sum.default, aten.mean.default, aten.linalg_vector_norm.default})


def _heads(query: torch.Tensor, key: torch.Tensor) -> Heads:
    batch, heads, queries, width = query.shape
    return Heads(batch, heads, queries, key.shape[-2], width, query.element_size())


def _foreach_norm(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """A number for every chunk of every tensor, as many for each as for the largest (ForeachReduceOp.cu)."""
    if not tensors:
        return ()
    most = max(-(-tensor.numel() // FOREACH_CHUNK) for tensor in tensors)
    return (len(tensors) * most * 4,)


def _convolution(values: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> Sequence[int]:
    stride, padding, dilation, transposed, _, groups = rest
    sides = []
    for side, size, step, pad, spread in zip(
        values.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
    ):
        reach = spread * (size - 1) + 1
        sides.append((side - 1) * step - 2 * pad + reach if transposed else (side + 2 * pad - reach) // step + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    result = values.shape[0] * channels * values.element_size()
    for side in sides:
        result *= side
    return (_copied(values) + _copied(weight) + (0 if _channels_last(values) else result),)


def _copied(tensor: torch.Tensor) -> int:
    return 0 if _channels_last(tensor) else tensor.numel() * tensor.element_size()


def _channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.stride(1) == 1
