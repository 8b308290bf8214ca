"""Commands for one process, started by a launcher with several: all refuse, one prints the message, nothing starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import command, rank_log, run_launched
from tests.distributed.runs import a_run


@pytest.mark.parametrize("arguments", [["stage"], ["cache", "build"], ["preview"]])
def test_a_command_for_one_process_is_refused_on_several_ranks_with_one_message(
    tmp_path: Path, arguments: list[str]
) -> None:
    path = a_run(tmp_path, "run", 2)
    assert run_launched(2, command, tmp_path, *arguments, str(path)) == [2, 2]
    words = " ".join(rank_log(tmp_path, 0).split())
    assert f"start `supertuner {arguments[0]}` without torchrun" in words and rank_log(tmp_path, 1) == ""
    assert not (tmp_path / "run").exists() and not (tmp_path / "arenas").exists()


def test_quickstart_on_several_ranks_is_refused(tmp_path: Path) -> None:
    assert run_launched(2, command, tmp_path, "quickstart", "--dir", str(tmp_path / "quick")) == [2, 2]
    assert not (tmp_path / "quick").exists()


def test_a_launcher_with_one_process_is_accepted(tmp_path: Path) -> None:
    path = a_run(tmp_path, "run", 1)
    assert run_launched(1, command, tmp_path, "stage", str(path)) == [0]
