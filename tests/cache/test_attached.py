"""Whoever wants to say where the cache's memory belongs is told of every arena, when it is stored and when loaded."""

from __future__ import annotations

from pathlib import Path

from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from tests.cache.making import CountingEncoder, contents, store

QUIET = {"host": HostFacts(), "progress": NullSink()}


def test_every_arena_is_told_as_it_is_stored_and_as_it_is_loaded_and_its_entries_lie_inside(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    encoder = CountingEncoder(contents(10))
    with store(tmp_path / "home", attached=lambda *memory: told.append(memory)) as filled:
        assert told == []
        filled.fill(encoder.request(), **QUIET)
        assert len(told) == 1
    with store(tmp_path / "home", attached=lambda *memory: told.append(memory)) as found:
        (begin, nbytes) = told[1]
        for ref in found.find(encoder.keys):
            for one in found.entries.entry(int(ref)).values():
                assert begin <= one.data_ptr() and one.data_ptr() + one.nbytes <= begin + nbytes
        found.fill(CountingEncoder(contents(12)).request(), **QUIET)
        assert len(told) == 3
