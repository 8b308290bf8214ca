"""The arena home: who may remove what, when an arena's lifetime ends, and which folders are refused."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from supertuner.arena.build import ArenaBuild
from supertuner.arena.home import HOME_MARKER, ArenaHome
from supertuner.arena.reader import ArenaReader
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError, ArenaError, ArenaExistsError, ArenaMissingError
from tests.arena.arena_helpers import build, contents, fork, units, wait


def kill_builder_with_open_unit(home: ArenaHome, name: str) -> None:
    """Run a builder that is killed with one committed and one open unit."""

    def work() -> None:
        writer = home.build(name).open_writer()
        with writer.begin("k") as unit:
            unit.put("media", b"1" * 10_000)
        writer.begin("open").put("media", b"2" * 10_000)
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(work)) == -signal.SIGKILL


def test_an_attached_arena_is_not_removed(home: ArenaHome) -> None:
    build(home, "a", units(3))
    with home.attach("a"), pytest.raises(ArenaBusyError, match="in use"):
        home.remove("a")
    home.remove("a")
    with pytest.raises(ArenaMissingError, match="no such arena"):
        home.attach("a")
    with pytest.raises(ArenaMissingError):
        home.remove("a")
    assert os.listdir(home.path) == [HOME_MARKER]


def test_an_arena_has_one_builder_at_a_time(home: ArenaHome) -> None:
    with home.build("a"):
        with pytest.raises(ArenaBusyError, match="another process is building it"):
            home.build("a")
        with pytest.raises(ArenaBusyError):
            home.remove("a")
    with home.build("a") as arena_build:
        arena_build.seal({})
    with pytest.raises(ArenaExistsError, match=r"already built.*arena rm a"):
        home.build("a")


def test_a_waiting_builder_builds_after_the_first_one_abandoned(home: ArenaHome) -> None:
    first = home.build("a")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(home.build, "a", wait_s=10)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        first.abandon()
        with waiting.result(timeout=10) as second:
            second.seal({"by": "the second"})
    with home.attach("a") as reader:
        assert reader.meta == {"by": "the second"}


def test_a_reader_that_waited_for_a_removal_reads_the_next_arena_of_that_name(home: ArenaHome) -> None:
    build(home, "a", {"old": b"1"})
    folder = os.open(home.path / "a", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as a removal does
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(contents, home, "a")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        (home.path / "a").rename(home.path / ".gone-1")
        build(home, "a", {"new": b"2"})
        os.close(folder)
        assert waiting.result(timeout=10) == {"new": b"2"}


def test_remains_of_a_dead_builder_do_not_prevent_the_next_build(any_home: ArenaHome) -> None:
    kill_builder_with_open_unit(any_home, "a")
    assert [info.state for info in any_home.list_arenas()] == ["remains"]
    content = units(5)
    build(any_home, "a", content)
    assert contents(any_home, "a") == content


def test_sweep_deletes_remains_and_nothing_else(home: ArenaHome) -> None:
    kill_builder_with_open_unit(home, "dead")
    build(home, "kept", units(3))
    (home.path / ".gone-1234").mkdir()
    (home.path / ".gone-1234" / "0000.data").write_bytes(b"x" * 5000)
    with home.build("building"):
        assert sorted(home.sweep()) == [".gone-1234", "dead"]
        assert [info.name for info in home.list_arenas()] == ["building", "kept"]


def test_a_lifetime_in_hours_ends_after_that_time_once_no_process_is_attached(home: ArenaHome) -> None:
    for name, hours in (("short", 0.05 / 3600), ("long", 1.0)):
        with home.build(name, life=hours) as arena_build:
            arena_build.seal({})
    time.sleep(0.06)
    with home.attach("short"):
        assert home.sweep() == []
    assert home.sweep() == ["short"]


def test_a_run_arena_is_deleted_with_its_last_reader(home: ArenaHome) -> None:
    with home.build("a", life="run") as arena_build:
        arena_build.seal({})
        first = home.attach("a")
    second = home.attach("a")
    assert home.sweep() == []
    first.close()
    assert [info.name for info in home.list_arenas()] == ["a"]
    second.close()
    assert os.listdir(home.path) == [HOME_MARKER]


def test_a_run_arena_is_swept_after_its_readers_were_killed(home: ArenaHome) -> None:
    with home.build("a", life="run") as arena_build:
        arena_build.seal({})

        def work() -> None:
            home.attach("a")
            os.kill(os.getpid(), signal.SIGKILL)

        wait(fork(work))
    assert home.sweep() == ["a"]


def test_list_arenas_reports_states_users_and_sizes(home: ArenaHome) -> None:
    build(home, "sealed", units(9))
    build(home, "broken", units(2))
    (home.path / "broken" / "index").write_bytes(b"garbage")
    with home.build("building"), home.attach("sealed"):
        infos = {info.name: info for info in home.list_arenas()}
    assert {name: (info.state, info.users) for name, info in infos.items()} == {
        "broken": ("damaged", False),
        "building": ("building", True),
        "sealed": ("sealed", True),
    }
    assert infos["sealed"].units == 9 and infos["sealed"].meta == {"made": "by a test"}
    assert infos["sealed"].nbytes >= sum(map(len, units(9).values()))
    assert "index" in infos["broken"].problem
    home.remove("broken")


def test_one_of_several_processes_builds_and_the_others_wait_and_attach(home: ArenaHome) -> None:
    content = units(20)

    def work() -> None:
        opened = home.attach_or_build("a", wait_s=30)
        if isinstance(opened, ArenaBuild):
            with opened:
                time.sleep(0.1)
                writer = opened.open_writer()
                for key, payload in content.items():
                    with writer.begin(key) as unit:
                        unit.put("media", payload)
                opened.seal({})
        else:
            assert len(opened) == len(content)
            opened.close()

    assert [wait(child) for child in [fork(work) for _ in range(4)]] == [0, 0, 0, 0]
    opened = home.attach_or_build("a")
    assert isinstance(opened, ArenaReader) and len(opened) == 20
    opened.close()


@pytest.mark.parametrize("name", ["", ".hidden", "..", "a/b", "x" * 129, "a b", "ü", "a\n"])
def test_an_unsafe_name_is_refused(home: ArenaHome, name: str) -> None:
    for act in (home.build, home.attach, home.remove, home.join):
        with pytest.raises(ArenaError, match="is not a valid arena name"):
            act(name)


def test_a_home_that_other_users_could_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    for name, problem in (("link", "is a link"), ("open", "other users can write"), ("file", "is a link or a file")):
        with pytest.raises(ArenaError, match=problem):
            ArenaHome(tmp_path / name)


@pytest.mark.requires(os.geteuid() == 0, reason="only root can change the owner of a folder")
def test_a_home_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(ArenaError, match="belongs to user 12345"):
        ArenaHome(tmp_path / "theirs")


def test_a_new_home_is_accessible_only_to_its_user(tmp_path: Path) -> None:
    home = ArenaHome(tmp_path / "deep" / "home")
    build(home, "a", units(3))
    assert (tmp_path / "deep" / "home").stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "deep" / "home").rglob("*"))


def test_a_link_in_place_of_an_arena_is_not_followed(home: ArenaHome) -> None:
    build(home, "a", units(3))
    (home.path / "b").symlink_to("a")
    for act in (home.build, home.attach, home.remove):
        with pytest.raises(ArenaDamagedError, match="is a link"):
            act("b")
    assert home.sweep() == [] and {i.name: i.state for i in home.list_arenas()} == {"a": "sealed", "b": "damaged"}


def test_started_programs_do_not_inherit_locks(home: ArenaHome) -> None:
    build(home, "a", units(3))
    with home.attach("a"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        home.remove("a")
    finally:
        child.kill()
        child.wait()


def test_folders_that_are_not_arenas_are_neither_reclaimed_nor_removed(home: ArenaHome) -> None:
    for name in ("photos", ".gone-photos"):
        (home.path / name / "2024").mkdir(parents=True)
        (home.path / name / "thesis.txt").write_text("years of work")
    assert home.sweep() == []
    with pytest.raises(ArenaError, match="is not an arena: it contains"):
        home.remove("photos")
    with pytest.raises(ArenaError, match="is not an arena: it contains"):
        home.build("photos")
    assert [info.state for info in home.list_arenas()] == ["damaged"]
    for name in ("photos", ".gone-photos"):
        assert (home.path / name / "thesis.txt").read_text() == "years of work"
        assert sorted(p.name for p in (home.path / name).iterdir()) == ["2024", "thesis.txt"]


def test_a_folder_with_other_files_is_refused_as_home(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArenaError, match=r"contains other files \('thesis'\); set arena\.home"):
        ArenaHome(tmp_path)
    assert (tmp_path / "thesis" / "thesis.txt").read_text() == "years of work"


def test_a_home_remains_a_home_after_its_last_arena_was_removed(tmp_path: Path) -> None:
    home = ArenaHome(tmp_path / "arenas")
    build(home, "cats", units(2))
    home.remove("cats")
    build(ArenaHome(tmp_path / "arenas"), "dogs", units(2))
    assert [info.name for info in ArenaHome(tmp_path / "arenas").list_arenas()] == ["dogs"]


def test_an_empty_folder_of_the_user_in_a_home_is_not_deleted(home: ArenaHome) -> None:
    build(home, "cats", units(2))
    (home.path / "mine").mkdir()
    assert home.sweep() == []
    assert (home.path / "mine").is_dir()
