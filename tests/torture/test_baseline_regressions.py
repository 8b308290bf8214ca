"""Regressions inserted into a copy of the code are found and classified by running both versions in turns."""

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
from supertuner.tools.baseline.measured_process import MeasurementContext
from supertuner.tools.baseline.regression import ComparisonResult, RegressionVerdict
from supertuner.tools.baseline.rounds import ComparisonOptions
from tests.tools.baseline.test_baseline_command import write_config

pytestmark = pytest.mark.torture
CONTEXT = MeasurementContext({**os.environ, "OMP_NUM_THREADS": "1"}, NullSink())
"""With two threads a capture took 208 s on two busy cores, with one thread 64 s."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regressions")
    config = write_config(folder)
    capturing.capture_baseline(
        folder / "baseline",
        "now",
        config,
        (),
        capturing.CaptureOptions(steps=40, repeats=1, profile=True),
        CONTEXT,
    )
    return folder


def compare_with_changed_copy(folder: Path, name: str, file: str, old: str, new: str) -> ComparisonResult:
    """Compare the current code with a copy in which `old` is replaced by `new`; the copy is the old side."""
    copy = folder / name
    shutil.copytree(code.PACKAGE_DIR, copy / "supertuner", ignore=shutil.ignore_patterns("__pycache__"))
    changed = copy / "supertuner" / file
    text = changed.read_text()
    assert old in text, f"{file} has no {old!r} any more"
    changed.write_text(text.replace(old, new, 1))
    options = ComparisonOptions(rounds=3, max_rounds=9, against=str(copy))
    return checking.check_baseline(folder / "baseline", "now", options, CONTEXT)[1]


STEP = ("train/loop.py", "    run.step += 1\n")


@pytest.mark.timeout(1800)
def test_code_compared_with_itself_is_no_worse(folder: Path) -> None:
    found = compare_with_changed_copy(folder, "same", *STEP, "    run.step += 1\n")
    assert not found.worse and found.losses.likeness == "identical"


@pytest.mark.timeout(1800)
def test_a_slower_step_is_found_and_its_losses_are_identical(folder: Path) -> None:
    """The copy, which is the old side, is slower; so the current code is judged better."""
    found = compare_with_changed_copy(folder, "slow", *STEP, "    time.sleep(0.05)\n    run.step += 1\n")
    step = next(figure for figure in found.figures if figure.name == "step")
    assert step.verdict is RegressionVerdict.BETTER and found.losses.likeness == "identical"


@pytest.mark.timeout(1800)
def test_different_losses_are_found_although_no_step_is_slower(folder: Path) -> None:
    rate = "    rate = expert_state.optimizer.base_learning_rate * run.lr_factor(plan.step)\n"
    found = compare_with_changed_copy(
        folder, "other", "train/loop.py", rate, rate.replace("run.lr_factor", "3 * run.lr_factor")
    )
    assert found.losses_differ and not found.worse
    assert found.losses.first_difference is not None and found.losses.first_difference > 1


def test_the_trace_of_the_profiler_contains_operators(folder: Path) -> None:
    trace = json.loads(gzip.decompress((folder / "baseline/now/trace.json.gz").read_bytes()))
    assert sum("aten::" in str(event.get("name")) for event in trace["traceEvents"]) > 100
