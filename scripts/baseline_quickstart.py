"""`make baseline-check`: the quickstart beside a plain loop of diffusers and peft, by the ratios kept in baseline/.

Ratios carry over between machines where times do not. `--capture` writes them anew, after a change that is meant.
"""

from __future__ import annotations

import sys
from pathlib import Path

from supertuner.cli import main
from supertuner.tools.quickstart import prepare_data

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "baseline"
STEPS = 120
SETS = (
    "gh200_optimizations.batch_rampup_steps=40",
    "validation.at_start=false",
    "validation.at_end=false",
    f"arena.home={WORK / 'arenas'}",
)
"""The ramp is short, so that most steps are of one kind; samples are no part of a step."""


def arguments(capture: bool, more: list[str]) -> list[str]:
    config = prepare_data(WORK)
    peer = ROOT / "benchmarks" / "quickstart_peer.py"
    sets = [word for one in SETS for word in ("--set", one)]
    what = ["capture", "--replace", "--repeats", "5"] if capture else ["check"]
    where = ["--dir", str(ROOT / "baseline"), "--peer", str(peer), "--steps", str(STEPS)]
    return ["baseline", *what, "quickstart", str(config), *where, *sets, *more]


if __name__ == "__main__":
    given = sys.argv[1:]
    main(arguments("--capture" in given, [word for word in given if word != "--capture"]))
