"""Ranks meet before anything begins, and ranks that do not join are named."""

from __future__ import annotations

import pytest

from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.core.errors import TrainError
from supertuner.distributed.rendezvous import open_rendezvous_store
from tests.distributed.ranks import run_launched


def _meet_only_some(place: LauncherEnvironment, come: int, timeout_s: float) -> str:
    if place.rank >= come:
        return "was never started"
    try:
        open_rendezvous_store(place, timeout_s=timeout_s)
    except TrainError as error:
        return str(error)
    return "met"


def test_ranks_that_do_not_join_are_named() -> None:
    messages = run_launched(4, _meet_only_some, 2, 5.0)
    for rank in (0, 1):
        assert messages[rank].startswith(f"rank {rank} of 4 did not meet the other ranks within 5 s")
        assert "rank 2, 3 did not join" in messages[rank]
        assert "MASTER_ADDR" in messages[rank]


def test_ranks_that_join_meet() -> None:
    assert run_launched(3, _meet_only_some, 3, 600.0) == ["met"] * 3


def _meet_again(place: LauncherEnvironment) -> list[str]:
    """Two starts of a launcher that keeps its store: the first leaves its keys there."""
    found = []
    for start in ("first", "second"):
        store = open_rendezvous_store(place, timeout_s=600.0)
        found.append("clean" if not store.check(["word"]) else store.get("word").decode())
        store.set(f"looked/{place.rank}", "")
        store.wait([f"looked/{rank}" for rank in range(place.world_size)])
        store.set("word", start)
    return found


def test_a_start_does_not_see_keys_of_an_earlier_start() -> None:
    assert run_launched(2, _meet_again) == [["clean", "clean"]] * 2


def test_without_a_launcher_the_error_names_the_missing_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainError, match="MASTER_ADDR expected"):
        open_rendezvous_store(LauncherEnvironment(0, 2, 0, 2), timeout_s=1.0)
