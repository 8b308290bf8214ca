"""What the CPU's kernels take of memory beside their results: the device that a trace of a step on the CPU runs on.

Only what torch's own allocator hands out is counted, as torch.profiler shows it (tests/plan/forecast/test_cpu_forecast.py).
Facts of PyTorch 2.13: `ATen/native/cpu/FlashAttentionKernel.cpp`; oneDNN's matrix products of half formats sum in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from supertuner.plan.trace.recorder import Plain

aten = torch.ops.aten

KEYS_AT_ONCE = 512
QUERIES_AT_ONCE = ((768, 256), (192, 64), (0, 32))
"""From so many queries on, a thread takes so many at once."""
ALIGNED = 128
"""oneDNN's own scratch memory is rounded up by as much."""


@dataclass(frozen=True, slots=True)
class Cpu(Plain):
    """A CPU as a trace sees it, with what its kernels take beside their results."""

    threads: int = field(default_factory=torch.get_num_threads)
    """Each has buffers of its own."""

    def workspace(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Bytes of what an operator takes when it begins and gives back when it ends."""
        if operator is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return self._attention(args[0], args[1])
        if operator is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            return self._attention_backward(args[1], args[2])
        if operator in (aten.mm.default, aten.bmm.default):
            return _summed_in_fp32(args[0], args[1])
        if operator is aten.addmm.default:
            return _summed_in_fp32(args[1], args[2])
        return ()

    def _attention(self, query: torch.Tensor, key: torch.Tensor) -> Sequence[int]:
        """Scores, their largest and their sum, and the result, of as many queries as a thread takes at once."""
        queries, keys = _at_once(query.shape[-2], key.shape[-2])
        scores = self.threads * queries * (keys + 2 + query.shape[-1]) * 4
        return (scores,) if query.element_size() == 4 else (scores, self.threads * queries * keys * 2)

    def _attention_backward(self, query: torch.Tensor, key: torch.Tensor) -> Sequence[int]:
        queries, keys = _at_once(query.shape[-2], key.shape[-2])
        scores, sums = self.threads * 2 * queries * keys * 4, self.threads * queries * 4
        return (scores, sums) if query.element_size() == 4 else (scores, scores // 2, sums)


def _at_once(queries: int, keys: int) -> tuple[int, int]:
    most = next(size for least, size in QUERIES_AT_ONCE if queries >= least)
    return min(most, queries), min(KEYS_AT_ONCE, keys)


def _summed_in_fp32(left: torch.Tensor, right: torch.Tensor) -> Sequence[int]:
    if left.element_size() != 2:
        return ()
    return (left.shape[:-1].numel() * right.shape[-1] * 4 + ALIGNED,)
