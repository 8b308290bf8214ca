"""The unified-memory engine: what the machine is, where tensors live, and what happens when GPU memory is full.

`memory.stats()` is torch's statistics with those of the overflow allocator; see stats.py. Only the call imports torch.
"""

from supertuner.memory.overflow.stats import stats

__all__ = ["stats"]
