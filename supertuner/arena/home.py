"""The folder in which this user's arenas live: attach, build, list, remove; nothing is owned by its name alone."""

from __future__ import annotations

import os
import stat
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from supertuner.arena import locks
from supertuner.arena.build import Build, Joined
from supertuner.arena.files import (
    BUILDER,
    GONE,
    HEAD,
    HEAD_TEMPORARY,
    INDEX,
    Folder,
    discard,
    empty,
    naming,
    require_own,
    unless_abandoned,
)
from supertuner.arena.format import Head, Life, checked_name, pack_head
from supertuner.arena.live import LiveReader
from supertuner.arena.mapping import map_segments
from supertuner.arena.reader import Reader, Verify
from supertuner.arena.sealed import open_sealed, read_head
from supertuner.arena.segments import restore
from supertuner.arena.states import ArenaInfo, describe, has_ended, head_or_none, is_building
from supertuner.core.bulk_io import write_all
from supertuner.core.errors import ArenaBusyError, ArenaDamagedError, ArenaError, ArenaExistsError, ArenaMissingError

MARK = ".supertuner-arenas"
"""An empty file that tells a home from any other folder."""

_ENTER_S = 10.0
"""Exclusive locks are held for moments: to look, or to unlink."""


def default_home() -> Path:
    """A folder of this user's on tmpfs."""
    return Path(f"/dev/shm/supertuner-{os.getuid()}")


