"""Ctrl-C inside a run is never taken for a broken file: the run stops, loses nothing, and resumes with the same bits.

`make torture` interrupts at random moments; here are moments at which a library turns the interrupt into an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ctrl_c import READS_TENSOR
from tests.train.interrupted_runs import (
    Interruption,
    forget,
    interrupt,
    require_same_result,
    require_stopped_cleanly,
    small_config,
)
from tests.train.runs import TrainingForkServer

CASES = {
    "a second Ctrl-C in the load of a validation": Interruption(
        "validation", 2, call=READS_TENSOR, number=100, before=1
    ),
    "Ctrl-C in the load of the second expert": Interruption("loading", call=READS_TENSOR, number=180),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, parent: TrainingForkServer) -> Path:
    """With an uninterrupted run, `whole`."""
    made = tmp_path_factory.mktemp("interrupted")
    assert parent.train(small_config(made, "whole")) == 0, parent.output()
    return made


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_load_stops_the_run_and_nothing_is_lost(
    case: str, parent: TrainingForkServer, folder: Path
) -> None:
    file = small_config(folder, "interrupted")
    forget(folder, "interrupted")
    sent, code, printed = interrupt(parent, file, CASES[case])
    run = folder / "interrupted" / "run"
    assert sent and "stopped" in printed
    require_stopped_cleanly(run, code, printed)
    assert parent.train(file) == 0, parent.output()
    require_same_result(folder / "whole" / "run", run)


def test_a_second_ctrl_c_that_python_ignores_stops_at_the_next_window(parent: TrainingForkServer, folder: Path) -> None:
    file = small_config(folder, "ignored")
    sent, code, printed = interrupt(parent, file, Interruption("saving", is_lost=True, before=1))
    run = folder / "ignored" / "run"
    assert sent and code == 130 and "Traceback" not in printed
    assert [path.name for path in (run / "checkpoints").iterdir()] in ([], ["step-00000001"])  # no second one
    assert parent.train(file) == 0, parent.output()
    require_same_result(folder / "whole" / "run", run)
