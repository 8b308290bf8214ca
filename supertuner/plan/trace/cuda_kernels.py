"""Workspaces of CUDA kernels: the device for traces of a step that runs on a GPU.

Each rule is arithmetic on shapes with its source; none is fitted to a model. tests/phantom/test_kernels.py compares all
of them with torch's CUDA build on the phantom. For cuDNN's convolutions only the phantom's own rule is known: tensors
that are not channels-last are copied once. The real sizes depend on cuDNN's version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from supertuner.core.types import KIB, MIB
from supertuner.plan.trace.cuda_attention import AttentionKernel, AttentionShape, attention_backward_workspaces
from supertuner.plan.trace.cuda_dispatch import dispatch_as_cuda
from supertuner.plan.trace.cuda_reductions import GH200_CHIP, GpuChip, reduction_workspaces
from supertuner.plan.trace.recorder import TracedDevice

aten = torch.ops.aten

ALIGNMENT_BYTES = 512
"""torch's caching allocator rounds every request up to a multiple of it (`kMinBlockSize`, CUDACachingAllocator.cpp)."""
CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""From compute capability 9 on, as seen on the phantom as a GH200 and as a GB10."""
CUBLAS_WORKSPACE_BYTES_BEFORE_HOPPER = (2 * 4096 + 8 * 16) * KIB
"""NVIDIA's and torch's earlier default (`CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8`)."""
CUBLAS_THREADS = 2
"""The forward pass and autograd's backward pass run in different threads, and each thread's cuBLAS handle has its own
workspace."""
FOREACH_CHUNK_ELEMENTS = 65536
"""Elements of a tensor that one thread block of a foreach kernel processes (`kChunkSize`, MultiTensorApply.cuh)."""


@dataclass(frozen=True, slots=True)
class CudaDevice(TracedDevice):
    """A GPU."""

    name: str = "cuda"
    alignment_bytes: int = ALIGNMENT_BYTES
    chip: GpuChip = GH200_CHIP

    def emulate_dispatch(self) -> AbstractContextManager[None]:
        return dispatch_as_cuda(self.chip.capability)

    def library_workspaces(self) -> Sequence[int]:
        """Sizes of the cuBLAS workspaces, which the first matrix product of each thread allocates for good."""
        hopper = self.chip.capability[0] >= 9
        return (CUBLAS_WORKSPACE_BYTES if hopper else CUBLAS_WORKSPACE_BYTES_BEFORE_HOPPER,) * CUBLAS_THREADS

    def operator_workspaces(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Sizes of buffers that an operator allocates and frees while it runs."""
        if (attention_kernel := _ATTENTION_BACKWARD_KERNELS.get(operator)) is not None:
            return attention_backward_workspaces(attention_kernel, AttentionShape.from_tensors(args[1], args[2]))
        if operator in _DIM_REDUCTIONS:
            return self._reduction_workspaces(args[0], args[1] if len(args) > 1 else kwargs.get("dim"))
        if operator in _FULL_REDUCTIONS:
            return self._reduction_workspaces(args[0], None)
        if operator is aten._foreach_norm.Scalar:
            return _foreach_norm_workspaces(args[0])
        if operator is aten.convolution.default:
            return _convolution_workspaces(*args)
        if operator is aten.convolution_backward.default:
            return self._convolution_backward_workspaces(args[0], args[1], args[2], output_mask=args[-1])
        return ()

    def _reduction_workspaces(self, values: torch.Tensor, dimensions: Any) -> Sequence[int]:
        if dimensions is None or (isinstance(dimensions, Sequence) and not dimensions):
            dimensions = range(values.dim())
        elif isinstance(dimensions, int):
            dimensions = (dimensions,)
        size, wide = values.element_size(), 8 if values.dtype in (torch.float64, torch.int64) else 4
        return reduction_workspaces(values.shape, values.stride(), dimensions, size, self.chip, accumulator_bytes=wide)

    def _convolution_backward_workspaces(
        self, gradient: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, output_mask: Sequence[bool]
    ) -> Sequence[int]:
        """The gradients are computed one after the other: the largest workspace counts."""
        copied = (gradient, values, weight) if output_mask[0] or output_mask[1] else ()
        copies = sum(map(_channels_last_copy_bytes, copied))
        others = [dimension for dimension in range(gradient.dim()) if dimension != 1]
        sums = sum(self._reduction_workspaces(gradient, others)) if output_mask[2] else 0
        return (max(copies, sums),) if max(copies, sums) else ()


_ATTENTION_BACKWARD_KERNELS = {
    aten._scaled_dot_product_cudnn_attention_backward.default: AttentionKernel.CUDNN,
    aten._scaled_dot_product_flash_attention_backward.default: AttentionKernel.FLASH,
    aten._scaled_dot_product_efficient_attention_backward.default: AttentionKernel.EFFICIENT,
}
_DIM_REDUCTIONS = frozenset({aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default})
_FULL_REDUCTIONS = frozenset({aten.sum.default, aten.mean.default, aten.linalg_vector_norm.default})


def _foreach_norm_workspaces(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """One fp32 number for every chunk of every tensor; all tensors get as many as the largest (ForeachReduceOp.cu)."""
    if not tensors:
        return ()
    max_chunks = max(-(-tensor.numel() // FOREACH_CHUNK_ELEMENTS) for tensor in tensors)
    return (len(tensors) * max_chunks * 4,)


def _convolution_workspaces(values: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> Sequence[int]:
    stride, padding, dilation, transposed, _, groups = rest
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    result = values.shape[0] * channels * values.element_size()
    sides = zip(values.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    for side, size, step, pad, spread in sides:
        reach = spread * (size - 1) + 1
        result *= (side - 1) * step - 2 * pad + reach if transposed else (side + 2 * pad - reach) // step + 1
    copies = _channels_last_copy_bytes(values) + _channels_last_copy_bytes(weight)
    return (copies + (0 if _is_channels_last(values) else result),)


def _channels_last_copy_bytes(tensor: torch.Tensor) -> int:
    return 0 if _is_channels_last(tensor) else tensor.numel() * tensor.element_size()


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and tensor.stride(1) == 1
