"""The processes of one node that work on one run: each holds a lock that ends with it, and records how it ended.

They meet in a hidden folder of an arena home. A message of one process is a file that appears complete. A process that
waits for a message checks the others meanwhile, and raises PeerError if one has failed or was killed.
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
from supertuner.core.waiting import waiting_for_other_ranks

POLL_S = 0.1
"""Seconds between two checks of a process that waits for another."""
_SHOW_AFTER_S = 1.0
"""Shorter waits are not shown."""
_FOLDER_PREFIX = ".peers-"
_STALE_AFTER_S = 3600.0
"""A folder without a lock is removed after this time. A younger one may belong to processes that are just starting."""
_STATUS_BYTES = 4096
"""Size of a process's status file, reserved when it starts, so that the final status can be written even when the home
is full.
"""
_RUNNING, _LEFT, _FAILED = "here", "left", "failed"


@dataclass(frozen=True, slots=True)
class NodePeers:
    """This process among those of its node. A single process has no folder and never waits."""

    local_rank: int = 0
    local_world_size: int = 1
    folder: Path | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that works for all processes of the node."""
        return self.local_rank == 0

    def check_peers(self) -> None:
        """Raise PeerError if another process of the node failed or was killed. A process that finished its work may be
        absent.
        """
        for rank in range(self.local_world_size):
            if rank != self.local_rank:
                self._check_peer(rank)

    def publish(self, name: str, content: bytes) -> None:
        """Publish a message under a name; it replaces an earlier message of that name."""
        if self.folder is not None:
            file = self.message_file(name)
            temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
            with translate_os_errors(file):
                temporary.write_bytes(content)
                os.replace(temporary, file)  # so that the message appears complete

    def read_published(self, name: str) -> bytes | None:
        """The message of that name; None if there is none yet."""
        if self.folder is None:
            return None
        try:
            return self.message_file(name).read_bytes()
        except FileNotFoundError:
            return None

    def wait_for(self, name: str, on_poll: Callable[[], None]) -> bytes:
        """Wait for the message of that name. `on_poll` is called at every check and may show that this process is
        alive.
        """
        assert self.folder is not None, "a single process has no other process to wait for"
        with waiting_for_other_ranks(name):
            while (content := self.read_published(name)) is None:
                self.check_peers()
                on_poll()
                time.sleep(POLL_S)
        return content

    def wait_with_progress(self, name: str, description: str, progress: Progress) -> bytes:
        """`wait_for`, shown as a progress phase if it takes longer than a second."""
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
        """Run the block on the first process of the node, then on the others, which find the first one's results."""
        if not self.is_first:
            self.wait_with_progress(f"{task} done", f"the first process of this node to finish: {task}", progress)
        yield
        if self.is_first:
            self.publish(f"{task} done", b"")

    def message_file(self, name: str) -> Path:
        """The file of a message. Any text is a valid name."""
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
            causes = "it was killed, or the machine ran out of memory (see the kernel log)"
            raise PeerError(f"{peer} ended without recording a reason: {causes}; start again: completed work is reused")


NO_PEERS = NodePeers()


@contextmanager
def join_node_peers(
    home: ArenaHome, name: str, local_rank: int, local_world_size: int, barrier: Callable[[], None]
) -> Iterator[NodePeers]:
    """Take part as process `local_rank` of the `local_world_size` of this node; records for the others how the block
    ends.

    `name` is the same for all processes of this group and for no others. `barrier` returns once all of them have called
    it.
    """
    folder = home.side_folder(f"{_FOLDER_PREFIX}{name}")
    own_file = folder / str(local_rank)
    with translate_os_errors(own_file):
        fd = os.open(own_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not locks.lock(fd, exclusive=True):
            problem = f"another process has local rank {local_rank} on this node"
            raise ArenaError(f"{own_file}: {problem}; start them with torchrun")
        with translate_os_errors(own_file):
            _write_status(fd, _RUNNING)
        _remove_stale_folders(home.path, keep=folder)
        try:
            barrier()
            yield NodePeers(local_rank, local_world_size, folder)
        except BaseException as error:
            # The failure of another process is visible to all; this process did not fail itself.
            final_state = (_LEFT,) if isinstance(error, PeerError) else (_FAILED, str(error) or type(error).__name__)
            with suppress(OSError):  # then the others find no status; the exception itself carries the reason
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
        # shared, so that two processes that check at once do not see each other as the owner
        return not locks.try_lock(fd, exclusive=False)
    finally:
        os.close(fd)


def _remove_unused(folder: Path) -> None:
    """Remove the folder unless a process still holds a lock in it; the last process to leave removes it."""
    with suppress(FileNotFoundError):  # two processes that leave at once may both remove it
        if not any(_is_locked(folder / name) for name in os.listdir(folder) if name.isdigit()):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale_folders(home: Path, keep: Path) -> None:
    """Remove folders of processes that were killed long ago."""
    for name in os.listdir(home):
        folder = home / name
        if name.startswith(_FOLDER_PREFIX) and folder != keep:
            with suppress(FileNotFoundError):  # its processes have just left
                if time.time() - folder.stat().st_mtime > _STALE_AFTER_S:
                    _remove_unused(folder)


def _write_status(fd: int, state: str, reason: str = "") -> None:
    """Write process id, state and reason in one page, which is written completely or not at all."""
    content = f"{os.getpid()}\n{state}\n{reason}".encode(errors="replace")
    write_all(fd, content[:_STATUS_BYTES].ljust(_STATUS_BYTES, b"\0"), 0)


def _read_status(peer_file: Path) -> tuple[str, str, str]:
    """(process id, state, reason)."""
    try:
        pid, state, reason = peer_file.read_text(errors="replace").rstrip("\0").split("\n", 2)
    except (FileNotFoundError, ValueError):  # killed before it wrote a status
        return "?", "", ""
    return pid, state, reason
