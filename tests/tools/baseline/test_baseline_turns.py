"""Measured processes take turns, do not outlive the measuring process, and count only their own time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from supertuner.core.errors import BaselineError
from supertuner.core.events import MeasurementEvent, NoteEvent, NullSink
from supertuner.sinks import training_events as training
from supertuner.tools.baseline.baseline_capture import BaselineScenario
from supertuner.tools.baseline.measured_process import (
    JobCommand,
    MeasuredProcess,
    exit_on_sigterm,
    read_process_memory,
    run_job,
    run_jobs_in_turns,
)
from supertuner.tools.baseline.record import MeasurementRequest, read_job, write_job
from supertuner.tools.baseline.recorder import MeasurementRecorder
from supertuner.tools.baseline.regression import ComparisonTerms, RegressionVerdict, judge_jobs
from supertuner.tools.baseline.rounds import (
    ComparisonOptions,
    ComparisonSide,
    JobPairs,
    both_fit,
    choose_turn_steps,
    run_rounds,
)
from tests.tools.baseline.simulated_jobs import MIB, job

# A process whose steps only sleep; it logs the begin and end of each.
WORKER = """
import sys, time
from pathlib import Path
from supertuner.tools.baseline.record import MeasuredJob, read_request, write_job
from supertuner.tools.baseline.recorder import MeasurementRecorder

request = read_request(Path(sys.argv[-1]))
steps, sleep_s = int(sys.argv[1]), float(sys.argv[2])
recorder = MeasurementRecorder(request.begun, request.turn_steps)
memory = bytearray(b"x" * (40 << 20))
spans = []
recorder.begin_training(time.monotonic())
for at in range(steps):
    begun = time.monotonic()
    time.sleep(sleep_s)
    spans.append((begun, time.monotonic()))
    recorder.record_step(window=4, expert="model", loss=1.0, seconds=spans[-1][1] - begun)
Path(request.out, "spans").write_text(repr(spans))
write_job(Path(request.out), MeasuredJob(tuple(recorder.steps), recorder.startup_times(), {}, {}, (), "", {}, "", 1.0))
"""


def worker(steps: int = 12, sleep_s: float = 0.002, title: str = "a worker") -> JobCommand:
    return JobCommand(title, (sys.executable, "-c", WORKER, str(steps), str(sleep_s)), dict(os.environ))


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_two_processes_never_run_a_step_at_the_same_time(tmp_path: Path) -> None:
    requests = [MeasurementRequest(out=str(tmp_path / name), begun=0.0) for name in "ab"]
    jobs = run_jobs_in_turns([worker(), worker()], requests, turn_steps=4)
    assert [len(one.steps) for one in jobs] == [12, 12]
    a, b = (eval((tmp_path / name / "spans").read_text()) for name in "ab")
    assert all(end <= begin or other <= first for first, end in a for begin, other in b)
    both = sorted([(begin, "a") for begin, _ in a] + [(begin, "b") for begin, _ in b])
    order = "".join(name for _, name in both)
    assert order == "aaaabbbb" + "bbbbaaaa" + "aaaabbbb"


def test_a_process_alone_runs_without_turns_and_its_memory_is_measured_from_outside(tmp_path: Path) -> None:
    found = run_job(
        worker(steps=10, sleep_s=0.05), MeasurementRequest(out=str(tmp_path / "a"), begun=0.0, turn_steps=3)
    )
    assert len(found.steps) == 10 and found.peaks["process.anonymous"] > 40 * MIB
    assert found.start.began_s > 0 and found.start.first_step_s > found.start.began_s


def test_the_output_of_a_failed_process_is_reported_and_the_other_process_is_killed(tmp_path: Path) -> None:
    failing = JobCommand("the new code", (sys.executable, "-c", "raise SystemExit('no such model')"), dict(os.environ))
    requests = [MeasurementRequest(out=str(tmp_path / name), begun=0.0) for name in "ab"]
    with pytest.raises(BaselineError, match=r"(?s)the new code ended with exit code 1.*no such model"):
        run_jobs_in_turns([worker(), failing], requests, turn_steps=4)
    assert not [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in path.read_text(errors="replace")
    ]


def test_a_peer_without_a_result_is_an_error_that_names_the_expected_file(tmp_path: Path) -> None:
    silent = JobCommand("my_loop.py", (sys.executable, "-c", ""), dict(os.environ))
    with pytest.raises(BaselineError, match=r"my_loop.py ended without an error but wrote no job.json.*quickstart"):
        run_job(silent, MeasurementRequest(out=str(tmp_path / "a"), begun=0.0))


def test_a_process_that_waits_for_its_turn_is_killed_when_we_leave(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        MeasuredProcess(worker(), MeasurementRequest(str(tmp_path / "a"), 0.0, turn_steps=2)) as running,
    ):
        assert running.wait_for_turn_end()
        pid = running._process.pid
        raise KeyboardInterrupt
    assert gone(pid)


@pytest.mark.parametrize("turn_steps", [2, 0])
def test_a_measured_process_ends_when_the_measuring_process_is_killed(tmp_path: Path, turn_steps: int) -> None:
    """Both while it is stopped for the other's turn and while it runs alone."""
    script = (
        "import sys, time; from pathlib import Path; from tests.tools.baseline.test_baseline_turns import worker\n"
        "from supertuner.tools.baseline.record import MeasurementRequest\n"
        "from supertuner.tools.baseline.measured_process import MeasuredProcess\n"
        "out, turn = Path(sys.argv[1]), int(sys.argv[2])\n"
        "request = MeasurementRequest(str(out / 'a'), 0.0, turn_steps=turn)\n"
        "with MeasuredProcess(worker(steps=100_000, sleep_s=0.001), request) as running:\n"
        "    running.wait_for_turn_end() if turn else time.sleep(1)\n"
        "    (out / 'pid').write_text(str(running._process.pid))\n"
        "    sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path), str(turn_steps)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as parent:
        try:
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                assert parent.poll() is None
                time.sleep(0.01)
            pid = int((tmp_path / "pid").read_text())
        finally:
            parent.kill()
    while not gone(pid):  # the test's timeout ends this loop if it must
        time.sleep(0.01)


def test_sigterm_runs_all_clean_up_code() -> None:
    cleaned_up = []
    with pytest.raises(SystemExit) as ended, exit_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned_up.append(True)
    assert ended.value.code == 143 and cleaned_up
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_time_in_the_recorder_and_in_turns_of_the_other_process_is_not_counted() -> None:
    now = [100.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    recorder = MeasurementRecorder(90.0, 2, clock=lambda: now[0], stop=lambda: pass_time(1000))
    recorder.after_step = lambda: pass_time(50)

    def step(seconds: float, between: float) -> None:
        pass_time(seconds + between)
        record = training.StepRecord(1, 4, 4, "model", 0.5, 1.0, 1e-4)
        recorder.emit(training.train_step_event(record, seconds=seconds, waited_s=0.1))

    recorder.emit(MeasurementEvent("cache.latents", {"entries": 4, "made": 0}))
    recorder.emit(training.train_begin_event(step=0, steps=4, samples=0, samples_total=16))
    for between in (0.25, 0.5, 0.75):
        step(2.0, between)
    recorder.emit(NoteEvent("checkpoint", "saved"))
    assert [one.seconds for one in recorder.steps] == [2.0, 2.0, 2.0]
    assert [one.wall_s for one in recorder.steps] == [2.25, 2.5, 2.75]
    assert (recorder.startup_times().began_s, recorder.startup_times().first_step_s, recorder.startup_times().cold) == (
        10.0,
        12.0,
        False,
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), None])
def test_a_loss_that_is_not_finite_is_recorded_as_none(tmp_path: Path, loss: float | None) -> None:
    recorder = MeasurementRecorder(0.0)
    recorder.record_step(window=4, expert="model", loss=loss, seconds=1.0)
    write_job(tmp_path, replace(job(), steps=tuple(recorder.steps)))
    assert read_job(tmp_path).steps[0].loss is None


