"""The test support for several ranks: they meet, return results, fail by name, and never outlive their test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from torch import distributed as dist

from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.distributed.torch_process_group import TorchProcessGroup
from tests.distributed.ranks import command, joined_ranks, launched_ranks, rank_log, run_launched, run_ranks


def _introduce(group: TorchProcessGroup, word: str) -> tuple[int, list[bytes]]:
    return group.rank, group.all_gather(f"{word} {group.rank}".encode())


def _fail_on(group: TorchProcessGroup, rank: int) -> None:
    if group.rank == rank:
        raise ValueError("this one has enough")
    group.all_reduce_max([1])


def _wait(group: TorchProcessGroup, met: Path | None = None) -> None:
    group.all_reduce_max([0])
    if group.rank == 0:
        if met is not None:
            met.touch()
        signal.pause()
    dist.barrier()


def _variables(place: LauncherEnvironment) -> tuple[str, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_meet_and_answer_in_order() -> None:
    heard = [b"rank 0", b"rank 1", b"rank 2"]
    assert run_ranks(3, _introduce, "rank") == [(0, heard), (1, heard), (2, heard)]


def test_a_rank_that_raises_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 ended with.*this one has enough"):
        run_ranks(2, _fail_on, 1)


def test_a_killed_rank_is_reported_with_its_signal_and_no_rank_is_left(tmp_path: Path) -> None:
    with joined_ranks(2, _wait, tmp_path / "met") as ranks:
        while not (tmp_path / "met").exists():
            time.sleep(0.01)
        ranks.signal(0, signal.SIGKILL)
        ended = ranks.ended()
    assert ended[0].exitcode == -signal.SIGKILL
    assert not ended[1].ended_well, "the other one lost its peer"
    assert not any(map(_alive, ranks.pids))


def test_leaving_ends_ranks_that_still_wait() -> None:
    with pytest.raises(KeyError, match="the test itself"), joined_ranks(2, _wait) as ranks:
        raise KeyError("the test itself")
    assert not any(map(_alive, ranks.pids))


def test_launched_ranks_have_the_variables_of_a_launcher() -> None:
    assert run_launched(2, _variables) == [("0", "2"), ("1", "2")]
    with launched_ranks(1, _variables) as ranks:
        assert ranks.values() == [("0", "1")]


def test_commands_run_in_ranks(tmp_path: Path) -> None:
    assert run_launched(2, command, tmp_path, "--version") == [0, 0]
    assert rank_log(tmp_path, 0) == rank_log(tmp_path, 1) != ""
