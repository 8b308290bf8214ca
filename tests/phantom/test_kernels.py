"""The rules of plan/trace/cuda_kernels.py against torch's own CUDA code: the selected kernel, and its workspaces.

The workspace of an operator is the peak of the bytes requested from the allocator while it runs, minus what exists
before or after it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from supertuner.plan.trace.cuda_attention import (
    AttentionKernel,
    AttentionShape,
    attention_backward_workspaces,
    select_attention_kernel,
)
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.cuda_reductions import GH200_CHIP, reduction_workspaces

BACKENDS = {
    AttentionKernel.CUDNN: SDPBackend.CUDNN_ATTENTION,
    AttentionKernel.FLASH: SDPBackend.FLASH_ATTENTION,
    AttentionKernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


class WorkspaceRecorder(TorchDispatchMode):
    """Records the operators that run, with their measured and modelled workspaces."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, int, int]] = []
        """(operator, measured bytes, modelled bytes)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        modelled = sum(CudaDevice().operator_workspaces(func, args, kwargs or {}))
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        result = func(*args, **(kwargs or {}))
        self.found.append((func, requested("peak") - max(before, requested("current")), modelled))
        return result

    def of(self, part: str) -> tuple[Any, int, int]:
        return next(one for one in self.found if part in str(one[0]))


def requested(which: str) -> int:
    """Bytes requested from the allocator, whose blocks are larger."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def attended(
    heads: AttentionShape, dtype: torch.dtype, mask: torch.Tensor | None = None, dropout: float = 0.0
) -> WorkspaceRecorder:
    def rows_by_head(length: int) -> torch.Tensor:
        """As in models: rows with all heads, transposed to heads with all rows."""
        rows = torch.empty(heads.batch, length, heads.heads, heads.head_dim, device="cuda", dtype=dtype)
        return rows.requires_grad_().transpose(1, 2)

    query, key, value = rows_by_head(heads.queries), rows_by_head(heads.keys), rows_by_head(heads.keys)
    with WorkspaceRecorder() as recorder:
        result = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        result.backward(torch.empty_like(result))
    return recorder


@pytest.mark.parametrize("width", (8, 20, 64, 72, 128, 160, 256, 264))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("masked", ("no mask", "mask", "trained mask"))
def test_torch_selects_the_kernel_of_the_rule(width: int, dtype: torch.dtype, masked: str) -> None:
    heads = AttentionShape(2, 4, 256, 96, width, dtype.itemsize)
    mask = None
    if masked != "no mask":
        mask = torch.zeros(2, 1, 256, 96, device="cuda", dtype=dtype, requires_grad=masked == "trained mask")
    modelled = select_attention_kernel(
        heads,
        capability=(9, 0),
        masked=mask is not None,
        mask_requires_grad=bool(mask is not None and mask.requires_grad),
    )
    operators = [str(operator) for operator, _, _ in attended(heads, dtype, mask).found]
    found = next(
        (name for name in AttentionKernel if any(f"_{name}_attention." in one for one in operators)),
        AttentionKernel.MATH,
    )
    assert modelled is found


@pytest.mark.parametrize("which", tuple(BACKENDS))
@pytest.mark.parametrize("width", (64, 72, 96, 128))
@pytest.mark.parametrize("lengths", ((4096, 4096), (8100, 512), (1024, 77), (333, 333)), ids=str)
def test_the_backward_pass_of_attention_has_the_workspace_of_the_rule(
    which: AttentionKernel, width: int, lengths: tuple[int, int]
) -> None:
    heads = AttentionShape(2, 12, *lengths, width, 2)
    with sdpa_kernel(BACKENDS[which]):
        _, measured, modelled = attended(heads, torch.bfloat16).of("attention_backward")
    assert modelled == sum(attention_backward_workspaces(which, heads))
    tolerance = 0.15 if which is AttentionKernel.EFFICIENT and max(lengths) < 1024 else 0.01
    assert measured == pytest.approx(modelled, rel=tolerance)


def test_attention_in_fp32_uses_the_efficient_kernel() -> None:
    heads = AttentionShape(1, 24, 4096, 4096, 128, 4)
    _, measured, modelled = attended(heads, torch.float32).of("efficient_attention_backward")
    assert measured == pytest.approx(modelled, rel=0.02)


def shapes(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Random reductions as in biases, norms and losses."""
    draw = random.Random(6)
    found = []
    for _ in range(count):
        rows, columns = draw.choice((77, 333, 4096, 32760, 27280)), 8 * draw.randint(4, 1800)
        dtype = draw.choice((torch.bfloat16, torch.float32))
        shape, reduced = draw.choice(
            (
                ((rows, columns), (0,)),
                ((rows, columns), (1,)),
                ((1, rows, columns), (0, 1)),
                ((2, rows, columns), (1,)),
                ((2, rows, columns), (0, 1)),
                ((2, 12, rows, 64), (0, 1, 2)),
                ((2, columns, 64, 48), (0, 2, 3)),
                ((rows, columns), (0, 1)),
                ((3, rows * 64), (1,)),
            )
        )
        found.append((shape, reduced, dtype))
    return found


@pytest.mark.parametrize(("shape", "reduced", "dtype"), shapes(60), ids=str)
def test_a_sum_has_the_workspace_of_the_rule(
    shape: tuple[int, ...], reduced: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.empty(shape, device="cuda", dtype=dtype)
    with WorkspaceRecorder() as recorder:
        values.sum(reduced)
    modelled = reduction_workspaces(shape, values.stride(), reduced, dtype.itemsize, GH200_CHIP)
    assert recorder.of("aten.sum")[1] == sum(modelled)


def test_a_sum_over_more_than_two_gigabytes_is_computed_in_pieces() -> None:
    values = torch.empty(200_000, 8192, device="cuda", dtype=torch.bfloat16)
    with WorkspaceRecorder() as recorder:
        values.sum(0)
    _, measured, modelled = recorder.of("aten.sum")
    assert measured == pytest.approx(modelled, rel=0.05)


def test_foreach_norm_has_one_number_per_chunk() -> None:
    gradients = [torch.empty(size, device="cuda") for size in (3, 5120, 5120 * 5120, 13824 * 5120)]
    with WorkspaceRecorder() as recorder:
        torch._foreach_norm(gradients)
    _, measured, modelled = recorder.of("_foreach_norm")
    assert measured == modelled > 0


@pytest.mark.parametrize("shape", ((1, 16, 21, 60, 104), (4, 16, 1, 64, 64)), ids=str)
def test_a_patch_embedding_has_the_workspace_of_the_phantoms_rule(shape: tuple[int, ...]) -> None:
    layer = torch.nn.Conv3d(16, 1536, (1, 2, 2), (1, 2, 2), device="cuda", dtype=torch.bfloat16)
    with WorkspaceRecorder() as recorder:
        result = layer(torch.empty(shape, device="cuda", dtype=torch.bfloat16))
        result.backward(torch.empty_like(result))
    for part in ("aten.convolution.default", "aten.convolution_backward"):
        _, measured, modelled = recorder.of(part)
        assert measured == pytest.approx(modelled, rel=0.01)


def test_each_thread_with_a_matrix_product_keeps_a_cublas_workspace() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    layer(torch.empty(8, 64, device="cuda")).sum().backward()
    layer.zero_grad(set_to_none=True)
    assert torch.cuda.memory_allocated() - before == sum(CudaDevice().library_workspaces())
