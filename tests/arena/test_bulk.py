"""Small units added some at a time: seen together, whole, and in line with units put one by one."""

from __future__ import annotations

import os

import pytest

from supertuner.arena.bulk import Bulk
from supertuner.arena.home import Home
from supertuner.core.errors import ArenaError
from tests.arena.making import contents


def test_units_added_in_bulk_are_seen_when_flushed(any_home: Home) -> None:
    with any_home.build("a") as begun, any_home.attach_live("a") as live:
        bulk = Bulk(begun.writer(), "media")
        for number in range(3):
            bulk.add(f"{number}", memoryview(b"%d" % number * 3000))
        assert live.refresh() == 0
        bulk.flush()
        assert live.refresh() == 3 and bytes(live.view(2)) == b"2" * 3000


def test_bulk_and_single_units_share_a_segment(home: Home) -> None:
    expected = {}
    with home.build("a") as begun:
        writer = begun.writer()
        bulk = Bulk(writer, "media")
        for number in range(1000):
            payload = os.urandom(number % 300 + 1) * (1 + 300 * (number % 100 == 0))
            if number % 7 == 0:
                bulk.flush()
                with writer.begin(f"{number}") as unit:
                    unit.put("media", payload)
            else:
                bulk.add(f"{number}", memoryview(payload))
            expected[f"{number}"] = payload
        bulk.flush()
        begun.seal({})
    assert contents(home, "a") == expected


def test_what_was_not_flushed_leaves_no_trace(home: Home) -> None:
    with home.build("a") as begun:
        bulk = Bulk(begun.writer(), "media")
        bulk.add("kept", memoryview(b"1" * 5000))
        bulk.flush()
        bulk.add("lost", memoryview(b"2" * 50_000))
        begun.seal({})
    assert contents(home, "a") == {"kept": b"1" * 5000}


def test_an_abandoned_build_refuses_the_flush(home: Home) -> None:
    begun = home.build("a")
    joined = home.join("a")
    bulk = Bulk(joined.writer(), "media")
    bulk.add("k", memoryview(b"1"))
    begun.abandon()
    with pytest.raises(ArenaError, match="abandoned"):
        bulk.flush()
    joined.close()
