"""The files of one arena's folder: no link is followed, nothing is half written unnoticed, errors name the file."""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from supertuner.arena import locks
from supertuner.core.errors import ArenaDamagedError, ArenaError, ArenaFullError, ArenaMissingError
from supertuner.core.types import bytes_text

REMOVED_PREFIX = ".gone-"
"""Prefix of a folder whose arena was removed and whose files are being unlinked."""
BUILDER_FILE, HEAD_FILE, INDEX_FILE = "builder", "head", "index"
HEAD_TEMPORARY_FILE, INDEX_TEMPORARY_FILE = "head.tmp", "index.tmp"

_ARENA_FILES = frozenset((BUILDER_FILE, HEAD_FILE, INDEX_FILE, HEAD_TEMPORARY_FILE, INDEX_TEMPORARY_FILE))
_SEGMENT_FILE = re.compile(r"([0-9]{4,9})\.(data|journal)")
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


@dataclass(slots=True)
class ArenaFolder:
    """An open arena folder. Its files are opened relative to the folder itself, wherever its name has gone since."""

    path: Path
    fd: int = field(default=-1)

    @classmethod
    def open(cls, path: Path) -> ArenaFolder:
        """Raises FileNotFoundError where there is none."""
        try:
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except (NotADirectoryError, OSError) as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise ArenaDamagedError(
                    path, "is a link or a file, not an arena's folder", "remove it by hand"
                ) from error
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_current(self) -> bool:
        """Whether the arena's name still leads to this folder."""
        return locks.leads_to(self.fd, str(self.path))

    def file_path(self, name: str) -> Path:
        return self.path / name

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def create(self, name: str) -> int:
        """A new file, open for reading and writing. Raises FileExistsError if the name is taken."""
        with translate_os_errors(self.file_path(name)):
            return self._open_relative(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_lock(self, name: str) -> int:
        """A file whose only use is its lock; made if missing. FileNotFoundError if the folder itself was removed."""
        try:
            return self._open_relative(name, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            raise
        except OSError:
            with translate_os_errors(self.file_path(name)):
                raise

    def open_file(self, name: str) -> int:
        """A regular file of the arena, to read. A missing one, a link or a device is damage."""
        try:
            fd = self._open_relative(name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            problem = {errno.ENOENT: "is missing", errno.ELOOP: "is a link"}.get(
                error.errno or 0, f"cannot be read: {error}"
            )
            raise ArenaDamagedError(self.file_path(name), problem) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ArenaDamagedError(self.file_path(name), "is not a regular file")
        return fd

    def read(self, name: str, limit: int) -> bytes:
        """The first `limit` bytes of a file."""
        fd = self.open_file(name)
        try:
            with translate_os_errors(self.file_path(name)):
                return os.pread(fd, limit, 0)
        finally:
            os.close(fd)

    def unlink(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def find_foreign_name(self) -> str | None:
        """A name in this folder that no arena has: the folder is somebody's, and is neither reclaimed nor removed."""
        return next(
            (name for name in self.names() if name not in _ARENA_FILES and not _SEGMENT_FILE.fullmatch(name)), None
        )

    def segment_numbers(self, suffix: str = "journal") -> list[int]:
        """Numbers of the segments that have a file of this suffix."""
        matches = (_SEGMENT_FILE.fullmatch(name) for name in self.names())
        return sorted(int(match[1]) for match in matches if match and match[2] == suffix)

    def stored_bytes(self) -> int:
        """Bytes that the files really take: pages and blocks, not lengths."""
        total = 0
        for name in self.names():
            try:
                total += os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:  # removed while we counted
                continue
        return total

    def _open_relative(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)


def check_only_arena_files(folder: ArenaFolder) -> None:
    """ArenaError unless everything in the folder is an arena's."""
    foreign_name = folder.find_foreign_name()
    if foreign_name is not None:
        raise ArenaError(f"{folder.path}: is not an arena: it holds {foreign_name!r}; nothing in it is touched")


def remove_arena(folder: ArenaFolder) -> None:
    """Remove an arena whose exclusive lock we hold, or which we build. Its name is free at once, its bytes soon after.

    A kill in between leaves a folder whose name begins with GONE, for the next sweep.
    """
    check_only_arena_files(folder)
    removed_path = folder.path.with_name(REMOVED_PREFIX + uuid.uuid4().hex)
    with translate_os_errors(folder.path):
        os.rename(folder.path, removed_path)
        delete_folder(folder, removed_path)


def delete_folder(folder: ArenaFolder, path: Path) -> None:
    """Unlink everything in `folder`, which now lies at `path`, and the folder itself."""
    for name in folder.names():
        folder.unlink(name)
    os.rmdir(path)


class translate_os_errors:  # not a generator: this stands around every write of a unit
    """Turn the system's refusals into errors that name file and remedy. FileExistsError is an answer: it passes."""

    __slots__ = ("file",)

    def __init__(self, file: object) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError) or isinstance(error, FileExistsError):
            return
        if error.errno in _NO_SPACE_ERRNOS:
            raise ArenaFullError(_no_space_message(self.file, error)) from error
        raise ArenaError(
            f"{self.file}: {error.strerror or error}; check the disk or memory below it, "
            "or use another home (arena.home, arena.disk_home)"
        ) from error


@contextmanager
def unless_abandoned(folder: ArenaFolder) -> Iterator[None]:
    """What looks like damage of an arena that is being built may be that its owner abandoned it meanwhile: say so."""
    try:
        yield
    except (ArenaDamagedError, FileNotFoundError) as error:
        if folder.is_current():
            raise
        raise ArenaMissingError(f"{folder.path}: its owner abandoned the build; build it again") from error


def _no_space_message(file: object, error: OSError) -> str:
    parent = Path(str(file)).parent
    left_text = ""
    if parent.is_dir():
        file_system = os.statvfs(parent)
        left_text = f" ({bytes_text(file_system.f_bavail * file_system.f_frsize)} left below {parent.parent})"
    return (
        f"{file}: {error.strerror}{left_text}; free some with `supertuner arena rm`, enlarge that file system, "
        "or name another home (arena.home, arena.disk_home)"
    )
