"""What the CPU's kernels take of memory beside their results: the device that a trace of a step on the CPU runs on.

Only what torch's own allocator hands out is counted, as torch.profiler shows it (tests/plan/forecast/test_cpu_forecast.py).
Facts of PyTorch 2.13: `ATen/native/cpu/FlashAttentionKernel.cpp`; oneDNN's matrix products of half formats sum in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from supertuner.plan.trace.recorder import PlainCpuDevice

aten = torch.ops.aten

KEY_TILE = 512
QUERY_TILES = ((768, 256), (192, 64), (0, 32))
"""From so many queries on, a thread takes so many at once."""
ONEDNN_SCRATCH_ALIGNMENT = 128
"""oneDNN's own scratch memory is rounded up by as much."""


@dataclass(frozen=True, slots=True)
class CpuDevice(PlainCpuDevice):
    """A CPU as a trace sees it, with what its kernels take beside their results."""

    threads: int = field(default_factory=torch.get_num_threads)
    """Each has buffers of its own."""

    def operator_workspaces(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Bytes of what an operator takes when it begins and gives back when it ends."""
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
        """Scores, their largest and their sum, and the result, of as many queries as a thread takes at once."""
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
