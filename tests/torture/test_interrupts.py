"""Runs are interrupted at a hundred random moments of each place, and resumed after each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.interrupted_runs import PLACES, RandomInterrupts, place_seconds
from tests.train.runs import TrainingForkServer

TRIALS = 100
RESUMING_S = 0.05
"""A run from scratch, which is measured, has no checkpoint to find."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TrainingForkServer]:
    made = TrainingForkServer(folder / "log", "tests.train.interrupted_runs")
    yield made
    made.close()


@pytest.fixture(scope="module")
def usual_s(server: TrainingForkServer, folder: Path) -> dict[str, float]:
    return place_seconds(server, folder, "whole") | {"resuming": RESUMING_S}


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_interrupted_at_random_moments_stops_and_resumes_with_the_same_bits(
    place: str, server: TrainingForkServer, folder: Path, usual_s: dict[str, float]
) -> None:
    interrupts = RandomInterrupts(server, folder, place, usual_s[place])
    rng = random.Random(place)
    outcomes = [interrupts.trial(rng) for _ in range(TRIALS)]
    assert sum(outcomes) > TRIALS / 2, "most signals came after the end of the run"
