"""Processes meet before anything begins, and who does not come is named."""

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


def test_who_does_not_come_is_named() -> None:
    said = run_launched(4, _meet_only_some, 2, 5.0)
    for rank in (0, 1):
        assert said[rank].startswith(f"rank {rank} of 4 did not meet the others within 5 s")
        assert "rank 2, 3 did not come" in said[rank]
        assert "MASTER_ADDR" in said[rank]


def test_who_comes_is_met() -> None:
    assert run_launched(3, _meet_only_some, 3, 600.0) == ["met"] * 3


def _meet_again(place: LauncherEnvironment) -> list[str]:
    """As two starts of a launcher that keeps its store: the first leaves its words there."""
    found = []
    for start in ("first", "second"):
        store = open_rendezvous_store(place, timeout_s=600.0)
        found.append("clean" if not store.check(["word"]) else store.get("word").decode())
        store.set(f"looked/{place.rank}", "")
        store.wait([f"looked/{rank}" for rank in range(place.world_size)])
        store.set("word", start)
    return found


def test_a_start_does_not_see_what_the_one_before_it_wrote() -> None:
    assert run_launched(2, _meet_again) == [["clean", "clean"]] * 2


def test_a_process_that_no_launcher_started_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainError, match="MASTER_ADDR expected"):
        open_rendezvous_store(LauncherEnvironment(0, 2, 0, 2), timeout_s=1.0)
