"""The tables of docs/benchmarks.md are those of the recorded figures, and figures older than their code are marked."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import figures_page, recorded_figures, run
from benchmarks.harness import FigureSpread, at_most, skipped
from benchmarks.recorded_figures import BENCHMARKS, ROOT, Recording

PAGE = "by hand\n<!-- figures: training -->\nold\n<!-- end -->\nby hand, too\n"


@pytest.fixture
def recording() -> Recording:
    claims = (
        at_most("waiting for data", FigureSpread(4.4, 4.0, 5.5), 0.5, unit="%"),
        skipped("a peer's claim", 1.5, "lmdb is not installed"),
    )
    return Recording("0123456789", "2026-11-18", "", "2 × CPU", {"torch": "2.13"}, 31.0, 0.25, claims)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The code of the benchmark `automagic`, without the rest of the repository."""
    for path in ("benchmarks/bench_automagic.py", "supertuner/optim/automagic/optimizer.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def measured_in(checkout: Path, recording: Recording) -> Recording:
    paths = ("benchmarks/bench_automagic.py", *BENCHMARKS["automagic"].code)
    return replace(recording, code=recorded_figures.code_digest(paths, checkout))


def test_the_page_marks_exactly_the_figures_that_are_older_than_their_code() -> None:
    page = figures_page.PAGE.read_text("utf-8")
    made_again = figures_page.render_page(page, recorded_figures.read_recordings(), run.outdated_names())
    if page != made_again:
        pytest.fail(
            "docs/benchmarks.md does not show the recorded figures, or does not mark those that are older than their "
            "code; run `python benchmarks/run.py --table`",
            pytrace=False,
        )


def test_every_benchmark_is_listed_with_code_that_exists_and_a_section_of_the_page() -> None:
    assert set(BENCHMARKS) == {file.stem.removeprefix("bench_") for file in (ROOT / "benchmarks").glob("bench_*.py")}
    page = figures_page.PAGE.read_text("utf-8")
    for benchmark in BENCHMARKS.values():
        assert all((ROOT / path).exists() for path in benchmark.code)
        assert f"<!-- figures: {benchmark.section} -->" in page


def test_a_change_of_code_makes_a_figure_outdated(checkout: Path, recording: Recording) -> None:
    recording = measured_in(checkout, recording)
    assert not recorded_figures.is_outdated("automagic", recording, checkout)
    code = checkout / "supertuner/optim/automagic/optimizer.py"
    code.write_text(code.read_text().replace("BETA2, CLIP, EPSILON = 0.999", "BETA2, CLIP, EPSILON = 0.99"))
    assert recorded_figures.is_outdated("automagic", recording, checkout)


def test_a_new_file_makes_a_figure_outdated(checkout: Path, recording: Recording) -> None:
    recording = measured_in(checkout, recording)
    (checkout / "supertuner/optim/automagic/new.c").write_text("int x;")
    assert recorded_figures.is_outdated("automagic", recording, checkout)


def test_comments_and_docstrings_do_not_make_a_figure_outdated(checkout: Path, recording: Recording) -> None:
    recording = measured_in(checkout, recording)
    code = checkout / "supertuner/optim/automagic/optimizer.py"
    text = code.read_text()
    assert "There is no\nmomentum." in text
    code.write_text("# a comment\n\n" + text.replace("There is no\nmomentum.", "It has no\nmomentum at all."))
    assert not recorded_figures.is_outdated("automagic", recording, checkout)


def test_a_row_says_the_commit_and_whether_its_code_has_changed(recording: Recording) -> None:
    fresh = figures_page.render_page(PAGE, {"loop": recording}, [])
    assert "| waiting for data | 4.4 % (4 to 5.5) | ≤ 0.5 % | **missed** | `0123456789` (`loop`) |\n" in fresh
    assert "| a peer's claim | | ≥ 1.5 × | not measured: lmdb is not installed | `0123456789` (`loop`) |\n" in fresh
    assert fresh.startswith("by hand\n") and fresh.endswith("by hand, too\n") and "old\n" not in fresh
    marked = figures_page.render_page(PAGE, {"loop": recording}, ["loop"])
    assert "`0123456789` (`loop`), **older than its code** |\n" in marked
    assert figures_page.render_page(marked, {"loop": recording}, []) == fresh


def test_recordings_are_read_as_they_were_written_and_replaced_one_by_one(tmp_path: Path, recording: Recording) -> None:
    file = tmp_path / "figures.json"
    recorded_figures.write_recording("loop", recording, file)
    recorded_figures.write_recording("hints", recording, file)
    recorded_figures.write_recording("loop", replace(recording, commit="9876543210"), file)
    found = recorded_figures.read_recordings(file)
    assert list(found) == ["hints", "loop"] and found["loop"].commit == "9876543210"
    assert found["hints"].claims[0] == recording.claims[0]
    assert math.isnan(found["hints"].claims[1].ratio)
    assert not list(tmp_path.glob("*.tmp"))


def small_repository(folder: Path) -> Path:
    """A repository with two benchmarks, of which the first fails; returns the program that runs them."""
    (folder / "benchmarks").mkdir()
    (folder / "docs").mkdir()
    for name in ("__init__", "harness", "figures_page", "recorded_figures", "run"):
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", folder / "benchmarks")
    with (folder / "benchmarks/recorded_figures.py").open("a") as table:
        table.write('\nBENCHMARKS = {name: Benchmark("training", ()) for name in ("broken", "sound")}\n')
    (folder / "benchmarks/bench_broken.py").write_text("def rows():\n    raise OSError('no disk')\n")
    (folder / "benchmarks/bench_sound.py").write_text(
        "from benchmarks.harness import at_most\n\n\ndef rows():\n    return [at_most('a sound claim', 1.0, 2.0)]\n"
    )
    (folder / "docs/benchmarks.md").write_text(PAGE)
    return folder / "benchmarks/run.py"


def test_a_benchmark_that_fails_does_not_stop_the_others_and_is_run_again_as_outdated(tmp_path: Path) -> None:
    program = small_repository(tmp_path)

    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(program), *arguments], capture_output=True, text=True, check=False)

    first = bench("--record")
    assert first.returncode == 1 and "OSError: no disk" in first.stderr
    assert list(recorded_figures.read_recordings(tmp_path / "benchmarks/figures.json")) == ["sound"]
    assert (
        "| a sound claim | 1 × | ≤ 2 × | met | `unknown` (`sound`) |" in (tmp_path / "docs/benchmarks.md").read_text()
    )
    again = bench("--record", "--outdated")
    assert "── broken" in again.stdout and "── sound" not in again.stdout


def test_a_benchmark_that_hangs_ends_with_everything_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"]
    assert run._run_child(command, limit_s=2.0) is None
    wait_until(lambda: not is_running(int(pid_file.read_text())))


def test_a_run_that_is_stopped_ends_its_benchmark(tmp_path: Path) -> None:
    program, pid_file = small_repository(tmp_path), tmp_path / "pid"
    (tmp_path / "benchmarks/bench_sound.py").write_text(
        "import os, pathlib, time\n\n\ndef rows():\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    )
    running = subprocess.Popen([sys.executable, str(program), "sound"], stdout=subprocess.DEVNULL)
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    running.terminate()
    assert running.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(int(pid_file.read_text())))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A process that ended and was not yet waited for has an empty command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
