"""When payloads are checked: on demand, in the background, or before every read."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from supertuner.arena.home import ArenaHome
from supertuner.core.errors import ArenaDamagedError
from supertuner.core.events import NullSink
from tests.arena.arena_helpers import build, units


def damage(home: ArenaHome, at: int = 4096) -> None:
    with (home.path / "a" / "0000.data").open("r+b") as data:
        data.seek(at)
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ 1]))


@pytest.fixture
def damaged(home: ArenaHome) -> ArenaHome:
    """An arena whose unit "k1" (the second of its segment) has a flipped bit; "k0" is intact."""
    with home.build("a") as arena_build:
        writer = arena_build.open_writer()
        for number in range(3):
            with writer.begin(f"k{number}") as unit:
                unit.put("media", np.full(4096, number, np.uint8))
        arena_build.put_table("t", np.arange(4))
        arena_build.seal({})
    damage(home, 2 * 4096 + 77)
    return home


def test_on_demand_mode_reads_without_checks_and_verify_finds_the_damage(damaged: ArenaHome) -> None:
    with damaged.attach("a") as reader:
        reader.view(1)
        with pytest.raises(ArenaDamagedError, match=r"0000\.data: the checksum of record 1 .*arena rm"):
            reader.verify()


def test_always_mode_checks_before_every_read_and_returns_intact_records(damaged: ArenaHome) -> None:
    with damaged.attach("a", verify="always") as reader:
        assert bytes(reader.view(0)) == bytes(4096)
        reader.gather([0, 2], np.zeros((2, 4096), np.uint8))
        assert reader.table("t").tolist() == [0, 1, 2, 3]
        for read in (reader.view, reader.array, reader.tensor):
            with pytest.raises(ArenaDamagedError, match="record 1"):
                read(1)
        with pytest.raises(ArenaDamagedError, match="record 1"):
            reader.gather([0, 1], np.zeros((2, 4096), np.uint8))


def test_background_mode_raises_at_the_next_read_after_it_found_damage(damaged: ArenaHome) -> None:
    with damaged.attach("a", verify="background") as reader:
        end = time.monotonic() + 10
        with pytest.raises(ArenaDamagedError, match="record 1"):
            while time.monotonic() < end:
                reader.view(0)


def test_closing_ends_a_background_verification(home: ArenaHome) -> None:
    build(home, "a", units(3000))
    reader = home.attach("a", verify="background")
    reader.view(0)
    reader.close()
    assert all(thread.name != "arena-verify" for thread in threading.enumerate())
    home.remove("a")


def test_a_changed_byte_between_records_is_found(home: ArenaHome) -> None:
    build(home, "a", {"k0": b"x" * 100, "k1": b"y" * 70_000}, writers=1)
    with home.attach("a") as reader:
        reader.verify()
        damage(home, 4096 + 100)
        with pytest.raises(ArenaDamagedError, match="byte 4196 lies between records"):
            reader.verify()
        damage(home, 4096 + 100)
        reader.verify()
        damage(home, 3 * 4096)  # in the hole before the next 64 KiB boundary
        with pytest.raises(ArenaDamagedError, match="byte 12288 lies between records"):
            reader.verify()


def test_verifying_allocates_no_memory_for_holes(home: ArenaHome) -> None:
    build(home, "a", {f"{i}": b"x" * 65537 for i in range(40)}, writers=1)
    before = home.list_arenas()[0].nbytes
    with home.attach("a", verify="always") as reader:
        reader.verify()
        for i in range(len(reader)):
            reader.view(i)
    assert home.list_arenas()[0].nbytes == before


def test_progress_counts_every_record_and_byte(home: ArenaHome) -> None:
    class Counting(NullSink):
        items = nbytes = 0

        def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = ""):  # type: ignore[no-untyped-def]
            self.expected = (items, nbytes)
            counting = self

            class Phase(type(NullSink().phase(""))):  # type: ignore[misc]
                def advance(self, items: int = 0, nbytes: int = 0) -> None:
                    counting.items += items
                    counting.nbytes += nbytes

            return Phase()

    build(home, "a", units(20))
    counting = Counting()
    with home.attach("a") as reader:
        reader.verify(counting)
    assert (counting.items, counting.nbytes) == counting.expected and counting.items == 21
