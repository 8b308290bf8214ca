"""Time from the command to the first optimizer step with warm caches, minus the imports; and time of light commands."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import ClaimRow, FigureSpread, at_most, in_memory_folder, report, say
from benchmarks.runs import write_config
from supertuner.runs.loss_files import read_losses

ROUNDS = 5
LIMIT_S = 3.0
IMPORTS = """
import diffusers, peft, transformers, tensorboard.summary.writer.event_file_writer
import supertuner.cli, supertuner.models.families.wan22.family, supertuner.api.training, supertuner.runs.loss_curve
import supertuner.train.export.export, supertuner.train.loop, supertuner.train.setup
"""
TRAIN = "from supertuner.cli import main; main()"


def importing_s() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - begin


def first_step_s(config: Path, folder: Path, number: int) -> float:
    """Seconds until losses.jsonl has its first line."""
    command = [sys.executable, "-c", TRAIN, "train", str(config), "--set", f"run.name=start-{number}"]
    log = folder / "runs" / f"start-{number}" / "losses.jsonl"
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not read_losses(log):
            time.sleep(0.002)
            assert process.poll() is None or read_losses(log), "the run ended before its first step"
        taken = time.perf_counter() - begin
    assert process.returncode == 0, process.returncode
    return taken


def answered(*arguments: str) -> FigureSpread:
    """Seconds of a whole command, over ROUNDS runs."""
    taken = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", TRAIN, *arguments], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - begin)
    return FigureSpread(sorted(taken)[len(taken) // 2], min(taken), max(taken))


def rows() -> list[ClaimRow]:
    beyond = []
    with in_memory_folder() as folder:
        config = write_config(folder, train={"max_steps": 2})
        first_step_s(config, folder, 0)  # fills the caches and the page cache
        for number in range(1, ROUNDS + 1):
            ours, imports = first_step_s(config, folder, number), importing_s()
            say(f"first step after {ours:.2f} s, the imports alone {imports:.2f} s")
            beyond.append(ours - imports)
        helped, checked = answered("--help"), answered("config", "validate", str(config))
    middle = sorted(beyond)[len(beyond) // 2]
    figure = FigureSpread(middle, min(beyond), max(beyond))
    return [
        at_most(
            "from the command to the first step, beyond importing the same libraries",
            figure,
            LIMIT_S,
            unit="s",
            note="warm caches",
        ),
        at_most("supertuner --help", helped, 0.3, unit="s", note="the whole process"),
        at_most("supertuner config validate", checked, 1.0, unit="s", note="the whole process"),
    ]


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
