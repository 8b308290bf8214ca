"""`memory.overflow()` refuses, with the reason, wherever overflow is impossible."""

from __future__ import annotations

import pytest
import torch

from supertuner import memory
from supertuner.core.errors import MemoryEngineError


@pytest.mark.requires(not torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_reason_is_said() -> None:
    with pytest.raises(MemoryEngineError, match="there is no GPU 0"), memory.overflow(limit_gib=90):
        pass


@pytest.mark.parametrize(
    "arguments", [{"limit_gib": 0}, {"limit_gib": -1.0}, {"oversubscription_ratio": 0.5}, {"host_floor_gib": -1.0}]
)
def test_limits_that_make_no_sense_are_refused(arguments: dict[str, float]) -> None:
    with (
        pytest.raises(MemoryEngineError, match=rf"memory\.overflow: {next(iter(arguments))} is "),
        memory.overflow(**arguments),
    ):
        pass
