"""Building an arena: readers see no uncommitted unit, several writers work in parallel, and a dead builder's units can
be resumed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from supertuner.arena.home import HOME_MARKER, ArenaHome
from supertuner.core.errors import ArenaBusyError, ArenaError, ArenaMissingError
from tests.arena.arena_helpers import build, contents, fork, units, wait


def test_reader_sees_nothing_until_the_unit_is_committed(any_home: ArenaHome) -> None:
    with any_home.build("a") as arena_build, any_home.join("a") as joined:
        unit = arena_build.open_writer().begin("k")
        unit.put("media", b"x" * 5000)
        assert joined.committed_keys() == set()
        unit.commit()
        assert joined.committed_keys() == {"k"}
        arena_build.seal({})
        with any_home.attach("a") as reader:
            assert reader.key(0) == "k" and bytes(reader.view(0)) == b"x" * 5000 and reader.find("k") == 0
            reader.verify()


def test_an_arena_cannot_be_attached_before_it_is_sealed(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        with arena_build.open_writer().begin("k") as unit:
            unit.put("media", b"1")
        with pytest.raises(ArenaMissingError, match="not sealed"):
            home.attach("a")
        arena_build.seal({})
        with home.attach("a") as reader:
            assert len(reader) == 1


def test_an_aborted_unit_leaves_no_trace(any_home: ArenaHome) -> None:
    with any_home.build("a") as arena_build:
        writer = arena_build.open_writer()
        for number in range(6):
            unit = writer.begin(f"{number}")
            unit.put("media", bytes([number + 1]) * (150_000 if number % 2 else 5000))
            unit.put("more", b"?")
            unit.abort() if number % 2 else unit.commit()
        writer.begin("open").put("media", b"!" * 100_000)
        writer.close()
        arena_build.seal({})
    with any_home.attach("a") as reader:
        assert [reader.key(i) for i in range(len(reader))] == ["0", "2", "4"]
        reader.verify()


def test_bytes_of_an_aborted_unit_do_not_remain_between_later_units(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        writer = arena_build.open_writer()
        unit = writer.begin("aborted")
        unit.put("media", b"x" * 150_000)
        unit.abort()
        for key, nbytes in (("k0", 70_001), ("k1", 10)):
            with writer.begin(key) as unit:
                unit.put("media", bytes(nbytes))
        arena_build.seal({})
    assert contents(home, "a") == {"k0": bytes(70_001), "k1": bytes(10)}


def test_an_error_inside_a_unit_aborts_it(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        writer = arena_build.open_writer()
        with pytest.raises(RuntimeError), writer.begin("bad") as unit:
            unit.put("media", b"x" * 9000)
            raise RuntimeError
        arena_build.seal({})
    assert contents(home, "a") == {}


def test_leaving_the_block_without_sealing_deletes_everything(home: ArenaHome) -> None:
    with pytest.raises(RuntimeError), home.build("a") as arena_build:
        with arena_build.open_writer().begin("k") as unit:
            unit.put("media", b"1" * 100_000)
        raise RuntimeError
    assert os.listdir(home.path) == [HOME_MARKER]


def test_several_threads_write_concurrently(home: ArenaHome) -> None:
    content = units(200)
    with home.build("a") as arena_build:

        def work(part: int) -> None:
            writer = arena_build.open_writer()
            for key in sorted(content)[part::8]:
                with writer.begin(key) as unit:
                    unit.put("media", content[key])

        threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        arena_build.seal({})
    assert contents(home, "a") == content


def test_other_processes_join_a_build_and_the_owner_sees_what_they_commit(any_home: ArenaHome) -> None:
    content = units(90)

    def work(part: int) -> None:
        with any_home.join("a") as joined, joined.open_writer() as writer:
            for key in sorted(content)[part::3]:
                with writer.begin(key) as unit:
                    unit.put("media", content[key])

    with any_home.build("a") as arena_build:
        children = [fork(lambda part=part: work(part)) for part in range(3)]  # type: ignore[misc]
        seen: frozenset[str] = frozenset()
        while len(seen) < len(content):
            before, seen = seen, arena_build.committed_keys()
            assert before <= seen
        assert [wait(child) for child in children] == [0, 0, 0]
        assert seen == set(content)
        arena_build.seal({})
    assert contents(any_home, "a") == content


def test_a_joined_writer_fails_after_the_build_was_abandoned(home: ArenaHome) -> None:
    arena_build = home.build("a")
    joined = home.join("a")
    unit = joined.open_writer().begin("k")
    unit.put("media", b"1")
    arena_build.abandon()
    with pytest.raises(ArenaError, match="abandoned"):
        unit.commit()
    joined.close()
    assert os.listdir(home.path) == [HOME_MARKER]


def test_sealing_raises_while_another_process_still_writes(home: ArenaHome) -> None:
    with home.build("a") as arena_build, home.join("a") as joined:
        writer = joined.open_writer()
        with pytest.raises(ArenaBusyError, match="still writing this segment"):
            arena_build.seal({})
        with writer.begin("k") as unit:
            unit.put("media", b"1")
        writer.close()
        arena_build.seal({})
        with pytest.raises(ArenaError, match="sealed"):
            joined.open_writer()
    assert contents(home, "a") == {"k": b"1"}


def test_no_writer_opens_a_segment_while_the_arena_is_being_sealed(home: ArenaHome) -> None:
    with home.build("a"), home.join("a") as joined, (home.path / "a" / "head").open("rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # as the seal does
        with ThreadPoolExecutor() as pool:
            opening = pool.submit(joined.open_writer)
            with pytest.raises(TimeoutError):
                opening.result(timeout=0.1)
            fcntl.flock(gate, fcntl.LOCK_UN)
            opening.result(timeout=10)


def test_only_a_build_in_progress_can_be_joined(home: ArenaHome) -> None:
    with pytest.raises(ArenaMissingError):
        home.join("a")
    build(home, "a", units(3))
    with pytest.raises(ArenaMissingError, match="no process is building"):
        home.join("a")


@pytest.mark.parametrize("how", ["killed", "left"])
def test_committed_units_of_a_builder_that_ended_are_resumed(any_home: ArenaHome, how: str) -> None:
    content = units(30)
    keys = sorted(content)

    def work() -> None:
        with any_home.build("a", resume=True) as arena_build:
            arena_build.put_table("t", np.arange(10))
            writer = arena_build.open_writer()
            for key in keys[:20]:
                with writer.begin(key) as unit:
                    unit.put("media", content[key])
            writer.begin(keys[20]).put("media", b"never committed" * 1000)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(work)) == (-signal.SIGKILL if how == "killed" else 0)
    assert any_home.sweep() == [], "a sweep keeps a resumable build"
    with any_home.build("a", resume=True) as arena_build:
        assert arena_build.committed_keys() == set(keys[:20])
        arena_build.put_table("t", np.arange(3))
        writer = arena_build.open_writer()
        for key in keys[20:]:
            with writer.begin(key) as unit:
                unit.put("media", content[key])
        arena_build.seal({})
    assert contents(any_home, "a") == content
    with any_home.attach("a") as reader:
        assert reader.table("t").tolist() == [0, 1, 2]


def test_resuming_drops_units_whose_data_did_not_reach_the_disk(home: ArenaHome) -> None:
    with home.build("a", resume=True) as arena_build:
        writer = arena_build.open_writer()
        for number in range(4):
            with writer.begin(f"{number}") as unit:
                unit.put("media", bytes([number + 1]) * 4096)
    with (home.path / "a" / "0000.data").open("r+b") as data:
        data.seek(4096 * 3)
        data.write(bytes(4096))  # the third unit's data is lost, as after a power failure
    with home.build("a", resume=True) as arena_build:
        assert arena_build.committed_keys() == {"0", "1"}
        arena_build.seal({})
    assert sorted(contents(home, "a")) == ["0", "1"]


def test_a_build_without_resume_starts_empty(home: ArenaHome) -> None:
    with home.build("a", resume=True) as arena_build, arena_build.open_writer().begin("old") as unit:
        unit.put("media", b"1")
    with home.build("a") as arena_build:
        assert arena_build.committed_keys() == frozenset()
        arena_build.seal({})
    assert contents(home, "a") == {}


def test_stored_bytes_counts_pages_and_not_file_lengths(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        writer = arena_build.open_writer()
        for number in range(20):
            with writer.begin(f"{number}") as unit:
                unit.put("media", bytes(65536 + 1))
        taken = home.stored_bytes("a")
        assert 20 * 17 * 4096 <= taken <= 20 * 17 * 4096 + 10 * 4096, "padding to 64 KiB occupies no memory"


def test_a_forked_child_that_ends_does_not_abandon_the_parents_build(home: ArenaHome) -> None:
    with home.build("a") as arena_build:
        with arena_build.open_writer().begin("k") as unit:
            unit.put("media", b"1")
        assert wait(fork(arena_build.close)) == 0
        arena_build.seal({})
    assert contents(home, "a") == {"k": b"1"}
