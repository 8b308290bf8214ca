"""Gradients are summed in buckets: each tensor becomes its own sum, whatever shares its bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from supertuner.distributed import gradient_sum as sums
from supertuner.distributed.gradient_sum import all_reduce_tensors, split_into_buckets
from supertuner.distributed.torch_process_group import TorchProcessGroup
from tests.distributed.ranks import run_ranks

SHAPES = [(3,), (), (2, 5), (40, 3), (0,), (7,), (100,), (1,)]


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from([torch.float32, torch.float64]))))
def test_buckets_contain_every_tensor_once_in_order_and_are_not_too_large(kinds: list[tuple[int, Any]]) -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in kinds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "BUCKET_BYTES", 128)
        patch.setattr(sums, "LARGE_BYTES", 100)
        found = list(split_into_buckets(tensors))
    assert sorted(id(tensor) for bucket in found for tensor in bucket) == sorted(map(id, tensors))
    for bucket in found:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket) <= 128
        assert len(bucket) == 1 or all(tensor.nbytes < 100 for tensor in bucket)
    for dtype in (torch.float32, torch.float64):
        small = [id(tensor) for tensor in tensors if tensor.dtype == dtype and tensor.nbytes < 100]
        assert [id(tensor) for bucket in found for tensor in bucket if id(tensor) in small] == small


def test_every_tensor_becomes_its_own_sum() -> None:
    for found in run_ranks(3, _summed):
        assert found == [
            (shape, dtype, True) for dtype in ("torch.float32", "torch.float64") for shape in map(list, SHAPES)
        ]


@pytest.mark.parametrize("way", ["_all_reduce_on_cpu", "_all_reduce_on_device"])
def test_a_parameter_used_on_any_rank_has_its_gradient_on_all_and_an_unused_one_has_none(way: str) -> None:
    """Both ways to agree on gradients: together with them, and, as on a GPU, before them."""
    found = run_ranks(2, _partly_used, way)
    assert found[0] == found[1] == {"loss": 3.0, "both": 3.0, "first": 1.0, "second": 2.0, "unused": None}


def _partly_used(group: TorchProcessGroup, way: str) -> dict[str, float | None]:
    both, first, second, unused = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    for parameter in (both, second if group.rank else first):
        parameter.grad = torch.full((1,), group.rank + 1.0)
    loss = torch.full((1,), group.rank + 1.0)
    getattr(sums, way)([both, first, second, unused], loss)
    named = {"both": both, "first": first, "second": second, "unused": unused}
    return {"loss": float(loss), **{name: None if p.grad is None else float(p.grad) for name, p in named.items()}}


def _summed(group: TorchProcessGroup) -> list[tuple[list[int], str, bool]]:
    """Buckets of 64 bytes: more than may be in flight; a large tensor is a view that is not contiguous."""
    sums.BUCKET_BYTES, sums.LARGE_BYTES = 64, 200
    tensors = [
        torch.full(shape, float(number + 1), dtype=dtype) * 10**group.rank
        for number, (dtype, shape) in enumerate((d, s) for d in (torch.float32, torch.float64) for s in SHAPES)
    ]
    tensors[3] = torch.stack([tensors[3], tensors[3]], -1)[..., 0]
    assert not tensors[3].is_contiguous()
    all_reduce_tensors(tensors)
    return [(list(t.shape), str(t.dtype), bool((t == (n + 1) * 111).all())) for n, t in enumerate(tensors)]
