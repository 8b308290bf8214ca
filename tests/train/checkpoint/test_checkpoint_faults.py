"""A save that is killed or fails at any of its system calls leaves the last checkpoint, or the new one, intact."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from supertuner.core.errors import CheckpointError
from supertuner.core.host import HostFacts
from supertuner.train.checkpoint.resume import load_latest
from tests.small_disk import small
from tests.train.checkpoints import save_parts, tree
from tests.train.run_faults import run_saving_faults

__all__ = ["small"]

SCENARIOS = 7


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_saving_faults()


def test_a_kill_around_every_call_leaves_the_last_checkpoint_or_the_new_one(seen: dict[str, Any]) -> None:
    assert len(seen) == SCENARIOS
    for name, found in seen.items():
        killed = [found["outcomes"][how] for how in ("killed before", "killed after", "killed inside")]
        assert sum(sum(counts.values()) for counts in killed) > len(found["calls"]) > 30, name
        assert set().union(*killed) <= {"old", "new"}
        assert all(counts.get("new") for counts in killed[:2]), f"{name}: the last kills come after the rename"
        assert name == "the same step again" or killed[0]["old"] > 20, f"{name}: the first kills come before it"


def test_a_disk_error_at_any_call_is_reported_and_loses_nothing(seen: dict[str, Any]) -> None:
    for name, found in seen.items():
        assert found["outcomes"]["disk full from here on"]["refused"] > 10, name
        assert found["outcomes"]["failed once"]["refused"] > 20, name


def test_a_partial_write_is_continued(seen: dict[str, Any]) -> None:
    assert all(set(found["outcomes"]["half written"]) == {"new"} for found in seen.values())


def test_nothing_is_renamed_before_all_of_it_is_synced(seen: dict[str, Any]) -> None:
    """A power cut may lose what is not synced: the order of calls must leave nothing to lose."""
    for name, found in seen.items():
        dirty: set[str] = set()
        renames = []
        for what, where, to in _by_name(found["calls"]):
            if what in ("create", "write", "mkdir"):
                dirty |= {where, os.path.dirname(where)}
            elif what == "fsync":
                dirty.discard(where)
            elif what == "rename":
                renames.append(os.path.basename(where))
                inside = {path for path in dirty if path.startswith(where)}
                assert not inside, f"{name}: {where} is renamed to {to} before {inside} is synced"
                dirty |= {os.path.dirname(where)}
            elif what in ("unlinkat", "rmdir") and "/.saving-" not in where:
                holder = os.path.dirname(where)
                assert holder not in dirty, f"{name}: {where} is emptied before the rename of it is synced"
        assert name == "the same step again" or any(one.startswith(".saving-") for one in renames)


def _by_name(calls: list[list[str]]) -> list[list[str]]:
    """Rank 1 writes through a descriptor of the folder: replace it by the folder's name."""
    (new,) = {where for what, where, _ in calls if what == "mkdir" and "/.saving-" in where}
    return [[re.sub(r"^/proc/self/fd/\d+(?=/|$)", new, word) for word in call] for call in calls]


def test_a_full_disk_is_reported_before_anything_is_written(small: Path) -> None:
    kept = save_parts(small / "checkpoints", 1, {"a": {"x": torch.zeros(100_000)}}, {}, keep=2, host=HostFacts())
    before = tree(small)
    message = r"step 2 needs .* are free below .* are missing; .* intact: .*step-00000001"
    with pytest.raises(CheckpointError, match=message):
        save_parts(small / "checkpoints", 2, {"a": {"x": torch.zeros(200_000)}}, {}, keep=2, host=HostFacts())
    assert tree(small) == before
    found = load_latest(small / "checkpoints")
    assert found is not None and found.path == kept
