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
from supertuner.arena.folder import translate_os_errors
from supertuner.arena.home import ArenaHome
from supertuner.core.bulk_io import write_all
from supertuner.core.errors import ArenaError, PeerError
from supertuner.core.events import Progress

POLL_S = 0.1
"""Between two looks of a process that waits for another."""
_SHOW_AFTER_S = 1.0
"""Shorter waits are not worth a line on the screen."""
_FOLDER_PREFIX = ".peers-"
_STALE_AFTER_S = 3600.0
"""A folder without a lock is removed after this time: a younger one may be that of processes that are just coming."""
_STATUS_BYTES = 4096
"""Of a process's file, from the beginning on: how it ends must find room there when the home is full."""
_RUNNING, _LEFT, _FAILED = "here", "left", "failed"


@dataclass(frozen=True, slots=True)
class NodePeers:
    """This process among those of its node. A process of its own has no folder, and waits for nobody."""

    local_rank: int = 0
    local_world_size: int = 1
    folder: Path | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is the one that does what one process of a node does for all."""
        return self.local_rank == 0

    def check_peers(self) -> None:
        """PeerError if another process of the node failed or was killed; one that has done its work may be gone."""
        for rank in range(self.local_world_size):
            if rank != self.local_rank:
                self._check_peer(rank)

    def publish(self, name: str, content: bytes) -> None:
        """Say something to the others, under a name; what was said under it before is replaced."""
        if self.folder is not None:
            _write_atomically(self.message_file(name), content)

    def read_published(self, name: str) -> bytes | None:
        """What was said under that name; None: nothing yet."""
        if self.folder is None:
            return None
        try:
            return self.message_file(name).read_bytes()
        except FileNotFoundError:
            return None

    def wait_for(self, name: str, on_poll: Callable[[], None]) -> bytes:
        """What is said under that name, waited for; `waiting` is called at every look, and may show that we live."""
        assert self.folder is not None, "a process of its own has nobody to listen to"
        while (content := self.read_published(name)) is None:
            self.check_peers()
            on_poll()
            time.sleep(POLL_S)
        return content

    def wait_with_progress(self, name: str, description: str, progress: Progress) -> bytes:
        """The same, shown as a phase where it takes longer than a moment."""
        shown_from = time.monotonic() + _SHOW_AFTER_S
        while time.monotonic() < shown_from:
            if (content := self.read_published(name)) is not None:
                return content
            self.check_peers()
            time.sleep(POLL_S / 10)
        with progress.phase(f"waiting for {description}") as phase:
            return self.wait_for(name, phase.advance)

    @contextmanager
    def first_rank_first(self, task: str, progress: Progress) -> Iterator[None]:
        """The first process does what is inside, and then the others: they find what it made."""
        if not self.is_first:
            self.wait_with_progress(f"{task} done", f"the first process of this node: {task}", progress)
        yield
        if self.is_first:
            self.publish(f"{task} done", b"")

    def message_file(self, name: str) -> Path:
        """The file of a name. Any text is a name."""
        assert self.folder is not None
        return self.folder / f"word-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"

    def _check_peer(self, rank: int) -> None:
        assert self.folder is not None
        peer_file = self.folder / str(rank)
        if _is_locked(peer_file):
            return
        pid, state, reason = _read_status(peer_file)
        peer = f"process {rank} of the {self.local_world_size} of this node (pid {pid})"
        if state == _FAILED:
            raise PeerError(f"{peer} failed: {reason}")
        if state != _LEFT:
            raise PeerError(
                f"{peer} is gone without a word: it was killed, or the machine ran out of memory (see its kernel's "
                "log); start again: what was made is found"
            )


NO_PEERS = NodePeers()


@contextmanager
def join_node_peers(
    home: ArenaHome, name: str, local_rank: int, local_world_size: int, barrier: Callable[[], None]
) -> Iterator[NodePeers]:
    """Take part as process `number` of the `count` of this node; what ends the block is left for the others to see.

    `name` is the same for all of them, and of no others. `gathered` returns once all have called it.
    """
    folder = home.side_folder(f"{_FOLDER_PREFIX}{name}")
    own_file = folder / str(local_rank)
    with translate_os_errors(own_file):
        fd = os.open(own_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not locks.lock(fd, exclusive=True):
            raise ArenaError(
                f"{own_file}: another process is number {local_rank} of this node; start them with torchrun"
            )
        with translate_os_errors(own_file):
            _write_status(fd, _RUNNING)
        _remove_stale_folders(home.path, keep=folder)
        try:
            barrier()
            yield NodePeers(local_rank, local_world_size, folder)
        except BaseException as error:
            # What another one failed with, the others see for themselves.
            final_state = (_LEFT,) if isinstance(error, PeerError) else (_FAILED, str(error) or type(error).__name__)
            with suppress(OSError):  # then the others find us gone; what happened, the error itself says
                _write_status(fd, *final_state)
            raise
        with translate_os_errors(own_file):
            _write_status(fd, _LEFT)
    finally:
        os.close(fd)
        _remove_unused(folder)


def _is_locked(peer_file: Path) -> bool:
    try:
        fd = os.open(peer_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
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


def _remove_stale_folders(home: Path, keep: Path) -> None:
    """Remove what processes left that were killed long ago."""
    for name in os.listdir(home):
        folder = home / name
        if name.startswith(_FOLDER_PREFIX) and folder != keep:
            try:
                stale = time.time() - folder.stat().st_mtime > _STALE_AFTER_S
            except FileNotFoundError:
                continue  # its processes just left
            if stale:
                _remove_unused(folder)


def _write_atomically(file: Path, content: bytes) -> None:
    """A file that is there as a whole or not at all."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with translate_os_errors(file):
        temporary.write_bytes(content)
        os.replace(temporary, file)


def _write_status(fd: int, state: str, reason: str = "") -> None:
    """Who this is, and how it is with it: in one page, which is there as a whole or not at all."""
    content = f"{os.getpid()}\n{state}\n{reason}".encode(errors="replace")
    write_all(fd, content[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0"), 0)


def _read_status(peer_file: Path) -> tuple[str, str, str]:
    """(its process, how it is with it, why)."""
    try:
        pid, state, reason = peer_file.read_text(errors="replace").rstrip("\0").split("\n", 2)
    except (FileNotFoundError, ValueError):  # killed before it could say anything
        return "?", "", ""
    return pid, state, reason
