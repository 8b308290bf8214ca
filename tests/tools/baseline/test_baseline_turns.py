"""Measured processes: they take turns, are ended with us, and what they do while others run is in no figure."""

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
from tests.tools.baseline.baselining import MIB, job

# A process that computes nothing: steps that sleep, and a log of when each one was.
WORKER = """
import sys, time
from pathlib import Path
from supertuner.tools.baseline.record import MeasuredJob, read_request, write_job
from supertuner.tools.baseline.recorder import MeasurementRecorder

order = read_request(Path(sys.argv[-1]))
steps, sleep_s = int(sys.argv[1]), float(sys.argv[2])
recorder = MeasurementRecorder(order.begun, order.turn_steps)
held = bytearray(b"x" * (40 << 20))
spans = []
recorder.begin_training(time.monotonic())
for at in range(steps):
    begun = time.monotonic()
    time.sleep(sleep_s)
    spans.append((begun, time.monotonic()))
    recorder.record_step(window=4, expert="model", loss=1.0, seconds=spans[-1][1] - begun)
Path(order.out, "spans").write_text(repr(spans))
write_job(Path(order.out), MeasuredJob(tuple(recorder.steps), recorder.startup_times(), {}, {}, (), "", {}, "", 1.0))
"""


def worker(steps: int = 12, sleep_s: float = 0.002, title: str = "a worker") -> JobCommand:
    return JobCommand(title, (sys.executable, "-c", WORKER, str(steps), str(sleep_s)), dict(os.environ))


def gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_two_processes_never_run_a_step_at_the_same_time(tmp_path: Path) -> None:
    orders = [MeasurementRequest(out=str(tmp_path / name), begun=0.0) for name in "ab"]
    jobs = run_jobs_in_turns([worker(), worker()], orders, turn_steps=4)
    assert [len(one.steps) for one in jobs] == [12, 12]
    a, b = (eval((tmp_path / name / "spans").read_text()) for name in "ab")
    assert all(end <= begin or other <= first for first, end in a for begin, other in b)
    both = sorted([(begin, "a") for begin, _ in a] + [(begin, "b") for begin, _ in b])
    order = "".join(name for _, name in both)
    assert order == "aaaabbbb" + "bbbbaaaa" + "aaaabbbb"


def test_a_process_alone_runs_through_and_its_memory_is_watched_from_outside(tmp_path: Path) -> None:
    found = run_job(
        worker(steps=10, sleep_s=0.05), MeasurementRequest(out=str(tmp_path / "a"), begun=0.0, turn_steps=3)
    )
    assert len(found.steps) == 10 and found.peaks["process.anonymous"] > 40 * MIB
    assert found.start.began_s > 0 and found.start.first_step_s > found.start.began_s


def test_what_a_failed_process_said_is_told_and_its_neighbour_is_ended(tmp_path: Path) -> None:
    failing = JobCommand("the new code", (sys.executable, "-c", "raise SystemExit('no such model')"), dict(os.environ))
    orders = [MeasurementRequest(out=str(tmp_path / name), begun=0.0) for name in "ab"]
    with pytest.raises(BaselineError, match=r"(?s)the new code ended with exit code 1.*no such model"):
        run_jobs_in_turns([worker(), failing], orders, turn_steps=4)
    assert not [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in path.read_text(errors="replace")
    ]


