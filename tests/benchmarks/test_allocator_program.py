"""The C program of the allocator's benchmark includes the plugin's source: a renamed function must not break it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_allocator import built, rounds_of


def test_the_program_builds_and_measures_both_sides(tmp_path: Path) -> None:
    pairs = rounds_of(built(tmp_path), live=10, managed=False)
    assert pairs and all(driver > 0 and plugin > 0 for driver, plugin in pairs)
