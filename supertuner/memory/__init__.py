"""Unified memory: which machine this is, where tensors live, and what happens when GPU memory is full.

`memory.stats()` returns torch's statistics together with those of the overflow allocator (see overflow/stats.py). Only
the call imports torch.
"""

from supertuner.memory.overflow.stats import stats

__all__ = ["stats"]
