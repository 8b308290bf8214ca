"""The arena under many faults: 500 kills at random times, 10,000 changes to its files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from supertuner.arena.home import ArenaHome
from tests.arena import faults
from tests.arena.arena_helpers import fresh_home

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800)]


@pytest.fixture
def home() -> Iterator[ArenaHome]:
    with fresh_home() as home:
        yield home


def test_a_build_works_after_each_of_200_killed_builders(home: ArenaHome) -> None:
    faults.kill_builders(home, rounds=200, seed=11)


def test_units_that_100_killed_writers_committed_are_sealed(home: ArenaHome) -> None:
    assert faults.kill_writers(home, rounds=100, seed=12) > 0


def test_a_build_resumed_after_each_of_100_kills_loses_no_committed_unit(home: ArenaHome) -> None:
    assert faults.kill_resumed(home, rounds=100, seed=13) > 0


def test_100_killed_readers_leave_no_lock(home: ArenaHome) -> None:
    faults.kill_readers(home, rounds=100, seed=14)


def test_ten_thousand_flips_truncations_and_swaps_are_all_detected(home: ArenaHome) -> None:
    tried = faults.damage_rounds(home, rounds=10_000, seed=15)
    assert sum(tried.values()) == 10_000 and min(tried.values()) > 500


def test_eight_concurrent_processes_get_valid_data_or_busy(home: ArenaHome) -> None:
    faults.many_processes_at_once(home, processes=8, seconds=20, seed=16)
