"""What one process fails at while others are in the same pass, and what only looks like somebody else's failure."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from supertuner.core.errors import (
    ArenaError,
    CacheError,
    CollectiveError,
    ModelError,
    PeerError,
    SuperTunerError,
    TrainError,
)
from supertuner.distributed.watchdog.collective_errors import TORCH_DISTRIBUTED_PREFIX, is_collective_failure
from supertuner.train.validation.validate import _failure_ends_run


@pytest.mark.parametrize("kind", [TrainError, CacheError, ArenaError])
def test_a_validation_that_one_process_cannot_make_ends_the_job(kind: type[SuperTunerError]) -> None:
    """Whatever it failed of: the others are in the middle of the same passes, and wait for it there."""
    run: Any = SimpleNamespace(step=40)
    with pytest.raises(CollectiveError, match="validation of step 40: no entry"), _failure_ends_run(run):
        raise kind("no entry")


@pytest.mark.parametrize("kind", [ModelError, PeerError])
def test_what_all_processes_see_stays_what_it_is(kind: type[SuperTunerError]) -> None:
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
def test_want_of_memory_in_a_collective_is_no_lost_connection(words: str, broken: bool) -> None:
    names: dict[str, Any] = {}
    place = os.path.join(TORCH_DISTRIBUTED_PREFIX, "fsdp.py")
    exec(compile("def gather(words):\n    raise RuntimeError(words)", place, "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        names["gather"](words)
    assert is_collective_failure(raised.value) is broken
