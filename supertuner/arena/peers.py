"""The processes of one node that work on one run: each holds a lock that ends with it, and leaves word how it ended.

They meet in a hidden folder of an arenas' home. What one of them tells is a file that appears whole; whoever waits for
it looks at the others in between, and ends with the error of one that failed, or is told which one is gone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from supertuner.arena import locks
from supertuner.arena.files import naming
from supertuner.arena.home import Home
from supertuner.core.bulk_io import write_all
from supertuner.core.errors import ArenaError, PeerError
from supertuner.core.events import Progress

POLL_S = 0.1
"""Between two looks of a process that waits for another."""
_MOMENT_S = 1.0
"""Shorter waits are not worth a line on the screen."""
_FOLDER = ".peers-"
_OLD_S = 3600.0
"""A folder without a lock is removed after this time: a younger one may be that of processes that are just coming."""
_NOTE_BYTES = 4096
"""Of a process's file, from the beginning on: how it ends must find room there when the home is full."""
_HERE, _LEFT, _FAILED = "here", "left", "failed"


@dataclass(frozen=True, slots=True)
class Peers:
    """This process among those of its node. A process of its own has no folder, and waits for nobody."""

    number: int = 0
    count: int = 1
    folder: Path | None = None

    @property
    def first(self) -> bool:
        """Whether it is the one that does what one process of a node does for all."""
        return self.number == 0

    def look(self) -> None:
        """PeerError if another process of the node failed or was killed; one that has done its work may be gone."""
        for number in range(self.count):
            if number != self.number:
                self._look_at(number)

    def tell(self, name: str, content: bytes) -> None:
        """Say something to the others, under a name; what was said under it before is replaced."""
        if self.folder is not None:
            _write(self.word(name), content)

    def told(self, name: str) -> bytes | None:
        """What was said under that name; None: nothing yet."""
        if self.folder is None:
            return None
        try:
            return self.word(name).read_bytes()
        except FileNotFoundError:
            return None

    def hear(self, name: str, waiting: Callable[[], None]) -> bytes:
        """What is said under that name, waited for; `waiting` is called at every look, and may show that we live."""
        assert self.folder is not None, "a process of its own has nobody to listen to"
        while (found := self.told(name)) is None:
            self.look()
            waiting()
            time.sleep(POLL_S)
        return found

    def heard(self, name: str, what_for: str, progress: Progress) -> bytes:
        """The same, shown as a phase where it takes longer than a moment."""
        shown_from = time.monotonic() + _MOMENT_S
        while time.monotonic() < shown_from:
            if (found := self.told(name)) is not None:
                return found
            self.look()
            time.sleep(POLL_S / 10)
        with progress.phase(f"waiting for {what_for}") as phase:
            return self.hear(name, phase.advance)

    @contextmanager
    def in_turn(self, what: str, progress: Progress) -> Iterator[None]:
        """The first process does what is inside, and then the others: they find what it made."""
        if not self.first:
            self.heard(f"{what} done", f"the first process of this node: {what}", progress)
        yield
        if self.first:
            self.tell(f"{what} done", b"")

    def word(self, name: str) -> Path:
        """The file of a name. Any text is a name."""
        assert self.folder is not None
        return self.folder / f"word-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"

    def _look_at(self, number: int) -> None:
        assert self.folder is not None
        own = self.folder / str(number)
        if _is_locked(own):
            return
        pid, how, why = _noted(own)
        who = f"process {number} of the {self.count} of this node (pid {pid})"
        if how == _FAILED:
            raise PeerError(f"{who} failed: {why}")
        if how != _LEFT:
            raise PeerError(
                f"{who} is gone without a word: it was killed, or the machine ran out of memory (see its kernel's "
                "log); start again: what was made is found"
            )


ALONE = Peers()


@contextmanager
def meet(home: Home, name: str, number: int, count: int, gathered: Callable[[], None]) -> Iterator[Peers]:
    """Take part as process `number` of the `count` of this node; what ends the block is left for the others to see.

    `name` is the same for all of them, and of no others. `gathered` returns once all have called it.
    """
    folder = home.beside(f"{_FOLDER}{name}")
    own = folder / str(number)
    with naming(own):
        fd = os.open(own, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not locks.lock(fd, exclusive=True):
            raise ArenaError(f"{own}: another process is number {number} of this node; start them with torchrun")
        with naming(own):
            _note(fd, _HERE)
        _sweep(home.path, keep=folder)
        try:
            gathered()
            yield Peers(number, count, folder)
        except BaseException as error:
            # What another one failed with, the others see for themselves.
            how = (_LEFT,) if isinstance(error, PeerError) else (_FAILED, str(error) or type(error).__name__)
            with suppress(OSError):  # then the others find us gone; what happened, the error itself says
                _note(fd, *how)
            raise
        with naming(own):
            _note(fd, _LEFT)
    finally:
        os.close(fd)
        _remove_unused(folder)


def _is_locked(own: Path) -> bool:
    try:
        fd = os.open(own, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not locks.try_lock(fd, exclusive=False)  # shared: lookers do not take each other for the owner
    finally:
        os.close(fd)


def _remove_unused(folder: Path) -> bool:
    """Remove the folder unless somebody is still there; the last to leave does."""
    try:
        if any(_is_locked(folder / name) for name in os.listdir(folder) if name.isdigit()):
            return False
    except FileNotFoundError:
        return False
    shutil.rmtree(folder, ignore_errors=True)  # two that leave at once remove it together
    return True


def _sweep(home: Path, keep: Path) -> None:
    """Remove what processes left that were killed long ago."""
    for name in os.listdir(home):
        folder = home / name
        if name.startswith(_FOLDER) and folder != keep:
            try:
                old = time.time() - folder.stat().st_mtime > _OLD_S
            except FileNotFoundError:
                continue  # its processes just left
            if old:
                _remove_unused(folder)


def _write(file: Path, content: bytes) -> None:
    """A file that is there as a whole or not at all."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with naming(file):
        temporary.write_bytes(content)
        os.replace(temporary, file)


def _note(fd: int, how: str, why: str = "") -> None:
    """Who this is, and how it is with it: in one page, which is there as a whole or not at all."""
    content = f"{os.getpid()}\n{how}\n{why}".encode(errors="replace")
    write_all(fd, content[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0"), 0)


def _noted(own: Path) -> tuple[str, str, str]:
    """(its process, how it is with it, why)."""
    try:
        pid, how, why = own.read_text(errors="replace").rstrip("\0").split("\n", 2)
    except (FileNotFoundError, ValueError):  # killed before it could say anything
        return "?", "", ""
    return pid, how, why
