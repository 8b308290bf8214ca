"""File access inside one arena folder: never follows a link, opens files relative to the open folder, and raises errors
that name the file and a remedy.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import ArenaDamagedError, ArenaError, ArenaFullError
from supertuner.core.types import bytes_text

REMOVED_PREFIX = ".gone-"
"""Name prefix of a folder whose arena was removed and whose files are still being deleted."""
BUILDER_FILE, HEAD_FILE, INDEX_FILE = "builder", "head", "index"
HEAD_TEMPORARY_FILE, INDEX_TEMPORARY_FILE = "head.tmp", "index.tmp"

_ARENA_FILES = frozenset((BUILDER_FILE, HEAD_FILE, INDEX_FILE, HEAD_TEMPORARY_FILE, INDEX_TEMPORARY_FILE))
_SEGMENT_FILE = re.compile(r"([0-9]{4,9})\.(data|journal)")
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


@dataclass(slots=True)
class ArenaFolder(CloseOnExit):
    """An open arena folder. Files are opened relative to its descriptor, so a renamed or replaced path
    does not matter.
    """

    path: Path
    fd: int

    @classmethod
    def open(cls, path: Path) -> ArenaFolder:
        """Open the folder. Raises FileNotFoundError if it does not exist, ArenaDamagedError if it is a
        link or a file.
        """
        try:
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise ArenaDamagedError(path, "is a link or a file, not an arena folder", "remove it manually") from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_current(self) -> bool:
        """Whether the arena's path still refers to this folder: it may have been replaced before it was locked."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def file_path(self, name: str) -> Path:
        return self.path / name

    def has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def create(self, name: str) -> int:
        """Create a file and open it for reading and writing. Raises FileExistsError if the name exists."""
        with translate_os_errors(self.file_path(name)):
            return self._open_relative(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_lock(self, name: str) -> int:
        """Open the lock file, creating it if it is missing. Raises FileNotFoundError if the folder itself
        was removed.
        """
        with translate_os_errors(self.file_path(name), passing=FileNotFoundError):
            return self._open_relative(name, os.O_RDWR | os.O_CREAT)

    def open_file(self, name: str) -> int:
        """Open a regular file for reading. Raises ArenaDamagedError if it is missing, a link or a device."""
        try:
            fd = self._open_relative(name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            problems = {errno.ENOENT: "is missing", errno.ELOOP: "is a link"}
            problem = problems.get(error.errno or 0, f"cannot be opened: {error}")
            raise ArenaDamagedError(self.file_path(name), problem) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ArenaDamagedError(self.file_path(name), "is not a regular file")
        return fd

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """`open_file` for the duration of a block."""
        fd = self.open_file(name)
        try:
            yield fd
        finally:
            os.close(fd)

    def read(self, name: str, limit: int) -> bytes:
        """The first `limit` bytes of a file."""
        with self.opened(name) as fd, translate_os_errors(self.file_path(name)):
            return os.pread(fd, limit, 0)

    def unlink(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):  # removed already
            os.unlink(name, dir_fd=self.fd)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def find_foreign_name(self) -> str | None:
        """The first name in this folder that is not an arena file, or None.

        A folder with such a name belongs to the user: it is neither reclaimed nor removed.
        """
        names = (name for name in self.names() if name not in _ARENA_FILES)
        return next((name for name in names if not _SEGMENT_FILE.fullmatch(name)), None)

    def segment_numbers(self, suffix: str = "journal") -> list[int]:
        """Numbers of the segments that have a file with this suffix."""
        matches = (_SEGMENT_FILE.fullmatch(name) for name in self.names())
        return sorted(int(match[1]) for match in matches if match and match[2] == suffix)

    def stored_bytes(self) -> int:
        """Bytes that the files occupy: allocated blocks, not file lengths."""
        total = 0
        for name in self.names():
            with suppress(FileNotFoundError):  # removed during the loop
                total += os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks * 512
        return total

    def _open_relative(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)


def check_only_arena_files(folder: ArenaFolder) -> None:
    """Raise ArenaError if the folder holds anything but arena files."""
    foreign_name = folder.find_foreign_name()
    if foreign_name is not None:
        raise ArenaError(f"{folder.path}: is not an arena: it contains {foreign_name!r}; nothing in it was changed")


def remove_arena(folder: ArenaFolder) -> None:
    """Remove an arena that this process builds or has locked exclusively.

    The name is free immediately, the bytes shortly afterwards. A kill in between leaves a folder whose name begins with
    `REMOVED_PREFIX`, which the next sweep deletes.
    """
    check_only_arena_files(folder)
    removed_path = folder.path.with_name(REMOVED_PREFIX + uuid.uuid4().hex)
    with translate_os_errors(folder.path):
        os.rename(folder.path, removed_path)
        delete_folder(folder, removed_path)


def delete_folder(folder: ArenaFolder, path: Path) -> None:
    """Delete all files of `folder`, which is now at `path`, and the folder itself."""
    for name in folder.names():
        folder.unlink(name)
    os.rmdir(path)


class translate_os_errors:  # a class and not a generator, because it wraps every write of a unit
    """Convert OSError to ArenaError or ArenaFullError with file and remedy; callers handle those of type `passing`."""

    __slots__ = ("file", "passing")

    def __init__(self, file: object, passing: type[OSError] = FileExistsError) -> None:
        self.file, self.passing = file, passing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, self.passing):
            return
        if error.errno in _NO_SPACE_ERRNOS:
            parent, left = Path(str(self.file)).parent, ""
            if parent.is_dir():
                file_system = os.statvfs(parent)
                left = f" ({bytes_text(file_system.f_bavail * file_system.f_frsize)} left in {parent.parent})"
            remedy = "free space with `supertuner arena rm`, enlarge that file system, or name another home"
            message = f"{self.file}: {error.strerror}{left}; {remedy} (arena.home, arena.disk_home)"
            raise ArenaFullError(message) from error
        remedy = "check the disk or memory below it, or use another home (arena.home, arena.disk_home)"
        raise ArenaError(f"{self.file}: {error.strerror or error}; {remedy}") from error
