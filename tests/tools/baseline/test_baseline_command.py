"""The command `supertuner baseline`: it measures, stores and judges real training runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from supertuner.cli import app
from supertuner.core.errors import BaselineError, OptionError
from supertuner.core.events import NullSink
from supertuner.tools.baseline import baseline_capture as capturing
from supertuner.tools.baseline import baseline_check as checking
from supertuner.tools.baseline import code_versions as code
from supertuner.tools.baseline import peer_ratios as ratios
from supertuner.tools.baseline.confidence_interval import RatioInterval
from supertuner.tools.baseline.measured_process import MeasurementContext
from supertuner.tools.baseline.regression import RegressionVerdict
from supertuner.tools.baseline.rounds import ComparisonOptions
from supertuner.tools.baseline.store import load_baseline, save_baseline
from supertuner.tools.shapes import BASE_MODEL
from tests.tools.baseline.simulated_jobs import baseline, jobs

pytestmark = pytest.mark.timeout(900)  # whole training runs, slow on a busy machine
PICTURES = Path(__file__).resolve().parents[3] / "examples" / "example_images"


def supertuner(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["baseline", *map(str, words)])


def write_config(folder: Path) -> Path:
    config = folder / "run.json"
    config.write_text(
        json.dumps(
            {
                "run": {"name": "mine", "output_dir": "runs"},
                "model": {"family": "wan2.2", "path": str(BASE_MODEL)},
                "arena": {"home": "arenas"},
                "cache_config": {"persistent_cache": True, "cache_dir": "cache"},
                "datasets": [{"id": "a", "instance_data_dir": str(PICTURES), "resolution": 32, "bucket_step": 16}],
                "train": {"batch_size": 2, "num_epochs": 1, "mixed_precision": "fp32"},
                "adapter": {"rank": 4},
                "validation": {"at_end": False},
            }
        )
    )
    return config


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(its folder, the console output) of one capture of a real training, shared by all tests because it is slow."""
    folder = tmp_path_factory.mktemp("captured")
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'index, memory.used [MiB]'\nexec sleep 1000\n")
    (folder / "nvidia-smi").chmod(0o755)
    words = ("capture", "now", write_config(folder), "--steps", "12", "--repeats", "1", "--dir", folder / "baseline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        done = supertuner(*words)
    assert done.exit_code == 0, done.output
    return folder, done.output


def test_a_capture_stores_times_losses_and_memory_of_a_training(captured: tuple[Path, str]) -> None:
    folder, output = captured
    stored = load_baseline(folder / "baseline" / "now")
    (measured,) = stored.jobs
    assert [step.step for step in measured.steps] == list(range(1, 13))
    assert all(0 < step.seconds <= step.wall_s for step in measured.steps)
    assert measured.start.first_step_s > measured.start.began_s > 0 and stored.cold_start_s is not None
    assert measured.start.cold is False, "the preparation run filled the caches"
    assert measured.peaks["process.resident"] > measured.peaks["process.anonymous"] > 1 << 27
    assert len(measured.losses) == 32 and measured.versions["torch"] and stored.machine["cpus"]
    assert "throughput" in output and "residency hints off" in output and "baseline check now" in output


def test_a_capture_leaves_nothing_but_the_baseline(captured: tuple[Path, str]) -> None:
    folder, _ = captured
    assert not [path for path in (folder / "runs").iterdir() if path.is_dir()]
    files = ["baseline.json", "baseline_report.md", "config.json", "diagnostics.json", "events.jsonl"]
    stored = folder / "baseline" / "now"
    assert sorted(path.name for path in stored.iterdir()) == [*files, "nvidia_smi.log", "steps.jsonl"]
    assert (stored / "nvidia_smi.log").read_text() == "index, memory.used [MiB]\n"
    assert json.loads((folder / "baseline/now/diagnostics.json").read_text())["report"] == "supertuner doctor"


def test_a_check_trains_the_stored_configuration_again_and_finds_the_same_losses(captured: tuple[Path, str]) -> None:
    folder, _ = captured
    options = ["--stored", "--repeats", "1", "--most", "1", "--limit", "100", "--json"]
    done = supertuner("check", "now", "--dir", folder / "baseline", *options)
    document = json.loads(done.stdout[done.stdout.index("{") :])
    assert document["losses"]["likeness"] == "identical"
    assert document["learns_otherwise"] is False and document["rounds"] == 1
    assert {one["name"] for one in document["figures"]} >= {"step", "time per sample", "peak process.resident"}
    assert json.loads((folder / "baseline/now/check.json").read_text()) == document
    assert "machine load" in " ".join(document["notes"]) and "--against CODE" in " ".join(document["notes"])
    assert "# Baseline now, now" in (folder / "baseline/now/check.md").read_text()


def test_a_failed_capture_reports_the_reason_and_stores_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    settings = json.loads(config.read_text())
    settings["model"]["path"] = "no/such/model"
    config.write_text(json.dumps(settings))
    with pytest.raises(BaselineError, match=r"(?s)exit code 1.*no/such/model"):
        capturing.capture_baseline(
            tmp_path / "baseline",
            "now",
            config,
            (),
            capturing.CaptureOptions(),
            MeasurementContext(dict(os.environ), NullSink()),
        )
    assert not (tmp_path / "baseline").exists() or not list((tmp_path / "baseline").iterdir())
    assert not [path for path in (tmp_path / "runs").glob("*") if path.is_dir()]


@pytest.mark.parametrize(
    ("after", "exit_code", "headline"),
    [
        (jobs(seed=2), 0, "no worse."),
        (jobs(seed=2, step_s=0.09), 0, "better: step -"),
        (jobs(seed=2, step_s=0.115), 1, "WORSE: step +"),
        (jobs(seed=2, loss=lambda at: 2.0), 1, "LOSSES DIFFER: they differ at step 1"),
        (jobs(seed=2, apart=0.5, noise=0.5, windows=range(1, 101)), 3, "UNDECIDED"),
    ],
)
def test_the_exit_code_of_a_comparison(tmp_path: Path, after: list, exit_code: int, headline: str) -> None:
    before = jobs(seed=1, windows=[step.window for step in after[0].steps])
    for name, measured in (("before", before), ("after", after)):
        save_baseline(tmp_path / name, baseline(name, jobs=tuple(measured)), "", {})
    done = supertuner("compare", "before", "after", "--dir", tmp_path)
    assert done.exit_code == exit_code, done.output
    assert done.output.splitlines()[2].startswith(headline)
    document = json.loads((tmp_path / "after" / "against-before.json").read_text())
    assert document["verdict"] in done.output.lower()


def test_the_verdict_depends_on_the_limit(tmp_path: Path) -> None:
    for name, step_s in (("before", 0.1), ("after", 0.115)):
        save_baseline(tmp_path / name, baseline(name, jobs=tuple(jobs(seed=len(name), step_s=step_s))), "", {})
    assert supertuner("compare", "before", "after", "--dir", tmp_path).exit_code == 1
    assert supertuner("compare", "before", "after", "--dir", tmp_path, "--limit", "30").exit_code == 0


def test_baselines_are_listed_with_their_figures(tmp_path: Path) -> None:
    assert supertuner("ls", "--dir", tmp_path).output == f"no baseline in {tmp_path}\n"
    for name in ("before", "after"):
        save_baseline(tmp_path / name, baseline(name), "", {})
    lines = supertuner("ls", "--dir", tmp_path).output.splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["after", "before"]
    assert "3 × 100" in lines[2] and "500 MiB" in lines[2] and "at 0123456789" in lines[2]


def test_a_launcher_with_several_processes_is_refused() -> None:
    with pytest.raises(OptionError, match="without torchrun"):
        capturing.require_single_process(
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "here",
                "MASTER_PORT": "1",
            }
        )


