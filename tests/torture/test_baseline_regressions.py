"""Regressions that are put into a copy of the code are found by running old and new in turns; each for what it is."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from supertuner.core.events import NullSink
from supertuner.tools.baseline import baseline_capture as capturing
from supertuner.tools.baseline import baseline_check as checking
from supertuner.tools.baseline import code_versions as code
from supertuner.tools.baseline.regression import ComparisonResult, RegressionVerdict
from supertuner.tools.baseline.rounds import ComparisonOptions
from tests.tools.baseline.test_baseline_command import write_config

pytestmark = pytest.mark.torture
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
"""With two threads a capture took 208 s beside others on two cores, with one 64 s."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("regressions")
    config = write_config(made)
    capturing.capture_baseline(
        made / "baseline",
        "now",
        config,
        capturing.CaptureOptions(steps=40, repeats=1, profile=True),
        environ=ENVIRON,
        progress=NullSink(),
    )
    return made


def beside(folder: Path, name: str, file: str, old: str, new: str) -> ComparisonResult:
    """The code here against a copy in which a line is another; the copy is the old side."""
    copy = folder / name
    shutil.copytree(code.PACKAGE_DIR, copy / "supertuner", ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / "supertuner" / file
    text = changed.read_text()
    assert old in text, f"{file} has no {old!r} any more"
    changed.write_text(text.replace(old, new, 1))
    options = ComparisonOptions(rounds=3, max_rounds=9, against=str(copy))
    return checking.check_baseline(folder / "baseline", "now", options, environ=ENVIRON, progress=NullSink())[1]


STEP = ("train/loop.py", "    run.step += 1\n")


@pytest.mark.timeout(1800)
def test_code_against_itself_is_no_worse(folder: Path) -> None:
    found = beside(folder, "same", *STEP, "    run.step += 1\n")
    assert not found.worse and found.losses.likeness == "identical"


@pytest.mark.timeout(1800)
def test_a_step_that_became_slower_is_found_and_its_losses_are_the_same(folder: Path) -> None:
    """The old side is the quicker one here: what was slow is found better, by as much."""
    found = beside(folder, "slow", *STEP, "    time.sleep(0.05)\n    run.step += 1\n")
    step = next(one for one in found.figures if one.name == "step")
    assert step.verdict is RegressionVerdict.BETTER and found.losses.likeness == "identical"


@pytest.mark.timeout(1800)
def test_other_losses_are_found_though_no_step_is_slower(folder: Path) -> None:
    rate = "    rate = expert_state.optimizer.base_learning_rate * run.lr_factor(plan.step)\n"
    found = beside(folder, "other", "train/loop.py", rate, rate.replace("run.lr_factor", "3 * run.lr_factor"))
    assert found.losses_differ and not found.worse
    assert found.losses.first_difference is not None and found.losses.first_difference > 1


def test_the_trace_of_the_profiler_holds_operators(folder: Path) -> None:
    trace = json.loads(gzip.decompress((folder / "baseline/now/trace.json.gz").read_bytes()))
    assert sum("aten::" in str(event.get("name")) for event in trace["traceEvents"]) > 100
