"""The rules of plan/trace/cuda_kernels.py against torch's own CUDA code: which kernel is chosen, and what it takes meanwhile.

What an operator takes is the peak of what is asked of the allocator while it runs, less what is there before or after.
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


class Taken(TorchDispatchMode):
    """Which operators ran, and what each took while it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, int, int]] = []
        """Operator, what it took, what our rules say that it takes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        said = sum(CudaDevice().operator_workspaces(func, args, kwargs or {}))
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        result = func(*args, **(kwargs or {}))
        self.found.append((func, requested("peak") - max(before, requested("current")), said))
        return result

    def of(self, part: str) -> tuple[Any, int, int]:
        return next(one for one in self.found if part in str(one[0]))


def requested(which: str) -> int:
    """Bytes that were asked for: the allocator's blocks are larger."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


def attended(
    heads: AttentionShape, dtype: torch.dtype, mask: torch.Tensor | None = None, dropout: float = 0.0
) -> Taken:
    def made(length: int) -> torch.Tensor:
        """As models have it: rows of all heads, seen head by head."""
        rows = torch.empty(heads.batch, length, heads.heads, heads.head_dim, device="cuda", dtype=dtype)
        return rows.requires_grad_().transpose(1, 2)

    query, key, value = made(heads.queries), made(heads.keys), made(heads.keys)
    with Taken() as taken:
        result = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        result.backward(torch.empty_like(result))
    return taken


@pytest.mark.parametrize("width", (8, 20, 64, 72, 128, 160, 256, 264))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("masked", ("no mask", "mask", "mask that learns"))
def test_torch_chooses_the_kernel_that_the_rule_names(width: int, dtype: torch.dtype, masked: str) -> None:
    heads = AttentionShape(2, 4, 256, 96, width, dtype.itemsize)
    mask = None
    if masked != "no mask":
        mask = torch.zeros(2, 1, 256, 96, device="cuda", dtype=dtype, requires_grad=masked == "mask that learns")
    said = select_attention_kernel(
        heads,
        capability=(9, 0),
        masked=mask is not None,
        mask_requires_grad=bool(mask is not None and mask.requires_grad),
    )
    ran = [str(operator) for operator, _, _ in attended(heads, dtype, mask).found]
    found = next(
        (name for name in AttentionKernel if any(f"_{name}_attention." in one for one in ran)), AttentionKernel.MATH
    )
    assert said is found


@pytest.mark.parametrize("which", tuple(BACKENDS))
@pytest.mark.parametrize("width", (64, 72, 96, 128))
@pytest.mark.parametrize("lengths", ((4096, 4096), (8100, 512), (1024, 77), (333, 333)), ids=str)
def test_the_backward_pass_of_attention_takes_what_the_rule_says(
    which: AttentionKernel, width: int, lengths: tuple[int, int]
) -> None:
    heads = AttentionShape(2, 12, *lengths, width, 2)
    with sdpa_kernel(BACKENDS[which]):
        _, took, said = attended(heads, torch.bfloat16).of("attention_backward")
    assert said == sum(attention_backward_workspaces(which, heads))
    assert took == pytest.approx(said, rel=0.15 if which is AttentionKernel.EFFICIENT and max(lengths) < 1024 else 0.01)


def test_attention_in_fp32_is_the_efficient_one() -> None:
    heads = AttentionShape(1, 24, 4096, 4096, 128, 4)
    _, took, said = attended(heads, torch.float32).of("efficient_attention_backward")
    assert took == pytest.approx(said, rel=0.02)


def shapes(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Reductions of chance, as biases, norms and losses have them."""
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
def test_a_sum_takes_what_the_rule_says(shape: tuple[int, ...], reduced: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.empty(shape, device="cuda", dtype=dtype)
    with Taken() as taken:
        values.sum(reduced)
    said = reduction_workspaces(shape, values.stride(), reduced, dtype.itemsize, GH200_CHIP)
    assert taken.of("aten.sum")[1] == sum(said)


def test_a_sum_of_more_than_two_gigabytes_is_made_in_pieces() -> None:
    values = torch.empty(200_000, 8192, device="cuda", dtype=torch.bfloat16)
    with Taken() as taken:
        values.sum(0)
    _, took, said = taken.of("aten.sum")
    assert took == pytest.approx(said, rel=0.05)


def test_norms_of_many_tensors_take_a_number_for_every_piece() -> None:
    gradients = [torch.empty(size, device="cuda") for size in (3, 5120, 5120 * 5120, 13824 * 5120)]
    with Taken() as taken:
        torch._foreach_norm(gradients)
    _, took, said = taken.of("_foreach_norm")
    assert took == said > 0


@pytest.mark.parametrize("shape", ((1, 16, 21, 60, 104), (4, 16, 1, 64, 64)), ids=str)
def test_a_patch_embedding_takes_what_the_phantoms_rule_says(shape: tuple[int, ...]) -> None:
    layer = torch.nn.Conv3d(16, 1536, (1, 2, 2), (1, 2, 2), device="cuda", dtype=torch.bfloat16)
    with Taken() as taken:
        result = layer(torch.empty(shape, device="cuda", dtype=torch.bfloat16))
        result.backward(torch.empty_like(result))
    for part in ("aten.convolution.default", "aten.convolution_backward"):
        _, took, said = taken.of(part)
        assert took == pytest.approx(said, rel=0.01)


def test_each_thread_that_multiplies_keeps_a_workspace() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    layer(torch.empty(8, 64, device="cuda")).sum().backward()
    layer.zero_grad(set_to_none=True)
    assert torch.cuda.memory_allocated() - before == sum(CudaDevice().library_workspaces())
