"""`make baseline-check`: compares the quickstart with a plain loop of diffusers and peft, by the ratios in baseline/.

Ratios are comparable between machines; times are not. `--capture` measures and stores them again, after an intended
change.
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
"""A short ramp, so that most steps have the same size; no validation, because it is not part of a step."""


def arguments(capture: bool, more: list[str]) -> list[str]:
    config = prepare_data(WORK)
    peer = ROOT / "benchmarks" / "quickstart_peer.py"
    sets = [word for setting in SETS for word in ("--set", setting)]
    command = ["capture", "--replace", "--repeats", "5"] if capture else ["check"]
    options = ["--dir", str(ROOT / "baseline"), "--peer", str(peer), "--steps", str(STEPS)]
    return ["baseline", *command, "quickstart", str(config), *options, *sets, *more]


if __name__ == "__main__":
    words = sys.argv[1:]
    main(arguments("--capture" in words, [word for word in words if word != "--capture"]))
