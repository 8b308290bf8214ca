"""A few of the faults of `make torture`, injected in every test run."""

from __future__ import annotations

from supertuner.arena.home import ArenaHome
from tests.arena import faults


def test_the_next_build_succeeds_after_a_builder_was_killed(home: ArenaHome) -> None:
    faults.kill_builders(home, rounds=12, seed=1)


def test_units_that_a_killed_writer_committed_are_sealed(home: ArenaHome) -> None:
    assert faults.kill_writers(home, rounds=8, seed=2) > 0


def test_a_killed_resumable_build_loses_no_committed_unit(home: ArenaHome) -> None:
    assert faults.kill_resumed(home, rounds=8, seed=3) > 0


def test_a_killed_reader_holds_no_lock(home: ArenaHome) -> None:
    faults.kill_readers(home, rounds=8, seed=4)


def test_every_flipped_bit_truncation_and_swap_is_found(home: ArenaHome) -> None:
    tried = faults.damage_rounds(home, rounds=300, seed=5)
    assert sum(tried.values()) == 300 and len(tried) == 4


def test_concurrent_processes_see_correct_content_or_a_busy_error(home: ArenaHome) -> None:
    faults.many_processes_at_once(home, processes=4, seconds=1.5, seed=6)
