"""Unified memory: which machine this is, where tensors live, and what happens when GPU memory is full.

`memory.overflow()` lets the torch code inside its block allocate more than GPU memory; `memory.stats()` returns torch's
statistics together with those of the overflow allocator. Both are loaded at first use, and only their calls need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supertuner.memory.overflow_allocator.scope import overflow as overflow
    from supertuner.memory.overflow_allocator.stats import stats as stats

__all__ = ["overflow", "stats"]


def __getattr__(name: str) -> Any:
    if name == "overflow":
        from supertuner.memory.overflow_allocator.scope import overflow

        return overflow
    if name == "stats":
        from supertuner.memory.overflow_allocator.stats import stats

        return stats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
