"""Ranks are killed and stopped at every place of a window and of a run, under torchrun: one survivor names the rank."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fault_points import WINDOW_PLACES
from tests.distributed.runs import a_run
from tests.distributed.torchrun_faults import TIMEOUT_S, check_report, run_with_fault

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
WINDOW_FAULTS = [
    *(
        (place, ranks, number % ranks, sent)
        for number, place in enumerate(WINDOW_PLACES)
        for ranks, sent in product((2, 3, 4), SIGNALS)
    ),
    *((place, 2, (number + 1) % 2, sent) for number, place in enumerate(WINDOW_PLACES) for sent in SIGNALS),
]
"""(place, number of ranks, rank, signal): each place with 2, 3 and 4 ranks, and with 2 ranks for both of them."""
REPLICATED: dict[str, Any] = {}
SHARDED: dict[str, Any] = {"adapter": {"type": "full"}, "parallel": {"strategy": "fsdp", "timeout_s": TIMEOUT_S}}
RUN_FAULTS: list[tuple[str, dict[str, Any], int, int]] = [
    ("while data are staged", REPLICATED, 2, 0),
    ("while samples are encoded", REPLICATED, 3, 0),
    ("while the model is loaded", REPLICATED, 3, 1),
    ("while a batch is read", REPLICATED, 2, 1),
    ("before the loss is logged", REPLICATED, 3, 2),
    ("before a checkpoint is copied", REPLICATED, 2, 0),
    ("while a checkpoint is written", REPLICATED, 3, 0),
    ("in the held-out loss", REPLICATED, 2, 0),
    ("before samples are made", REPLICATED, 2, 0),
    ("before the export", REPLICATED, 2, 0),
    ("before weights are gathered", SHARDED, 2, 1),
    ("before gradients are scattered", SHARDED, 3, 0),
    ("before FSDP's loss", SHARDED, 2, 0),
    ("before FSDP's norm", SHARDED, 2, 1),
    ("while a checkpoint is written", SHARDED, 3, 1),
    ("while a checkpoint is written", SHARDED, 2, 0),
    ("in the held-out loss", SHARDED, 2, 1),
    ("before samples are made", SHARDED, 3, 2),
]
"""(place, settings, number of ranks, rank)."""

UNSHARED = ("while data are staged", "while samples are encoded")
"""Places that a run passes only if no earlier run has staged and encoded its data."""


@pytest.mark.torture
@pytest.mark.parametrize(("place", "ranks", "rank", "sent"), WINDOW_FAULTS)
def test_a_rank_killed_or_stopped_in_a_window_is_named(tmp_path, place, ranks, rank, sent):
    outcome = run_with_fault(tmp_path, ranks, place, rank, sent)
    check_report(outcome, rank, sent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.torture
@pytest.mark.parametrize("sent", SIGNALS)
@pytest.mark.parametrize(("place", "settings", "ranks", "rank"), RUN_FAULTS)
def test_a_rank_killed_or_stopped_in_a_run_is_named(folder, tmp_path, place, settings, ranks, rank, sent):
    home = tmp_path if place in UNSHARED else folder
    blocks = {
        "checkpoints": {"every_steps": 2},
        "validation": {"every_steps": 3},
        "parallel": {"timeout_s": TIMEOUT_S},
        **settings,
    }
    path = a_run(home, tmp_path.name, ranks, **blocks)
    outcome = run_with_fault(tmp_path / "fault", ranks, place, rank, sent, "train", str(path))
    check_report(outcome, rank, sent)