class Home:
    def __init__(self, path: Path) -> None:
        """Made if missing, for this user only.

        Refused: a link, another user's folder, one that others may write to, one that holds anything else.
        """
        self.path = path.absolute()
        with naming(self.path):
            with suppress(FileExistsError):  # what is there is looked at next
                os.makedirs(self.path, 0o700)
            found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode):
            raise ArenaError(f"{self.path}: is a link or a file; name a folder as the arenas' home (arena.home)")
        if found.st_uid != os.geteuid():
            raise ArenaError(f"{self.path}: belongs to user {found.st_uid}; name a home of your own (arena.home)")
        if found.st_mode & 0o022:
            raise ArenaError(f"{self.path}: others may write to it; `chmod go-w {self.path}` or name another home")
        self._require_ours()

    def beside(self, name: str) -> Path:
        """A folder of this home that is no arena, made if missing: hidden, and never swept."""
        assert name.startswith(".") and not name.startswith(GONE), name
        self._mark()
        path = self.path / name
        with naming(path):
            path.mkdir(0o700, exist_ok=True)
        return path

    def ls(self) -> list[ArenaInfo]:
        names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        return [info for name in names if (info := self._info(name)) is not None]

    def stored_bytes(self, name: str) -> int:
        """What an arena takes by now, sealed or not; 0 if there is none."""
        try:
            folder = Folder.open(self.path / checked_name(name))
        except FileNotFoundError:
            return 0
        try:
            return folder.stored_bytes()
        finally:
            folder.close()

    def attach(self, name: str, *, verify: Verify = "on_demand") -> Reader:
        """A sealed arena, validated. ArenaMissing if there is none."""
        folder = self._enter(name)
        try:
            if not folder.has(INDEX):
                raise ArenaMissingError(f"{folder.path}: is not sealed; a build of it goes on or has died")
            head, catalog = open_sealed(folder)
            memory = map_segments(folder, catalog.segments, catalog.total)
        except BaseException:
            folder.close()
            raise
        return Reader(folder, catalog, memory, verify, on_close=lambda: self._leave_run(head, name))

    def attach_live(self, name: str) -> LiveReader:
        """An arena that may still be growing; call `refresh()` to see more of it."""
        folder = self._enter(name)
        try:
            with unless_abandoned(folder):
                return LiveReader(folder, self._head_of(folder))
        except BaseException:
            folder.close()
            raise

    def build(self, name: str, *, life: Life = "until_removed", wait_s: float = 0.0, resume: bool = False) -> Build:
        """Begin an arena; what a dead builder left under that name is wiped first.

        With `resume`, its committed units are kept instead, and leaving this build without sealing keeps them too.
        ArenaBusy if another process builds it (after `wait_s`); ArenaExists if it is sealed already.
        """
        path, end = self.path / checked_name(name), time.monotonic() + wait_s
        self._mark()
        while True:
            with naming(path), suppress(FileExistsError):  # makedirs looks twice, and the folder may go in between
                os.mkdir(path, 0o700)
            build = self._try_build(path, life, end - time.monotonic(), resume)
            if build is not None:
                return build

    def attach_or_build(
        self, name: str, *, life: Life = "until_removed", verify: Verify = "on_demand", wait_s: float = 0.0
    ) -> Reader | Build:
        """Whichever is possible first: of several processes that ask, one builds and the others wait for it."""
        end = time.monotonic() + wait_s
        while True:
            try:
                return self.attach(name, verify=verify)
            except ArenaMissingError:
                pass  # then we build it
            try:
                return self.build(name, life=life)
            except ArenaBusyError:
                if time.monotonic() >= end:
                    raise
            except ArenaExistsError:
                continue  # sealed between our two looks: attach to it

    def join(self, name: str) -> Joined:
        """Take part in a build that another process owns. ArenaMissing if none goes on."""
        folder = self._enter(name)
        try:
            with unless_abandoned(folder):
                if folder.has(INDEX) or not is_building(folder):
                    raise ArenaMissingError(f"{folder.path}: nobody is building it")
                return Joined(folder, self._head_of(folder))
        except BaseException:
            folder.close()
            raise

    def remove(self, name: str) -> None:
        """ArenaBusy while anyone is attached."""
        folder = self._open(name)
        try:
            if not locks.lock(folder.fd, exclusive=True):
                raise ArenaBusyError(f"{folder.path}: in use by another process; end it first")
            if folder.is_current():
                discard(folder)
        finally:
            folder.close()

    def sweep(self) -> list[str]:
        """Reclaim what dead builders left and what has outlived its stated life; the names of what went."""
        return [name for name in sorted(os.listdir(self.path)) if self._sweep(name)]

    def _require_ours(self) -> None:
        """A folder with things in it is a home only if arenas were built there: a sweep must never meet other files."""
        with naming(self.path):
            names = os.listdir(self.path)
        if names and MARK not in names:
            raise ArenaError(
                f"{self.path}: holds other things ({sorted(names)[0]!r}); name an empty folder, or one that does not "
                "exist yet, as the arenas' home (arena.home, arena.disk_home)"
            )

    def _mark(self) -> None:
        """From now on this folder is a home."""
        with naming(self.path):
            os.close(os.open(self.path / MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    def _try_build(self, path: Path, life: Life, wait_s: float, resume: bool) -> Build | None:
        """None: the folder went away, or was wiped; try again."""
        folder, builder, head = Folder(path), -1, None
        try:
            folder = Folder.open(path)
            if not locks.lock(folder.fd, exclusive=False, wait_s=wait_s):
                raise ArenaBusyError(f"{path}: is being removed by another process")
            require_own(folder)
            builder = folder.open_lock(BUILDER)
            # What others do before they release either lock, they did before we look from here on.
            if not locks.lock(builder, exclusive=True, wait_s=wait_s):
                raise ArenaBusyError(f"{path}: another process builds it; wait for it or end it")
            if folder.is_current():
                head = self._begin(folder, life, resume)
            return None if head is None else Build(folder, builder, head)
        except FileNotFoundError:
            return None
        finally:
            if head is None:
                _leave(folder, builder)

    def _begin(self, folder: Folder, life: Life, resume: bool) -> Head | None:
        """The head of the build that we own now; None if there were remains, which are gone."""
        if folder.has(INDEX):
            remove = f"remove it with `supertuner arena rm {folder.path.name}`"
            raise ArenaExistsError(f"{folder.path}: is built already; attach to it, or {remove}")
        if folder.names() == [BUILDER]:
            return _write_head(folder, Head(uuid.uuid4().bytes, time.time(), life, resume))
        old = head_or_none(folder)
        if resume and old is not None:
            restore(folder, old.uuid)
            return replace(old, resumable=True)
        if not locks.lock(folder.fd, exclusive=True):
            raise ArenaBusyError(
                f"{folder.path}: its builder died, but another process still has it open; end that first"
            )
        if folder.is_current():
            discard(folder)
        return None

    def _open(self, name: str) -> Folder:
        path = self.path / checked_name(name)
        try:
            return Folder.open(path)
        except FileNotFoundError as error:
            raise ArenaMissingError(f"{path}: no such arena; `supertuner arena ls` lists them") from error

    def _enter(self, name: str) -> Folder:
        """The arena's folder, with a shared lock: it cannot be removed while that is open."""
        while True:
            folder = self._open(name)
            if not locks.lock(folder.fd, exclusive=False, wait_s=_ENTER_S):
                folder.close()
                raise ArenaBusyError(f"{folder.path}: is being removed by another process")
            if folder.is_current():
                return folder
            folder.close()

    def _head_of(self, folder: Folder) -> Head:
        if not folder.has(HEAD):
            raise ArenaMissingError(f"{folder.path}: its build has not begun")
        return read_head(folder)

    def _info(self, name: str) -> ArenaInfo | None:
        try:
            folder = Folder.open(self.path / name)
        except FileNotFoundError:
            return None
        except ArenaDamagedError as error:
            return ArenaInfo(name, "damaged", 0, problem=str(error))
        try:
            info = describe(folder)
            return info if folder.is_current() else None
        finally:
            folder.close()

    def _leave_run(self, head: Head, name: str) -> None:
        """A `run` arena ends with its last reader."""
        if head.life == "run":
            self._sweep(name)

    def _sweep(self, name: str) -> bool:
        try:
            folder = Folder.open(self.path / name)
        except (FileNotFoundError, ArenaDamagedError):  # gone, or not an arena: `ls` shows it
            return False
        try:
            if not locks.try_lock(folder.fd, exclusive=True) or not folder.is_current() or folder.foreign() is not None:
                return False
            if name.startswith(GONE):
                empty(folder, folder.path)
                return True
            if name.startswith(".") or not has_ended(folder, time.time()):
                return False
            discard(folder)
            return True
        finally:
            folder.close()


def _leave(folder: Folder, builder: int) -> None:
    folder.close()
    if builder >= 0:
        os.close(builder)


def _write_head(folder: Folder, head: Head) -> Head:
    """Begin an arena; one that cannot even begin leaves no folder behind."""
    fd = folder.create(HEAD_TEMPORARY)
    try:
        with naming(folder.file(HEAD)):
            write_all(fd, pack_head(head), 0)
            os.fsync(fd)
            os.rename(HEAD_TEMPORARY, HEAD, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    except BaseException:
        discard(folder)
        raise
    finally:
        os.close(fd)
    return head
