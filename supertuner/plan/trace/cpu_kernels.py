"""Workspaces of CPU kernels: the device for traces of a step that runs on the CPU.

Only memory from torch's own allocator is counted, as torch.profiler shows it
(tests/plan/forecast/test_cpu_forecast.py). Facts of PyTorch 2.13: `ATen/native/cpu/FlashAttentionKernel.cpp`; oneDNN
accumulates 16-bit matrix products in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from supertuner.plan.trace.recorder import TracedDevice

aten = torch.ops.aten

KEY_TILE = 512
QUERY_TILES = ((768, 256), (192, 64), (0, 32))
"""(least number of queries, queries in a thread's tile)."""
ONEDNN_SCRATCH_ALIGNMENT = 128
"""Bytes that oneDNN adds to its scratch memory to align it."""


@dataclass(frozen=True, slots=True)
class CpuDevice(TracedDevice):
    """A CPU with the workspaces of its kernels."""

    threads: int = field(default_factory=torch.get_num_threads)
    """Each thread has its own buffers."""

    def operator_workspaces(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Sizes of buffers that an operator allocates and frees while it runs."""
        if operator is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return self._attention_workspaces(args[0], args[1])
        if operator is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            return self._attention_backward_workspaces(args[1], args[2])
        if operator in (aten.mm.default, aten.bmm.default):
            return _fp32_accumulator_workspaces(args[0], args[1])
        if operator is aten.addmm.default:
            return _fp32_accumulator_workspaces(args[1], args[2])
        return ()

    def _attention_workspaces(self, query: torch.Tensor, key: torch.Tensor) -> Sequence[int]:
        """For the tile of each thread: scores, their maximum and sum, and the result."""
        queries, keys = _tile_sizes(query.shape[-2], key.shape[-2])
        scores = self.threads * queries * (keys + 2 + query.shape[-1]) * 4
        return (scores,) if query.element_size() == 4 else (scores, self.threads * queries * keys * 2)

    def _attention_backward_workspaces(self, query: torch.Tensor, key: torch.Tensor) -> Sequence[int]:
        queries, keys = _tile_sizes(query.shape[-2], key.shape[-2])
        scores, sums = self.threads * 2 * queries * keys * 4, self.threads * queries * 4
        return (scores, sums) if query.element_size() == 4 else (scores, scores // 2, sums)


def _tile_sizes(queries: int, keys: int) -> tuple[int, int]:
    query_tile = next(size for least, size in QUERY_TILES if queries >= least)
    return min(query_tile, queries), min(KEY_TILE, keys)


def _fp32_accumulator_workspaces(left: torch.Tensor, right: torch.Tensor) -> Sequence[int]:
    if left.element_size() != 2:
        return ()
    return (left.shape[:-1].numel() * right.shape[-1] * 4 + ONEDNN_SCRATCH_ALIGNMENT,)
