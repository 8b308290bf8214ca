"""A run that is killed at random moments and resumed until it is finished; shared by the suite and `make torture`."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tests.train.runs import TrainingForkServer, artefacts, config


def killed_run(parent: TrainingForkServer, folder: Path, name: str, kills: int, seed: int, usual_s: float) -> int:
    """Start the run repeatedly, killing it at a random moment, at least `kills` times, then let it finish.

    Whenever it finishes before all kills are used up, it restarts from scratch, caches included. Returns the number of
    starts.
    """
    rng, file, done, starts = random.Random(seed), config(folder, name), 0, 0
    while done < kills:
        starts += 1
        # Half of the kills come early, during staging, encoding and loading of checkpoints.
        longest = rng.choice((usual_s * 0.3, usual_s * 1.1))
        code = parent.kill_after(file, rng.uniform(0, longest))
        assert code in (0, -9), f"the run failed by itself with exit code {code}"
        done += code == -9
        if code == 0 and done < kills:
            check_same(folder, name)
            forget(folder, name)
    assert parent.train(file) == 0
    return starts


def check_same(folder: Path, name: str) -> None:
    """The run's files equal those of the run that was not killed."""
    expected, found = artefacts(folder / "whole" / "run"), artefacts(folder / name / "run")
    assert sorted(found) == sorted(expected)
    different = [file for file in expected if found[file] != expected[file]]
    assert different == [], f"differ after kills: {different}"


def forget(folder: Path, name: str) -> None:
    """Remove the run's folder and its caches: the next start begins from scratch."""
    shutil.rmtree(folder / name)
    shutil.rmtree(folder / f"cache-{name}", ignore_errors=True)


def usual_seconds(parent: TrainingForkServer, folder: Path) -> float:
    """Seconds that an undisturbed run takes; it stays as `whole`, to compare with."""
    begun = time.perf_counter()
    assert parent.train(config(folder, "whole")) == 0
    return time.perf_counter() - begun
