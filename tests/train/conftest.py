"""Shared by tests of training: one process that has imported everything, to fork runs from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.runs import TrainingForkServer


@pytest.fixture(scope="session")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingForkServer]:
    made = TrainingForkServer(tmp_path_factory.mktemp("parent") / "log", "tests.train.interrupted_runs")
    yield made
    made.close()
