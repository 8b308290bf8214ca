"""Runs benchmarks, each in a separate process, prints one table of all claims, and records the figures if asked to.

    python benchmarks/run.py [name …]        run these benchmarks (`gather` for bench_gather.py), or all
    python benchmarks/run.py --record …      also write benchmarks/figures.json and the tables of docs/benchmarks.md
    python benchmarks/run.py --outdated …    only those whose figures are missing or older than their code
    python benchmarks/run.py --table         only write the tables of docs/benchmarks.md

A benchmark that fails does not stop the others, and every recording is written as soon as its benchmark has ended: a
run that was interrupted continues with `--outdated`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # so that `benchmarks` is a package when this file is run as a script

from benchmarks import figures_page, recorded_figures  # noqa: E402
from benchmarks.harness import ClaimRow, report, say  # noqa: E402
from benchmarks.recorded_figures import BENCHMARKS, OtherProgramsMeter, Recording  # noqa: E402

LIMIT_S = 900.0
"""A benchmark that takes longer has failed; the slowest takes about three minutes."""


def run_one(name: str, rows_file: Path) -> None:
    """In the child process: run one benchmark and write its rows to `rows_file`."""
    module = importlib.import_module(f"benchmarks.bench_{name}")
    rows: list[ClaimRow] = module.rows()
    report(rows, title=name)
    rows_file.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


def run_apart(name: str, limit_s: float = LIMIT_S) -> Recording | str:
    """Run one benchmark in a child process; the reason if it failed."""
    say(f"\n── {name} " + "─" * max(4, 76 - len(name)))
    # The code is read before it runs: a change made meanwhile belongs to the next recording.
    code = recorded_figures.code_digest((f"benchmarks/bench_{name}.py", *BENCHMARKS[name].code))
    commit, begin, others = recorded_figures.current_commit(), time.monotonic(), OtherProgramsMeter()
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / "run.py"), "--one", name, str(rows_file)]
        exit_code = _run_child(command, limit_s)
        if exit_code is None:
            return f"not finished after {limit_s:.0f} s"
        if exit_code != 0 or not rows_file.exists():
            return f"exit code {exit_code}"
        claims = tuple(ClaimRow(**fields) for fields in json.loads(rows_file.read_text()))
    return Recording(
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        code=code,
        machine=recorded_figures.machine_text(),
        versions=recorded_figures.package_versions(),
        seconds=round(time.monotonic() - begin, 1),
        other_cpus=others.other_cpus(),
        claims=claims,
    )


def _run_child(command: Sequence[str], limit_s: float) -> int | None:
    """The exit code; None if the child, which is then killed with its own children, took too long."""
    # A process group of its own, so that the ranks that a benchmark starts end with it.
    child = subprocess.Popen(command, start_new_session=True)
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # the group is gone, as it should be
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def outdated_names() -> list[str]:
    """The benchmarks whose recorded figures are older than their code."""
    recordings = recorded_figures.read_recordings()
    return [name for name, one in recordings.items() if recorded_figures.is_outdated(name, one)]


def write_tables() -> None:
    page = figures_page.PAGE.read_text("utf-8")
    recordings = recorded_figures.read_recordings()
    figures_page.PAGE.write_text(figures_page.render_page(page, recordings, outdated_names()), "utf-8")


def run_all(names: Sequence[str], record: bool) -> int:
    """Run the benchmarks and print all their claims. The exit code is 1 if a claim was missed or a benchmark failed."""
    # The benchmarks set numbers of threads explicitly; libraries must not add their own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception, so that the child ends too
    rows: list[ClaimRow] = []
    for name in names:
        result = run_apart(name)
        if isinstance(result, str):
            rows.append(ClaimRow(f"{name} finished", 0.0, 1.0, False, note=result))
            continue
        rows.extend(result.claims)
        if record:
            recorded_figures.write_recording(name, result)
            write_tables()
    return report(rows, title="all claims")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        run_one(arguments[1], Path(arguments[2]))
        return 0
    parser = argparse.ArgumentParser(description="Run benchmarks and print their claims.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--record", action="store_true", help="write benchmarks/figures.json and docs/benchmarks.md")
    parser.add_argument(
        "--outdated", action="store_true", help="only figures that are missing or older than their code"
    )
    parser.add_argument("--table", action="store_true", help="only write the tables of docs/benchmarks.md")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in BENCHMARKS]
    if unknown:
        say(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
        return 2
    if chosen.table:
        write_tables()
        return 0
    names = chosen.names or list(BENCHMARKS)
    if chosen.outdated:
        recorded, outdated = recorded_figures.read_recordings(), outdated_names()
        names = [name for name in names if name not in recorded or name in outdated]
    return run_all(names, chosen.record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
