"""The folder that holds this user's arenas: attach, build, list, remove. Locks, not names, decide who owns an arena."""

from __future__ import annotations

import os
import stat
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from supertuner.arena import locks
from supertuner.arena.arena_info import ArenaInfo, describe_arena, has_expired, is_building, try_read_head
from supertuner.arena.build import ArenaBuild, BuildParticipant
from supertuner.arena.folder import (
    BUILDER_FILE,
    HEAD_FILE,
    HEAD_TEMPORARY_FILE,
    INDEX_FILE,
    REMOVED_PREFIX,
    ArenaFolder,
    check_only_arena_files,
    delete_folder,
    remove_arena,
    translate_os_errors,
)
from supertuner.arena.format import ArenaHead, ArenaLifetime, check_arena_name, pack_head
from supertuner.arena.index import open_sealed, read_head
from supertuner.arena.mapping import map_segments
from supertuner.arena.reader import ArenaReader, VerifyMode
from supertuner.arena.segments import restore_segments
from supertuner.core.bulk_io import write_all
from supertuner.core.closing import close_on_error
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError, ArenaError, ArenaExistsError, ArenaMissingError

HOME_MARKER = ".supertuner-arenas"
"""An empty file that marks a folder as an arena home."""

_LOCK_WAIT_S = 10.0
"""Exclusive locks are held only for moments: to inspect or to delete."""


def default_home() -> Path:
    """This user's folder on tmpfs."""
    return Path(f"/dev/shm/supertuner-{os.getuid()}")