def test_peaks_come_from_the_telemetry_of_the_run_and_encoding_makes_a_start_cold() -> None:
    recorder = MeasurementRecorder(0.0)
    for reserved in (5, 9, 7):
        recorder.emit(
            MeasurementEvent("memory", {"step": 1, "torch.reserved_peak_bytes": reserved, "hints.applied": 3})
        )
    recorder.emit(MeasurementEvent("cache.text", {"entries": 4, "made": 4}))
    assert recorder.peaks.bytes_by_kind == {"gpu.reserved": 9} and recorder.cold


def test_rounds_continue_while_undecided_and_alternate_which_side_is_first(tmp_path: Path) -> None:
    judged_after: list[int] = []

    def undecided(pairs: JobPairs) -> bool:
        judged_after.append(len(pairs.new))
        return len(pairs.new) < 4

    sides = [
        ComparisonSide(worker(6, title=name), BaselineScenario(tmp_path, (), 6, tmp_path / "runs", name))
        for name in ("old", "new")
    ]
    found = run_rounds(*sides, tmp_path, ComparisonOptions(rounds=2, max_rounds=9), 3, undecided, NullSink())
    assert judged_after == [2, 4] and (len(found.old), len(found.new)) == (4, 4)
    first = [min(eval((tmp_path / f"{side}-{at}" / "spans").read_text())) for at in (1, 2) for side in ("old", "new")]
    assert first[0] < first[1] and first[3] < first[2]


def test_a_slower_process_is_judged_slower_by_real_clocks(tmp_path: Path) -> None:
    """Steps of 10 and 20 ms, in turns of 5 steps: the difference is larger than any machine noise."""
    sides = [
        ComparisonSide(worker(20, sleep_s, title=name), BaselineScenario(tmp_path, (), 20, tmp_path / "runs", name))
        for name, sleep_s in (("old", 0.01), ("new", 0.02))
    ]
    pairs = run_rounds(*sides, tmp_path, ComparisonOptions(rounds=2, max_rounds=2), 5, lambda _: False, NullSink())
    found = judge_jobs(pairs.old, pairs.new, ComparisonTerms(turn_steps=5), precision="fp32", method="")
    assert {one.name: one.verdict for one in found.figures}["step"] is not RegressionVerdict.SAME
    assert next(one.interval.ratio for one in found.figures if one.name == "step") > 1.3


def test_a_turn_has_several_quick_steps_or_one_slow_step() -> None:
    assert choose_turn_steps([job(step_s=0.03, noise=0)], 1000) == 10
    assert choose_turn_steps([job(step_s=0.03, noise=0)], 50) == 5
    assert choose_turn_steps([job(step_s=20.0, noise=0)], 1000) == 1


def test_two_sides_fit_together_only_if_their_peaks_fit_into_memory() -> None:
    class SmallHost:
        def memory_available(self) -> int:
            return 1000 * MIB

    host, peak = SmallHost(), {"process.resident": 300 * MIB}
    assert both_fit([peak, peak], host, None)  # type: ignore[arg-type]
    assert not both_fit([{"process.resident": 500 * MIB}] * 2, host, None)  # type: ignore[arg-type]
    on_gpu = peak | {"gpu.reserved": 40 * MIB}
    assert both_fit([on_gpu, on_gpu], host, 96 * MIB)  # type: ignore[arg-type]
    assert not both_fit([on_gpu, on_gpu], host, 80 * MIB)  # type: ignore[arg-type]
    assert not both_fit([on_gpu, on_gpu], host, None)  # type: ignore[arg-type]


def test_a_process_that_has_ended_has_no_memory() -> None:
    assert read_process_memory(Path("/proc/0/status")) == {}
    assert read_process_memory(Path("/proc/self/status"))["process.anonymous"] > 0
