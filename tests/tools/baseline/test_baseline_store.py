"""A baseline's folder: it is read as it was written, or refused; and what nvidia-smi says lies beside it."""

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
from tests.tools.baseline.baselining import baseline, jobs


def kept(folder: Path, name: str = "one", **more: object) -> Path:
    made = baseline(name, **more)
    save_baseline(folder / name, made, baseline_report(made), {})
    return folder / name


def test_what_was_captured_is_read_back_the_same(tmp_path: Path) -> None:
    made = baseline()
    save_baseline(tmp_path / "one", made, "report", {})
    assert load_baseline(tmp_path / "one") == made
    assert sorted(os.listdir(tmp_path / "one")) == ["baseline.json", "baseline_report.md", "config.json", "steps.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("file", ["baseline.json", "steps.jsonl"])
def test_a_file_that_somebody_changed_is_refused(tmp_path: Path, file: str) -> None:
    path = kept(tmp_path) / file
    path.write_text(path.read_text().replace("0.1", "0.2"))
    with pytest.raises(BaselineError, match=r"is not what was written.*capture it again"):
        load_baseline(tmp_path / "one")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "supertuner baseline", "version": 99}', "\x00"])
def test_what_is_no_baseline_is_refused_with_words(tmp_path: Path, content: str) -> None:
    (kept(tmp_path) / BASELINE_FILE).write_text(content)
    with pytest.raises(BaselineError):
        load_baseline(tmp_path / "one")


def test_a_missing_baseline_names_those_that_are_there(tmp_path: Path) -> None:
    kept(tmp_path, "quick")
    with pytest.raises(BaselineError, match=r"is no baseline; there is quick in .*baseline capture slow CONFIG"):
        find_baseline(tmp_path, "slow")
    assert find_baseline(Path("elsewhere"), str(tmp_path / "quick")) == tmp_path / "quick"


def test_ratios_are_no_baseline_of_times_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "ratios.json").write_text("{}")
    with pytest.raises(OptionError, match="give CONFIG and --peer"):
        find_baseline(tmp_path, "quick")


def test_nothing_is_written_over_unless_that_was_said(tmp_path: Path) -> None:
    kept(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(OptionError, match="--replace"):
        new_baseline_path(tmp_path, "one", replace=False)
    assert new_baseline_path(tmp_path, "one", replace=True) == tmp_path / "one"
    with pytest.raises(OptionError, match="is no baseline"):
        new_baseline_path(tmp_path, "mine", replace=True)
    for name in ("", "../up", ".hidden", "a/b"):
        with pytest.raises(OptionError, match="no name"):
            new_baseline_path(tmp_path, name, replace=False)


def test_the_report_tells_the_figures_and_what_they_are_of(tmp_path: Path) -> None:
    text = (kept(tmp_path) / "baseline_report.md").read_text()
    for words in ("3 × 100 steps", "throughput", "step, 99 % are below", "start, data ready", "peak process.resident"):
        assert words in text
    for words in ("2 CPUs (Xeon)", "at 0123456789", "identical", "OMP_NUM_THREADS", "| torch ", '"max_steps": 100'):
        assert words in text


def test_a_report_says_where_losses_stopped_being_numbers(tmp_path: Path) -> None:
    for name, good, says in (("late", 90, "10 of 100 are no numbers"), ("never", 0, "none is a number")):
        path = kept(tmp_path, name, jobs=tuple(jobs(loss=lambda at, good=good: 1.0 if at < good else None)))
        assert says in (path / "baseline_report.md").read_text()
        assert (
            checking.compare_baselines(tmp_path, (name, name), ComparisonOptions())[1].verdict
            is RegressionVerdict.SAME
        )
    assert "first at step 91" in (tmp_path / "late" / "baseline_report.md").read_text()


def test_two_baselines_are_compared_by_what_was_kept(tmp_path: Path) -> None:
    kept(tmp_path, "before", jobs=tuple(jobs(seed=1)))
    kept(tmp_path, "after", jobs=tuple(jobs(seed=2, step_s=0.12)))
    path, judged = checking.compare_baselines(tmp_path, ("before", "after"), ComparisonOptions())
    assert path == tmp_path / "after" and judged.verdict is RegressionVerdict.WORSE and not judged.losses_differ
    assert "weather" in " ".join(judged.notes)
    assert (
        checking.compare_baselines(tmp_path, ("after", "before"), ComparisonOptions())[1].verdict
        is RegressionVerdict.BETTER
    )


def test_times_of_another_machine_are_not_compared_and_losses_are(tmp_path: Path) -> None:
    there = {**baseline().machine, "cpu": "Grace", "cpus": 72}
    kept(tmp_path, "before", machine=there)
    kept(tmp_path, "after", jobs=tuple(jobs(seed=2, step_s=0.3)))
    judged = checking.compare_baselines(tmp_path, ("before", "after"), ComparisonOptions())[1]
    assert judged.verdict is RegressionVerdict.UNDECIDED and "cpu was Grace, is Xeon" in " ".join(judged.notes)
    assert {one.name for one in judged.figures} == {"peak process.resident"}
    kept(tmp_path, "other", jobs=tuple(jobs(loss=lambda at: 3.0)))
    assert (
        checking.compare_baselines(tmp_path, ("before", "other"), ComparisonOptions())[1].verdict
        is RegressionVerdict.WORSE
    )


def test_other_threads_are_another_machine(tmp_path: Path) -> None:
    kept(tmp_path, "before", environment={})
    kept(tmp_path, "after")
    judged = checking.compare_baselines(tmp_path, ("before", "after"), ComparisonOptions())[1]
    assert "OMP_NUM_THREADS was not set, is 1" in " ".join(judged.notes)


def test_both_are_run_again_only_if_their_code_is_here(tmp_path: Path) -> None:
    from supertuner.core.events import NullSink

    for name in ("before", "after"):
        path = kept(tmp_path, name, commit="f" * 40)
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({"datasets": [{"id": "a", "instance_data_dir": str(data)}]}))
    with pytest.raises(BaselineError, match="captured by code that is not here"):
        checking.compare_by_rerunning(
            tmp_path, ("before", "after"), ComparisonOptions(), environ={}, progress=NullSink()
        )


