"""Runs every bench file, each in a process of its own, and closes with one table of ratio, limit and met.

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
    """The child's side: run one bench and leave its rows where the parent looks."""
    module = importlib.import_module(f"benchmarks.bench_{name}")
    rows: list[ClaimRow] = module.rows()
    report(rows, title=name)
    rows_file.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


def run_apart(name: str) -> list[ClaimRow]:
    """The rows of one bench; a bench that dies is a missed claim, and the others still run."""
    say(f"\n── {name} " + "─" * max(4, 76 - len(name)))
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder) / "rows.json"
        done = subprocess.run([sys.executable, str(HERE / "run.py"), "--one", name, str(rows_file)], check=False)
        if done.returncode != 0 or not rows_file.exists():
            return [ClaimRow(f"{name} ran to its end", 0.0, 1.0, False, note=f"exit code {done.returncode}")]
        return [ClaimRow(**fields) for fields in json.loads(rows_file.read_text())]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        run_one(arguments[1], Path(arguments[2]))
        return 0
    known = bench_names()
    unknown = [name for name in arguments if name not in known]
    if unknown:
        say(f"no bench called {', '.join(unknown)}; there are: {', '.join(known)}")
        return 2
    # Threads are a subject of their own in these benches; libraries must not add theirs in between.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [row for name in arguments or known for row in run_apart(name)]
    return report(rows, title="all claims")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
