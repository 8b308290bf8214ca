"""`memory.overflow()` in a plain torch program on the phantom: memory beyond the limit is managed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from supertuner import memory
from supertuner.memory.driver import MemoryKind
from tests.phantom.test_overflow_on_torch import account, gigabytes, kind_of


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()
    assert account().device_bytes == account().managed_bytes == 0


def test_what_exceeds_the_limit_is_managed_memory_and_stays_valid_after_the_block() -> None:
    with memory.overflow(limit_gib=2, host_floor_gib=1) as pools:
        below, beyond = gigabytes(1), gigabytes(2)
        assert (kind_of(below), kind_of(beyond)) == (MemoryKind.DEVICE, MemoryKind.MANAGED)
        assert pools.stats().managed_bytes >= 2 << 30
    after = gigabytes(1)
    assert kind_of(after) is None, "outside of the block torch allocates as usual"
    assert kind_of(beyond) is MemoryKind.MANAGED
    beyond.add_(1)


def test_backward_in_autograds_thread_overflows_too() -> None:
    with memory.overflow(limit_gib=1, host_floor_gib=1) as pools:
        weight = torch.ones(1 << 28, device="cuda", requires_grad=True)  # 1 GiB
        (weight * 2).sum().backward()
        assert weight.grad is not None and kind_of(weight.grad) is MemoryKind.MANAGED
        del weight
        gc.collect()
        assert pools.reclaim_between_steps().light_bytes >= 1 << 30, "what the gradient took is discarded"


def test_an_error_inside_the_block_ends_the_overflow() -> None:
    with pytest.raises(ZeroDivisionError), memory.overflow(limit_gib=1, host_floor_gib=1):
        gigabytes(2)
        raise ZeroDivisionError
    assert kind_of(gigabytes(1)) is None