FAKE = """#!/bin/sh
echo "index, name, memory.used [MiB], power.draw [W]"
echo "$@" > "$(dirname "$0")/asked"
while :; do echo "0, GH200 480GB, 91234 MiB, [N/A]"; echo "0, GH200 480GB, 81234 MiB, 600.5 W"; sleep 0.01; done
"""


def program(folder: Path, content: str) -> dict[str, str]:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(content)
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gpus_are_logged_as_long_as_it_is_open_and_the_program_is_ended(tmp_path: Path) -> None:
    environ, log = program(tmp_path / "bin", FAKE), tmp_path / nvidia_smi.LOG_FILE
    with nvidia_smi.log_gpus(log, environ) as note:
        while log.stat().st_size < 300:
            time.sleep(0.01)
    size = log.stat().st_size
    assert note is None and "--query-gpu=timestamp,index" in (tmp_path / "bin/asked").read_text()
    time.sleep(0.1)
    assert log.stat().st_size == size
    (said,) = nvidia_smi.summarize_log(log)
    assert said.startswith("GPU 0 (GH200 480GB)") and "memory.used 91,234 MiB" in said and "power.draw 60" in said


def test_a_program_that_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    environ, log = program(tmp_path / "bin", "#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n"), tmp_path / "log"
    with nvidia_smi.log_gpus(log, environ) as note:
        while not log.stat().st_size:
            time.sleep(0.01)
    assert note is None and nvidia_smi.summarize_log(log) == ["nvidia-smi said: NVIDIA-SMI has failed"]


def test_without_the_program_it_is_said_and_there_is_no_file(tmp_path: Path) -> None:
    with nvidia_smi.log_gpus(tmp_path / "log", {"PATH": str(tmp_path)}) as note:
        pass
    assert note is not None and "no nvidia-smi" in note and not (tmp_path / "log").exists()


def test_a_baseline_of_a_later_version_may_have_more_fields(tmp_path: Path) -> None:
    """What this version does not know is left out; what it needs must be there."""
    from supertuner.tools.baseline.record import job_to_json, parse_job

    one = baseline().jobs[0]
    rest = json.loads(json.dumps(job_to_json(one))) | {"new": 1}
    assert parse_job(rest, one.steps, "here") == one
    del rest["start"]
    with pytest.raises(BaselineError, match="capture it again"):
        parse_job(rest, one.steps, "here")
    assert isinstance(load_baseline(kept(tmp_path)), Baseline)


def test_a_baseline_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_baseline(tmp_path / "whole", baseline("whole"), "report", {})
    save_baseline(tmp_path / "broken", baseline("broken"), "report", {})
    (tmp_path / "broken" / BASELINE_FILE).write_text("{")
    with pytest.raises(SystemExit) as ended:
        main(["baseline", "ls", "--dir", str(tmp_path)])
    said = capsys.readouterr().out
    assert ended.value.code == 2
    assert "whole" in said and "broken" in said and "capture it again" in said