def test_old_code_runs_only_if_it_is_available_here() -> None:
    head = code.resolve_commit("HEAD")

    def old_code(commit: str | None, **options: bool) -> tuple[bool, str]:
        """(whether the old code runs, the reason)."""
        command, reason = checking._old_code(baseline(commit=commit), ComparisonOptions(**options), {})
        return command is not None, reason

    assert old_code(None)[0] is False and "installed package" in old_code(None)[1]
    assert old_code("f" * 40)[0] is False
    if head is not None:
        assert "uncommitted" in old_code(head + "+")[1]
        earlier = code.resolve_commit("HEAD~1")
        if earlier is not None:
            assert old_code(earlier)[0] is True and old_code(earlier, stored=True)[0] is False


@pytest.mark.requires(code.resolve_commit("HEAD") is not None, reason="the package is not in a git checkout")
def test_another_revision_is_exported_and_not_checked_out() -> None:
    with code.other_code("HEAD", {"PYTHONPATH": "/mine"}) as command:
        assert command.code_path is not None and (command.code_path / "supertuner/tools/baseline/job.py").is_file()
        assert command.environ["PYTHONPATH"] == f"{command.code_path}:/mine"
        assert list(command.code_path.rglob("_bulk_io*.so")) or not list(code.PACKAGE_DIR.rglob("_bulk_io*.so"))
        folder = command.code_path
    assert not folder.exists()


@pytest.mark.parametrize("name", ["no-such-revision", "--help", ""])
def test_a_name_that_is_no_code_is_refused(name: str) -> None:
    with pytest.raises(BaselineError, match="not a folder with a supertuner"), code.other_code(name, {}):
        pass


FIRST_COMMIT = code._git_output("rev-list", "--max-parents=0", "HEAD").splitlines()[:1]


@pytest.mark.requires(
    FIRST_COMMIT and not code._git_output("ls-tree", FIRST_COMMIT[0], "setup.py"),
    reason="no git checkout whose first commit lacks the package",
)
def test_a_revision_without_the_package_is_refused() -> None:
    with pytest.raises(BaselineError, match=r"cannot export .*; name a later"), code.other_code(FIRST_COMMIT[0], {}):
        pass


def test_ratios_are_judged_by_ratios_and_contain_no_times(tmp_path: Path) -> None:
    def peer_ratios(step: float, losses: tuple[float, ...] = (1.0, 0.9, 0.8)) -> ratios.PeerRatios:
        steps = RatioInterval(step, step - 0.01, step + 0.01)
        figures = {"step": steps, "time per sample": steps, "start": RatioInterval(0.0, -1.0, 1.0)}
        return ratios.PeerRatios("2026-01-31T09:30:00+00:00", 3, figures, losses, {"torch": "2.13"}, 5, "in turns")

    file = tmp_path / ratios.RATIOS_FILE
    ratios.save_ratios(file, peer_ratios(0.08))
    stored = ratios.load_ratios(file)
    assert stored.figures["step"].middle == pytest.approx(0.08) and stored.losses == (1.0, 0.9, 0.8)
    assert not [name for name in json.loads(file.read_text()) if "second" in name or name.endswith("_s")]
    assert ratios.compare_ratios(stored, peer_ratios(0.09), 0.05).verdict is RegressionVerdict.SAME
    assert ratios.compare_ratios(stored, peer_ratios(0.20), 0.05).verdict is RegressionVerdict.WORSE
    assert ratios.compare_ratios(stored, peer_ratios(0.08, (1.0, 0.7, 0.6)), 0.05).losses_differ
    file.write_text("{}")
    with pytest.raises(BaselineError, match="capture it again"):
        ratios.load_ratios(file)
