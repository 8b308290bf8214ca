"""Errors of one rank while others are in the same pass, and errors that only look like another rank's failure."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from supertuner.config.sources.environment import leave_nccl_errors_to_watchdog
from supertuner.core.errors import (
    ArenaError,
    CacheError,
    CollectiveError,
    ModelError,
    PeerError,
    SuperTunerError,
    TrainError,
)
from supertuner.core.waiting import waiting_for_other_ranks
from supertuner.distributed.watchdog.collective_errors import TORCH_DISTRIBUTED_PREFIX, is_collective_failure
from supertuner.train.validation.validate import _failure_ends_run


@pytest.mark.parametrize("kind", [TrainError, CacheError, ArenaError])
def test_a_validation_that_fails_on_one_rank_ends_the_job(kind: type[SuperTunerError]) -> None:
    """For any error: the other ranks are in the middle of the same passes, and wait for it there."""
    run: Any = SimpleNamespace(step=40)
    with pytest.raises(CollectiveError, match="validation of step 40: no entry"), _failure_ends_run(run):
        raise kind("no entry")


@pytest.mark.parametrize("kind", [ModelError, PeerError])
def test_an_error_on_all_ranks_keeps_its_type(kind: type[SuperTunerError]) -> None:
    run: Any = SimpleNamespace(step=40)
    with pytest.raises(kind), _failure_ends_run(run):
        raise kind("of all")


@pytest.mark.parametrize(
    ("words", "broken"),
    [
        ("Connection closed by peer", True),
        ("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried", False),
    ],
)
def test_too_little_memory_in_a_collective_is_not_a_lost_connection(words: str, broken: bool) -> None:
    names: dict[str, Any] = {}
    place = os.path.join(TORCH_DISTRIBUTED_PREFIX, "fsdp.py")
    exec(compile("def gather(words):\n    raise RuntimeError(words)", place, "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        names["gather"](words)
    assert is_collective_failure(raised.value) is broken


def test_an_error_of_torch_in_a_wait_for_other_ranks_is_a_lost_connection() -> None:
    """`Work.wait` raises without a frame of torch.distributed."""
    for error, broken in (
        (RuntimeError("Connection closed by peer"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("not of torch"), False),
    ):
        with pytest.raises(type(error)), waiting_for_other_ranks("gradient all-reduce"):
            raise error
        assert is_collective_failure(error) is broken
    assert not is_collective_failure(RuntimeError("elsewhere"))


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_errors_of_nccl_are_left_to_the_watchdog_unless_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    environ = {} if before is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": before}
    monkeypatch.setattr(os, "environ", environ)
    leave_nccl_errors_to_watchdog()
    assert environ == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": after}
