"""A baseline's folder is read back unchanged or refused; comparisons by stored measurements; the log of nvidia-smi."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from supertuner.cli import main
from supertuner.core.errors import BaselineError, OptionError
from supertuner.tools.baseline import baseline_check as checking
from supertuner.tools.baseline import nvidia_smi
from supertuner.tools.baseline.baseline_report import baseline_report
from supertuner.tools.baseline.measured_process import MeasurementContext
from supertuner.tools.baseline.regression import RegressionVerdict
from supertuner.tools.baseline.rounds import ComparisonOptions
from supertuner.tools.baseline.store import (
    BASELINE_FILE,
    Baseline,
    find_baseline,
    load_baseline,
    new_baseline_path,
    save_baseline,
)
from supertuner.tools.baseline.tables import format_amount
from tests.tools.baseline.simulated_jobs import baseline, jobs


def store_baseline(folder: Path, name: str = "one", **fields: object) -> Path:
    stored = baseline(name, **fields)
    save_baseline(folder / name, stored, baseline_report(stored), {})
    return folder / name


def test_a_baseline_is_read_back_unchanged(tmp_path: Path) -> None:
    stored = baseline()
    save_baseline(tmp_path / "one", stored, "report", {})
    assert load_baseline(tmp_path / "one") == stored
    assert sorted(os.listdir(tmp_path / "one")) == ["baseline.json", "baseline_report.md", "config.json", "steps.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("file", ["baseline.json", "steps.jsonl"])
def test_a_changed_file_is_refused(tmp_path: Path, file: str) -> None:
    path = store_baseline(tmp_path) / file
    path.write_text(path.read_text().replace("0.1", "0.2"))
    with pytest.raises(BaselineError, match=r"has changed since it was written.*capture it again"):
        load_baseline(tmp_path / "one")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "supertuner baseline", "version": 99}', "\x00"])
def test_a_file_that_is_not_a_baseline_is_refused_with_a_baseline_error(tmp_path: Path, content: str) -> None:
    (store_baseline(tmp_path) / BASELINE_FILE).write_text(content)
    with pytest.raises(BaselineError):
        load_baseline(tmp_path / "one")


def test_the_error_for_a_missing_baseline_lists_the_existing_ones(tmp_path: Path) -> None:
    store_baseline(tmp_path, "quick")
    with pytest.raises(BaselineError, match=r"is not a baseline; .* has quick; .*baseline capture slow CONFIG"):
        find_baseline(tmp_path, "slow")
    assert find_baseline(Path("elsewhere"), str(tmp_path / "quick")) == tmp_path / "quick"


def test_ratios_are_refused_where_a_baseline_of_times_is_needed(tmp_path: Path) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "ratios.json").write_text("{}")
    with pytest.raises(OptionError, match="give CONFIG and --peer"):
        find_baseline(tmp_path, "quick")
    with pytest.raises(OptionError, match="give CONFIG and --peer"):
        find_baseline(Path("elsewhere"), str(tmp_path / "quick"))
    with pytest.raises(BaselineError, match=r"has none, and ratios to a peer, .* --peer SCRIPT: quick; "):
        find_baseline(tmp_path, "slow")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "samples/s", "0.25 samples/s"),
        (1234.4, "samples/s", "1,234 samples/s"),
        (0.25, "s", "250 ms"),
        (0.25, "s/sample", "250 ms/sample"),
    ],
)
def test_amounts_have_their_unit_also_if_they_are_small_or_large(value: float, unit: str, text: str) -> None:
    assert format_amount(value, unit) == text


def test_an_existing_baseline_is_replaced_only_on_request(tmp_path: Path) -> None:
    store_baseline(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(OptionError, match="--replace"):
        new_baseline_path(tmp_path, "one", replace=False)
    assert new_baseline_path(tmp_path, "one", replace=True) == tmp_path / "one"
    with pytest.raises(OptionError, match="is not a baseline"):
        new_baseline_path(tmp_path, "mine", replace=True)
    for name in ("", "../up", ".hidden", "a/b"):
        with pytest.raises(OptionError, match="not a valid name"):
            new_baseline_path(tmp_path, name, replace=False)


def test_the_report_contains_figures_machine_code_and_settings(tmp_path: Path) -> None:
    text = (store_baseline(tmp_path) / "baseline_report.md").read_text()
    for part in ("3 × 100 steps", "throughput", "step, 99th percentile", "start, data ready", "peak process.resident"):
        assert part in text
    for part in ("2 CPUs (Xeon)", "at 0123456789", "identical", "OMP_NUM_THREADS", "| torch ", '"max_steps": 100'):
        assert part in text


def test_the_report_names_the_first_step_whose_loss_is_not_finite(tmp_path: Path) -> None:
    for name, good, text in (("late", 90, "10 of 100 are NaN or infinite"), ("never", 0, "all are NaN or infinite")):
        path = store_baseline(tmp_path, name, jobs=tuple(jobs(loss=lambda at, good=good: 1.0 if at < good else None)))
        assert text in (path / "baseline_report.md").read_text()
        assert (
            checking.compare_baselines(tmp_path, (name, name), ComparisonOptions())[1].verdict is RegressionVerdict.SAME
        )
    assert "first at step 91" in (tmp_path / "late" / "baseline_report.md").read_text()


def test_two_baselines_are_compared_by_their_stored_measurements(tmp_path: Path) -> None:
    store_baseline(tmp_path, "before", jobs=tuple(jobs(seed=1)))
    store_baseline(tmp_path, "after", jobs=tuple(jobs(seed=2, step_s=0.12)))
    path, judged = checking.compare_baselines(tmp_path, ("before", "after"), ComparisonOptions())
    assert path == tmp_path / "after" and judged.verdict is RegressionVerdict.WORSE and not judged.losses_differ
    assert "machine load" in " ".join(judged.notes)
    assert (
        checking.compare_baselines(tmp_path, ("after", "before"), ComparisonOptions())[1].verdict
        is RegressionVerdict.BETTER
    )


def test_times_of_another_machine_are_not_compared_but_losses_are(tmp_path: Path) -> None:
    there = {**baseline().machine, "cpu": "Grace", "cpus": 72}
    store_baseline(tmp_path, "before", machine=there)
    store_baseline(tmp_path, "after", jobs=tuple(jobs(seed=2, step_s=0.3)))
    judged = checking.compare_baselines(tmp_path, ("before", "after"), ComparisonOptions())[1]
    assert judged.verdict is RegressionVerdict.UNDECIDED and "cpu was Grace, is Xeon" in " ".join(judged.notes)
    assert {one.name for one in judged.figures} == {"peak process.resident"}
    store_baseline(tmp_path, "other", jobs=tuple(jobs(loss=lambda at: 3.0)))
    assert (
        checking.compare_baselines(tmp_path, ("before", "other"), ComparisonOptions())[1].verdict
        is RegressionVerdict.WORSE
    )


def test_times_with_another_number_of_threads_are_not_compared(tmp_path: Path) -> None:
    store_baseline(tmp_path, "before", environment={})
    store_baseline(tmp_path, "after")
    judged = checking.compare_baselines(tmp_path, ("before", "after"), ComparisonOptions())[1]
    assert "OMP_NUM_THREADS was not set, is 1" in " ".join(judged.notes)


def test_baselines_run_again_only_if_their_code_is_available(tmp_path: Path) -> None:
    from supertuner.core.events import NullSink

    for name in ("before", "after"):
        path = store_baseline(tmp_path, name, commit="f" * 40)
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({"datasets": [{"id": "a", "instance_data_dir": str(data)}]}))
    with pytest.raises(BaselineError, match="captured by code that is not available here"):
        checking.compare_by_rerunning(
            tmp_path, ("before", "after"), ComparisonOptions(), MeasurementContext({}, NullSink())
        )


FAKE = """#!/bin/sh
echo "index, name, memory.used [MiB], power.draw [W]"
echo "$@" > "$(dirname "$0")/arguments"
while :; do echo "0, GH200 480GB, 91234 MiB, [N/A]"; echo "0, GH200 480GB, 81234 MiB, 600.5 W"; sleep 0.01; done
"""


def program(folder: Path, content: str) -> dict[str, str]:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(content)
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gpus_are_logged_inside_the_context_and_nvidia_smi_is_terminated_after_it(tmp_path: Path) -> None:
    environ, log = program(tmp_path / "bin", FAKE), tmp_path / nvidia_smi.LOG_FILE
    with nvidia_smi.log_gpus(log, environ) as note:
        while log.stat().st_size < 300:
            time.sleep(0.01)
    size = log.stat().st_size
    assert note is None and "--query-gpu=timestamp,index" in (tmp_path / "bin/arguments").read_text()
    time.sleep(0.1)
    assert log.stat().st_size == size
    (text,) = nvidia_smi.summarize_log(log)
    assert text.startswith("GPU 0 (GH200 480GB)") and "memory.used 91,234 MiB" in text and "power.draw 60" in text


def test_the_output_of_a_failing_nvidia_smi_is_reported(tmp_path: Path) -> None:
    environ, log = program(tmp_path / "bin", "#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n"), tmp_path / "log"
    with nvidia_smi.log_gpus(log, environ) as note:
        while not log.stat().st_size:
            time.sleep(0.01)
    assert note is None and nvidia_smi.summarize_log(log) == ["nvidia-smi printed: NVIDIA-SMI has failed"]


def test_without_nvidia_smi_there_is_a_note_and_no_file(tmp_path: Path) -> None:
    with nvidia_smi.log_gpus(tmp_path / "log", {"PATH": str(tmp_path)}) as note:
        pass
    assert note is not None and "nvidia-smi is not installed" in note and not (tmp_path / "log").exists()


def test_a_baseline_of_a_later_version_may_have_more_fields(tmp_path: Path) -> None:
    """This version ignores fields that it does not know, and refuses a record without a field that it needs."""
    from supertuner.tools.baseline.record import job_to_json, parse_job

    measured = baseline().jobs[0]
    document = json.loads(json.dumps(job_to_json(measured))) | {"new": 1}
    assert parse_job(document, measured.steps, "here") == measured
    del document["start"]
    with pytest.raises(BaselineError, match="capture it again"):
        parse_job(document, measured.steps, "here")
    assert isinstance(load_baseline(store_baseline(tmp_path)), Baseline)


def test_an_unreadable_baseline_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_baseline(tmp_path / "whole", baseline("whole"), "report", {})
    save_baseline(tmp_path / "broken", baseline("broken"), "report", {})
    (tmp_path / "broken" / BASELINE_FILE).write_text("{")
    with pytest.raises(SystemExit) as ended:
        main(["baseline", "ls", "--dir", str(tmp_path)])
    output = capsys.readouterr().out
    assert ended.value.code == 2
    assert "whole" in output and "broken" in output and "capture it again" in output
