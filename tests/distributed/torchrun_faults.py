"""Starts torchrun with a rank that is killed or stopped at a chosen place, and checks what is reported about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.train.runs import ROOT

TIMEOUT_S = 8.0
"""`parallel.timeout_s` of these runs: half of it passes before a stopped rank is reported."""
RAW_ERRORS = ("Traceback (most recent call last)", "gloo", "terminate called", "Exception ignored")
"""What no rank may print because another one is gone."""


@dataclass(frozen=True, slots=True)
class TorchrunOutcome:
    """What is left of a job of which one rank was killed or stopped."""

    exit_code: int
    victim_pid: int
    launcher_log: str
    rank_logs: list[str]
    """Standard output and error of each rank."""

    def __str__(self) -> str:
        ranks = "".join(f"\n── rank {rank} ──\n{text}" for rank, text in enumerate(self.rank_logs))
        return f"exit code {self.exit_code}, victim {self.victim_pid}{ranks}\n── torchrun ──\n{self.launcher_log}"


def run_with_fault(folder: Path, ranks: int, place: str, rank: int, number: int, *arguments: str) -> TorchrunOutcome:
    """Train on `ranks` ranks under torchrun; `rank` sends itself signal `number` at `place`.

    `arguments` are those of `supertuner`; without any, a model of one number is trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    marker, logs = folder / "victim", folder / "logs"
    command = (
        *(str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)),
        *("--redirects", "3", "--log-dir", str(logs), "-m", "tests.distributed.fault_points"),
        *(str(marker), place, str(rank), str(int(number)), str(TIMEOUT_S), *arguments),
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SUPERTUNER_")}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    launcher = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = launcher.communicate()
    finally:
        for pid in (*_children(launcher.pid), launcher.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    files = [sorted(logs.glob(f"*/attempt_0/{number}/std*.log")) for number in range(ranks)]
    return TorchrunOutcome(
        launcher.returncode,
        int(marker.read_text()) if marker.exists() else 0,
        output.decode(errors="replace"),
        ["".join(file.read_text(errors="replace") for file in pair) for pair in files],
    )


def check_report(outcome: TorchrunOutcome, rank: int, number: int) -> None:
    """One survivor names the rank and what happened to it, and nothing else is printed about it."""
    assert outcome.victim_pid, f"the fault did not happen\n{outcome}"
    assert outcome.exit_code == 1, outcome
    happened = "is gone: it was killed while" if number == signal.SIGKILL else r"is stopped \(SIGSTOP, or a debugger\)"
    report = re.compile(rf"^rank {rank} \(\S+, pid {outcome.victim_pid}\) {happened}.*; rank \d+ ends with it", re.M)
    survivors = [log for other, log in enumerate(outcome.rank_logs) if other != rank]
    assert sum(len(report.findall(log)) for log in survivors) == 1, outcome
    assert sum(log.count("ends with it") for log in survivors) == 1, outcome
    assert not [raw for raw in RAW_ERRORS for log in survivors if raw in log], outcome
    summary, _, root_cause = outcome.launcher_log.partition("Root Cause (first observed failure)")
    assert set(re.findall(r"exitcode +: (-?\d+)", summary)) <= {"1"}, outcome
    stopped = number == signal.SIGSTOP
    assert f"rank      : {rank} " in root_cause and ("is stopped (SIGSTOP" in root_cause) == stopped, outcome


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []
