"""The model of the caching allocator has the same counters as torch's own allocator after every request."""

from __future__ import annotations

import random

import pytest
import torch

from supertuner.plan.trace.caching_allocator import AllocatorBlock, CachingAllocator


@pytest.mark.parametrize("seed", range(8))
def test_allocated_and_reserved_bytes_are_equal_after_every_request(seed: int) -> None:
    draw = random.Random(seed)
    model = CachingAllocator()
    live: list[tuple[torch.Tensor, AllocatorBlock]] = []
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    for _ in range(600):
        if live and draw.random() < 0.48:
            tensor, block = live.pop(draw.randrange(len(live)))
            del tensor
            model.free(block)
        else:
            nbytes = int(2 ** draw.uniform(0, draw.choice((12, 22, 28))))
            live.append((torch.empty(nbytes, dtype=torch.uint8, device="cuda"), model.allocate(nbytes)))
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (
            model.allocated_bytes,
            model.reserved_bytes,
        )


def test_a_full_gpu_releases_the_same_segments() -> None:
    """torch's limit is a fraction of the GPU's memory, the model's is in bytes."""
    limit = 4 << 30
    model = CachingAllocator(limit_bytes=limit)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        for nbytes in (300 << 20, 700 << 20, 900 << 20, 1 << 30):
            tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(3)]
            blocks = [model.allocate(nbytes) for _ in range(3)]
            assert torch.cuda.memory_reserved() == model.reserved_bytes
            del tensors
            for block in blocks:
                model.free(block)
        assert torch.cuda.memory_stats()["num_alloc_retries"] == model.retries > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
