"""Commands that are for one process, started by a launcher of several: refused by all, told once, nothing is begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import command, rank_log, run_launched
from tests.distributed.runs import a_run


@pytest.mark.parametrize("arguments", [["stage"], ["cache", "build"], ["preview"]])
def test_a_command_for_one_process_is_refused_by_several_and_told_once(tmp_path: Path, arguments: list[str]) -> None:
    path = a_run(tmp_path, "run", 2)
    assert run_launched(2, command, tmp_path, *arguments, str(path)) == [2, 2]
    words = " ".join(rank_log(tmp_path, 0).split())
    assert f"start `supertuner {arguments[0]}` without torchrun" in words and rank_log(tmp_path, 1) == ""
    assert not (tmp_path / "run").exists() and not (tmp_path / "arenas").exists()


def test_the_quickstart_of_several_is_refused(tmp_path: Path) -> None:
    assert run_launched(2, command, tmp_path, "quickstart", "--dir", str(tmp_path / "quick")) == [2, 2]
    assert not (tmp_path / "quick").exists()


def test_one_process_of_a_launcher_is_one_process(tmp_path: Path) -> None:
    path = a_run(tmp_path, "run", 1)
    assert run_launched(1, command, tmp_path, "stage", str(path)) == [0]