def test_a_peer_that_leaves_nothing_is_told_what_it_is_to_leave(tmp_path: Path) -> None:
    silent = JobCommand("my_loop.py", (sys.executable, "-c", ""), dict(os.environ))
    with pytest.raises(BaselineError, match=r"my_loop.py ended without an error and left no job.json.*quickstart_peer"):
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
def test_nobody_is_left_behind_by_a_kill_that_we_cannot_see(tmp_path: Path, turn_steps: int) -> None:
    """Stopped for another one's turn, or running alone: whose measurer is killed ends too."""
    script = (
        "import sys, time; from pathlib import Path; from tests.tools.baseline.test_baseline_turns import worker\n"
        "from supertuner.tools.baseline.record import MeasurementRequest; from supertuner.tools.baseline.measured_process import MeasuredProcess\n"
        "out, turn = Path(sys.argv[1]), int(sys.argv[2])\n"
        "with MeasuredProcess(worker(steps=100_000, sleep_s=0.001), MeasurementRequest(str(out / 'a'), 0.0, turn_steps=turn)) as running:\n"
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
    while not gone(pid):  # the test's own limit ends this
        time.sleep(0.01)


def test_sigterm_leaves_through_everything_that_must_be_put_away() -> None:
    left = []
    with pytest.raises(SystemExit) as ended, exit_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            left.append("put away")
    assert ended.value.code == 143 and left == ["put away"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_time_in_the_recorder_and_in_others_turns_is_in_no_figure() -> None:
    now = [100.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    recorder = MeasurementRecorder(
        90.0, 2, clock=lambda: now[0], stop=lambda: pass_time(1000), after_step=lambda: pass_time(50)
    )

    def step(seconds: float, between: float) -> None:
        pass_time(seconds + between)
        figures = dict(step=1, samples=4, samples_in_window=4, loss=0.5, grad_norm=1.0, rate=1e-4, expert="model")
        recorder.emit(training.train_step_event(**figures, seconds=seconds, waited_s=0.1))

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
def test_a_loss_that_is_no_number_is_none_whoever_gives_it(tmp_path: Path, loss: float | None) -> None:
    recorder = MeasurementRecorder(0.0)
    recorder.record_step(window=4, expert="model", loss=loss, seconds=1.0)
    write_job(tmp_path, replace(job(), steps=tuple(recorder.steps)))
    assert read_job(tmp_path).steps[0].loss is None


def test_peaks_come_from_the_runs_own_telemetry_and_encoding_makes_a_start_cold() -> None:
    recorder = MeasurementRecorder(0.0)
    for reserved in (5, 9, 7):
        recorder.emit(
            MeasurementEvent("memory", {"step": 1, "torch.reserved_peak_bytes": reserved, "hints.applied": 3})
        )
    recorder.emit(MeasurementEvent("cache.text", {"entries": 4, "made": 4}))
    assert recorder.peaks.bytes_by_kind == {"gpu.reserved": 9} and recorder.cold


def test_rounds_go_on_while_the_noise_does_not_let_tell_and_change_who_is_first(tmp_path: Path) -> None:
    asked: list[int] = []

    def undecided(pairs: JobPairs) -> bool:
        asked.append(len(pairs.new))
        return len(pairs.new) < 4

    sides = [
        ComparisonSide(worker(6, title=name), BaselineScenario(tmp_path, (), 6, tmp_path / "runs", name))
        for name in ("old", "new")
    ]
    found = run_rounds(*sides, tmp_path, ComparisonOptions(rounds=2, max_rounds=9), 3, undecided, NullSink())
    assert asked == [2, 4] and (len(found.old), len(found.new)) == (4, 4)
    first = [min(eval((tmp_path / f"{side}-{at}" / "spans").read_text())) for at in (1, 2) for side in ("old", "new")]
    assert first[0] < first[1] and first[3] < first[2]


def test_a_slower_process_is_found_worse_by_real_clocks(tmp_path: Path) -> None:
    """Steps of 10 and of 20 ms: no noise of a machine hides that in turns of 5."""
    sides = [
        ComparisonSide(worker(20, sleep_s, title=name), BaselineScenario(tmp_path, (), 20, tmp_path / "runs", name))
        for name, sleep_s in (("old", 0.01), ("new", 0.02))
    ]
    pairs = run_rounds(*sides, tmp_path, ComparisonOptions(rounds=2, max_rounds=2), 5, lambda _: False, NullSink())
    found = judge_jobs(pairs.old, pairs.new, ComparisonTerms(turn_steps=5), precision="fp32", method="")
    assert {one.name: one.verdict for one in found.figures}["step"] is not RegressionVerdict.SAME
    assert next(one.interval.ratio for one in found.figures if one.name == "step") > 1.3


def test_turns_are_short_for_quick_steps_and_single_steps_for_slow_ones() -> None:
    assert choose_turn_steps([job(step_s=0.03, noise=0)], 1000) == 10
    assert choose_turn_steps([job(step_s=0.03, noise=0)], 50) == 5
    assert choose_turn_steps([job(step_s=20.0, noise=0)], 1000) == 1


def test_two_that_do_not_fit_into_memory_together_run_one_after_the_other() -> None:
    class Small:
        def memory_available(self) -> int:
            return 1000 * MIB

    host, peak = Small(), {"process.resident": 300 * MIB}
    assert both_fit([peak, peak], host, None)  # type: ignore[arg-type]
    assert not both_fit([{"process.resident": 500 * MIB}] * 2, host, None)  # type: ignore[arg-type]
    on_gpu = peak | {"gpu.reserved": 40 * MIB}
    assert both_fit([on_gpu, on_gpu], host, 96 * MIB)  # type: ignore[arg-type]
    assert not both_fit([on_gpu, on_gpu], host, 80 * MIB)  # type: ignore[arg-type]
    assert not both_fit([on_gpu, on_gpu], host, None)  # type: ignore[arg-type]


def test_a_process_that_has_just_ended_has_no_memory() -> None:
    assert read_process_memory(Path("/proc/0/status")) == {}
    assert read_process_memory(Path("/proc/self/status"))["process.anonymous"] > 0
