"""Runs every benchmark file in a separate process, and prints one table of all claims at the end.

`python benchmarks/run.py [name …]` runs only the named ones (`gather` for bench_gather.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # so that `benchmarks` is a package when this file is run as a script

from benchmarks.harness import ClaimRow, report, say  # noqa: E402


def bench_names() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def run_one(name: str, rows_file: Path) -> None:
    """In the child process: run one benchmark and write its rows to `rows_file`."""
    module = importlib.import_module(f"benchmarks.bench_{name}")
    rows: list[ClaimRow] = module.rows()
    report(rows, title=name)
    rows_file.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


def run_apart(name: str) -> list[ClaimRow]:
    """The rows of one benchmark, run in a child process; a benchmark that fails becomes a missed claim."""
    say(f"\n── {name} " + "─" * max(4, 76 - len(name)))
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder) / "rows.json"
        done = subprocess.run([sys.executable, str(HERE / "run.py"), "--one", name, str(rows_file)], check=False)
        if done.returncode != 0 or not rows_file.exists():
            return [ClaimRow(f"{name} finished", 0.0, 1.0, False, note=f"exit code {done.returncode}")]
        return [ClaimRow(**fields) for fields in json.loads(rows_file.read_text())]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        run_one(arguments[1], Path(arguments[2]))
        return 0
    known = bench_names()
    unknown = [name for name in arguments if name not in known]
    if unknown:
        say(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(known)}")
        return 2
    # The benchmarks set numbers of threads explicitly; libraries must not add their own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [row for name in arguments or known for row in run_apart(name)]
    return report(rows, title="all claims")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
