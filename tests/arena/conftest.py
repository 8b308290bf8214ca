"""Fixtures of the arena tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from supertuner.arena.home import ArenaHome
from tests.arena.arena_helpers import fresh_home


@pytest.fixture
def home() -> Iterator[ArenaHome]:
    with fresh_home() as arena_home:
        yield arena_home


@pytest.fixture(params=["memory", "disk"])
def any_home(request: pytest.FixtureRequest, tmp_path: pytest.TempPathFactory) -> Iterator[ArenaHome]:
    """The same guarantees hold on tmpfs and on disk."""
    if request.param == "disk":
        yield ArenaHome(tmp_path / "arenas")  # type: ignore[operator]
    else:
        with fresh_home() as arena_home:
            yield arena_home
