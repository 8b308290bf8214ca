"""Faults for arenas: processes killed at random microseconds; changed bits, lengths and positions."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from supertuner.arena.build import ArenaBuild
from supertuner.arena.home import HOME_MARKER, ArenaHome
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError, ArenaMissingError
from tests.arena.arena_helpers import build, contents, fork, units, wait

LONGEST_US = 6000


def kill_after_a_moment(work: Callable[[], None], rng: random.Random) -> None:
    """Run `work`, which never ends by itself, and kill it at a random microsecond after its start."""
    started_fd, start_fd = os.pipe()
    child = fork(lambda: (os.write(start_fd, b"!"), work())[1])
    os.read(started_fd, 1)
    os.close(started_fd)
    os.close(start_fd)
    # Half of the kills occur in the first millisecond, in which everything is opened and locked.
    time.sleep(rng.choice((rng.uniform(0, 1000), rng.uniform(0, LONGEST_US))) / 1e6)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL, "the child failed before it was killed"


def kill_builders(home: ArenaHome, rounds: int, seed: int) -> int:
    """Kill builders that seal, read and remove in a loop. After each kill the next start succeeds.

    Returns how many kills left a sealed arena.
    """
    rng, content, sealed = random.Random(seed), units(12), 0

    def work() -> None:
        while True:
            build(home, "a", content, writers=2)
            contents(home, "a")
            home.remove("a")

    for _ in range(rounds):
        kill_after_a_moment(work, rng)
        attached = home.attach_or_build("a")
        if isinstance(attached, ArenaBuild):
            attached.close()
            build(home, "a", content)
        else:
            sealed += 1
            attached.close()
        assert contents(home, "a") == content
        home.remove("a")
        home.sweep()
        assert os.listdir(home.path) == [HOME_MARKER], "files were left behind"
    return sealed


def kill_writers(home: ArenaHome, rounds: int, seed: int) -> int:
    """Kill writers of another process. Every unit that they reported as committed is sealed.

    Returns the number of sealed units.
    """
    rng, total = random.Random(seed), 0
    for number in range(rounds):
        name = f"a{number}"
        with home.build(name) as arena_build:
            reading, writing = os.pipe()

            def work(name: str = name, number: int = number, writing: int = writing) -> None:
                writer = home.join(name).open_writer()
                for i in range(1 << 30):
                    with writer.begin(f"{i}") as unit:
                        unit.put("media", number.to_bytes(4, "little") * (i % 5000))
                    os.write(writing, b"%d\n" % i)

            kill_after_a_moment(work, rng)
            os.close(writing)
            reported = b"".join(iter(lambda fd=reading: os.read(fd, 1 << 16), b""))  # type: ignore[misc]
            os.close(reading)
            arena_build.seal({})
        found = contents(home, name)
        assert set(reported.decode().split()) <= set(found), "a committed unit was lost"
        assert all(payload == number.to_bytes(4, "little") * (int(i) % 5000) for i, payload in found.items())
        total += len(found)
        home.remove(name)
    return total


def kill_resumed(home: ArenaHome, rounds: int, seed: int) -> int:
    """Kill the builder of one resumable arena repeatedly. No committed unit is lost.

    Returns the number of units.
    """
    rng, known = random.Random(seed), frozenset[str]()

    def work() -> None:
        with home.build("a", resume=True) as arena_build:
            number = len(arena_build.committed_keys())
            arena_build.put_table("t", np.arange(100))
            writer = arena_build.open_writer()
            while True:
                with writer.begin(f"{number:06d}") as unit:
                    unit.put("media", b"%06d" % number * 1000)
                number += 1

    for _ in range(rounds):
        kill_after_a_moment(work, rng)
        with home.build("a", resume=True) as resumed:
            assert known <= resumed.committed_keys()
            known = resumed.committed_keys()
    with home.build("a", resume=True) as resumed:
        resumed.seal({})
    assert contents(home, "a") == {key: key.encode() * 1000 for key in known}
    home.remove("a")
    return len(known)


def kill_readers(home: ArenaHome, rounds: int, seed: int) -> None:
    """Kill readers of every kind. None of them prevents the removal of the arena."""
    rng, content = random.Random(seed), units(10)

    def work() -> None:
        while True:
            for verify in ("on_demand", "always", "background"):
                with home.attach("a", verify=verify) as reader:  # type: ignore[arg-type]
                    reader.view(3)

    for _ in range(rounds):
        build(home, "a", content)
        kill_after_a_moment(work, rng)
        home.remove("a")


def many_processes_at_once(home: ArenaHome, processes: int, seconds: float, seed: int) -> None:
    """Processes that build, read, follow, list, sweep and remove the same arenas see correct content or a
    busy error.
    """
    content = units(12)

    def work(seed: int) -> None:
        rng, end = random.Random(seed), time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(ArenaBusyError, ArenaMissingError):
                _random_operation(home, rng.choice("ab"), content, rng)

    children = [fork(lambda s=number: work(seed + s)) for number in range(processes)]  # type: ignore[misc]
    assert [wait(child) for child in children] == [0] * processes
    home.sweep()
    for info in home.list_arenas():
        assert info.state == "sealed" and contents(home, info.name) == content
        home.remove(info.name)
    assert os.listdir(home.path) == [HOME_MARKER]


def _random_operation(home: ArenaHome, name: str, content: dict[str, bytes], rng: random.Random) -> None:
    operation = rng.choice(("attach", "build", "join", "ls", "sweep", "remove"))
    if operation == "attach":
        assert contents(home, name) == content
    elif operation == "build":
        attached = home.attach_or_build(name, life=rng.choice(("run", "until_removed")))
        with attached:
            if isinstance(attached, ArenaBuild):
                _fill(attached, content, rng)
    elif operation == "join":
        home.join(name).close()
    elif operation == "remove":
        home.remove(name)
    else:
        (home.list_arenas if operation == "ls" else home.sweep)()


def _fill(arena_build: ArenaBuild, content: dict[str, bytes], rng: random.Random) -> None:
    writers = [arena_build.open_writer(), arena_build.open_writer()]
    for number, (key, payload) in enumerate(content.items()):
        with writers[number % 2].begin(key) as unit:
            unit.put("media", payload)
    if rng.random() < 0.8:
        arena_build.seal({})


def damage_rounds(home: ArenaHome, rounds: int, seed: int) -> dict[str, int]:
    """Change one thing at a time in a sealed arena. Attaching or verifying finds it.

    Returns how many changes of each kind were tried.
    """
    rng = random.Random(seed)
    build(home, "a", units(24, seed=1), writers=3)
    build(home, "b", units(24, seed=2), writers=3)
    folder, other = home.path / "a", home.path / "b"
    tried: dict[str, int] = {}
    for _ in range(rounds):
        kind = rng.choice(("flip", "flip", "flip", "flip", "truncate", "swap bytes", "swap files"))
        undo, what = {"flip": _flip, "truncate": _truncate, "swap bytes": _swap_bytes, "swap files": _swap_files}[kind](
            rng, folder, other
        )
        with pytest.raises(ArenaDamagedError) as raised:
            contents(home, "a")
            pytest.fail(f"{what} was not found")
        assert str(home.path) in str(raised.value), f"{what}: {raised.value}"
        undo()
        tried[kind] = tried.get(kind, 0) + 1
    contents(home, "a")
    return tried


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.stat().st_size)


def _flip(rng: random.Random, folder: Path, other: Path) -> tuple[Callable[[], None], str]:
    file = rng.choice(_files(folder))
    at, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)

    def flip() -> None:
        with file.open("r+b", buffering=0) as opened:
            byte = os.pread(opened.fileno(), 1, at)[0]
            os.pwrite(opened.fileno(), bytes([byte ^ bit]), at)

    flip()
    return flip, f"bit {bit} of byte {at} of {file.name}"


def _truncate(rng: random.Random, folder: Path, other: Path) -> tuple[Callable[[], None], str]:
    file = rng.choice(_files(folder))
    content = file.read_bytes()
    length = rng.choice((rng.randrange(len(content)), len(content) - 1, len(content) // 4096 * 4096 // 2))
    os.truncate(file, length)
    return lambda: ignore_result(file.write_bytes(content)), f"{file.name} cut to {length} of {len(content)}"


def _swap_bytes(rng: random.Random, folder: Path, other: Path) -> tuple[Callable[[], None], str]:
    file = rng.choice(_files(folder))
    content = file.read_bytes()
    while True:
        size = rng.choice((1, 8, 16, 4096))
        a, b = sorted(rng.randrange(max(1, len(content) - size)) // size * size for _ in range(2))
        changed = bytearray(content)
        changed[a : a + size], changed[b : b + size] = content[b : b + size], content[a : a + size]
        if changed != content and len(changed) == len(content):
            break
    file.write_bytes(changed)
    return lambda: ignore_result(file.write_bytes(content)), f"{size} bytes at {a} and {b} of {file.name} swapped"


def _swap_files(rng: random.Random, folder: Path, other: Path) -> tuple[Callable[[], None], str]:
    first, backup = rng.choice(_files(folder)), folder.parent / ".backup"
    second = rng.choice([f for f in (*_files(folder), *_files(other)) if f != first])
    shutil.copyfile(first, backup)
    shutil.copyfile(second, first)
    return lambda: ignore_result(shutil.copyfile(backup, first)), f"{first} replaced by {second}"


def ignore_result(value: object) -> None:
    """Discard the result of an undo."""