class ArenaHome:
    def __init__(self, path: Path) -> None:
        """Create the folder if it is missing, accessible only to this user.

        Raises ArenaError for a link, another user's folder, a folder that others can write to, or one that holds other
        files.
        """
        self.path = path.absolute()
        with translate_os_errors(self.path):
            with suppress(FileExistsError):  # what exists is checked next
                os.makedirs(self.path, 0o700)
            status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode):
            raise ArenaError(f"{self.path}: is a link or a file; set arena.home to a folder")
        if status.st_uid != os.geteuid():
            raise ArenaError(f"{self.path}: belongs to user {status.st_uid}; set arena.home to a folder of your own")
        if status.st_mode & 0o022:
            remedy = f"run `chmod go-w {self.path}`, or set arena.home to another folder"
            raise ArenaError(f"{self.path}: other users can write to it; {remedy}")
        with translate_os_errors(self.path):
            names = os.listdir(self.path)
        if names and HOME_MARKER not in names:  # else a sweep might delete files of others
            remedy = "set arena.home or arena.disk_home to an empty folder, or to one that does not exist yet"
            raise ArenaError(f"{self.path}: contains other files ({sorted(names)[0]!r}); {remedy}")

    def side_folder(self, name: str) -> Path:
        """Create a hidden folder of this home that is not an arena. A sweep never deletes it."""
        assert name.startswith(".") and not name.startswith(REMOVED_PREFIX), name
        self._write_marker()
        path = self.path / name
        with translate_os_errors(path):
            path.mkdir(0o700, exist_ok=True)
        return path

    def list_arenas(self) -> list[ArenaInfo]:
        names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        return [info for name in names if (info := self._arena_info(name)) is not None]

    def stored_bytes(self, name: str) -> int:
        """Bytes that an arena occupies, sealed or not; 0 if it does not exist."""
        path = self.path / check_arena_name(name)
        with suppress(FileNotFoundError), ArenaFolder.open(path) as folder:  # no arena takes no space
            return folder.stored_bytes()
        return 0

    def attach(self, name: str, *, verify: VerifyMode = "on_demand", may_remove: bool = True) -> ArenaReader:
        """Open a sealed arena and validate it. Raises ArenaMissingError if there is none.

        The last reader of an arena with lifetime "run" removes it, unless `may_remove` is false.
        """
        with close_on_error(self._open_locked(name)) as folder:
            if not folder.has(INDEX_FILE):
                raise ArenaMissingError(f"{folder.path}: is not sealed; its build is in progress or has died")
            head, catalog = open_sealed(folder)
            memory = map_segments(folder, catalog.segments, catalog.total_bytes)
        on_close = partial(self._sweep_arena, name) if may_remove and head.life == "run" else None
        return ArenaReader(folder, catalog, memory, verify, on_close)

    def build(
        self, name: str, *, life: ArenaLifetime = "until_removed", wait_s: float = 0.0, resume: bool = False
    ) -> ArenaBuild:
        """Begin an arena. Deletes first what a dead builder left under this name.

        With `resume`, keeps its committed units instead, and leaving this build without sealing keeps them as well.
        Raises ArenaBusyError if another process is building it after `wait_s`, ArenaExistsError if it is already
        sealed.
        """
        path, deadline = self.path / check_arena_name(name), time.monotonic() + wait_s
        self._write_marker()
        while True:
            # mkdir, because makedirs checks twice and the folder may disappear in between
            with translate_os_errors(path), suppress(FileExistsError):
                os.mkdir(path, 0o700)
            build = self._try_build(path, life, deadline - time.monotonic(), resume)
            if build is not None:
                return build

    def attach_or_build(
        self, name: str, *, life: ArenaLifetime = "until_removed", verify: VerifyMode = "on_demand", wait_s: float = 0.0
    ) -> ArenaReader | ArenaBuild:
        """Attach if the arena is sealed, else build it: of several processes that call this, one builds and the others
        wait.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self.attach(name, verify=verify)
            except ArenaMissingError:
                pass  # build it below
            try:
                return self.build(name, life=life)
            except ArenaBusyError:
                if time.monotonic() >= deadline:
                    raise
            except ArenaExistsError:
                continue  # sealed between the two attempts: attach to it

    def join(self, name: str) -> BuildParticipant:
        """Take part in a build that another process owns. Raises ArenaMissingError if no build is in progress."""
        with close_on_error(self._open_locked(name)) as folder:
            try:
                if folder.has(INDEX_FILE) or not is_building(folder):
                    raise ArenaMissingError(f"{folder.path}: no process is building it")
                if not folder.has(HEAD_FILE):
                    raise ArenaMissingError(f"{folder.path}: its build has not started")
                return BuildParticipant(folder, read_head(folder))
            except (ArenaDamagedError, FileNotFoundError) as error:
                if folder.is_current():
                    raise
                raise ArenaMissingError(f"{folder.path}: its owner abandoned the build; build it again") from error

    def remove(self, name: str) -> None:
        """Remove an arena. Raises ArenaBusyError while a process is attached."""
        with self._open_folder(name) as folder:
            if not locks.lock(folder.fd, exclusive=True):
                raise ArenaBusyError(f"{folder.path}: is in use by another process; end that process first")
            if folder.is_current():
                remove_arena(folder)

    def sweep(self) -> list[str]:
        """Delete what dead builders left and arenas whose lifetime is over; return their names."""
        return [name for name in sorted(os.listdir(self.path)) if self._sweep_arena(name)]

    def _write_marker(self) -> None:
        """Mark this folder as an arena home."""
        with translate_os_errors(self.path):
            os.close(os.open(self.path / HOME_MARKER, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    def _try_build(self, path: Path, life: ArenaLifetime, wait_s: float, resume: bool) -> ArenaBuild | None:
        """None if the folder disappeared or was wiped: the caller tries again."""
        with ExitStack() as stack, suppress(FileNotFoundError):  # the folder disappeared
            folder = stack.enter_context(ArenaFolder.open(path))
            if not locks.lock(folder.fd, exclusive=False, wait_s=wait_s):
                raise ArenaBusyError(f"{path}: is being removed by another process")
            check_only_arena_files(folder)
            builder = folder.open_lock(BUILDER_FILE)
            stack.callback(os.close, builder)
            # From here on everything is visible that other processes did before they released either lock.
            if not locks.lock(builder, exclusive=True, wait_s=wait_s):
                raise ArenaBusyError(f"{path}: another process is building it; wait for it or end it")
            if folder.is_current() and (head := self._begin_build(folder, life, resume)) is not None:
                stack.pop_all()
                return ArenaBuild(folder, builder, head)
        return None

    def _begin_build(self, folder: ArenaFolder, life: ArenaLifetime, resume: bool) -> ArenaHead | None:
        """The head of the build that this process now owns; None if remains of an earlier build had to be deleted
        first.
        """
        if folder.has(INDEX_FILE):
            remedy = f"remove it with `supertuner arena rm {folder.path.name}`"
            raise ArenaExistsError(f"{folder.path}: is already built; attach to it, or {remedy}")
        if folder.names() == [BUILDER_FILE]:
            return _write_head(folder, ArenaHead(uuid.uuid4().bytes, time.time(), life, resume))
        existing_head = try_read_head(folder)
        if resume and existing_head is not None:
            restore_segments(folder, existing_head.uuid)
            return replace(existing_head, resumable=True)
        if not locks.lock(folder.fd, exclusive=True):
            raise ArenaBusyError(f"{folder.path}: its builder died, but another process has it open; end that process")
        if folder.is_current():
            remove_arena(folder)
        return None

    def _open_folder(self, name: str) -> ArenaFolder:
        path = self.path / check_arena_name(name)
        try:
            return ArenaFolder.open(path)
        except FileNotFoundError as error:
            raise ArenaMissingError(f"{path}: no such arena; `supertuner arena ls` lists them") from error

    def _open_locked(self, name: str) -> ArenaFolder:
        """The arena's folder with a shared lock: it cannot be removed while it is open."""
        while True:
            folder = self._open_folder(name)
            if not locks.lock(folder.fd, exclusive=False, wait_s=_LOCK_WAIT_S):
                folder.close()
                raise ArenaBusyError(f"{folder.path}: is being removed by another process")
            if folder.is_current():
                return folder
            folder.close()

    def _arena_info(self, name: str) -> ArenaInfo | None:
        try:
            folder = ArenaFolder.open(self.path / name)
        except FileNotFoundError:
            return None
        except ArenaDamagedError as error:
            return ArenaInfo(name, "damaged", 0, problem=str(error))
        with folder:
            info = describe_arena(folder)
            return info if folder.is_current() else None

    def _sweep_arena(self, name: str) -> bool:
        try:
            folder = ArenaFolder.open(self.path / name)
        except (FileNotFoundError, ArenaDamagedError):  # removed, or not an arena: `arena ls` shows it
            return False
        with folder:
            if not locks.try_lock(folder.fd, exclusive=True) or not folder.is_current() or folder.find_foreign_name():
                return False
            if name.startswith(REMOVED_PREFIX):
                delete_folder(folder, folder.path)
                return True
            if name.startswith(".") or not has_expired(folder, time.time()):
                return False
            remove_arena(folder)
            return True


def _write_head(folder: ArenaFolder, head: ArenaHead) -> ArenaHead:
    """Write the head of a new arena; if that fails, remove the folder."""
    fd = folder.create(HEAD_TEMPORARY_FILE)
    try:
        with translate_os_errors(folder.file_path(HEAD_FILE)):
            write_all(fd, pack_head(head), 0)
            os.fsync(fd)
            os.rename(HEAD_TEMPORARY_FILE, HEAD_FILE, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    except BaseException:
        remove_arena(folder)
        raise
    finally:
        os.close(fd)
    return head
