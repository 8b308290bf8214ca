"""From files to batches: lists, probes and stages sources into an arena, then orders, decodes and batches samples.

`data.open(config)` returns the staged samples of a configuration as a torch dataset. It is loaded, with torch, at first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supertuner.data.torch_dataset import ArenaDataset as ArenaDataset
    from supertuner.data.torch_dataset import open_dataset as open

__all__ = ["ArenaDataset", "open"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from supertuner.data.torch_dataset import ArenaDataset, open_dataset

        return {"ArenaDataset": ArenaDataset, "open": open_dataset}[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
