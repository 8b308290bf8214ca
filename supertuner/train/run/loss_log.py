"""losses.jsonl: one line per optimizer step, in which everything is a function of the run and nothing of the moment.

A checkpoint keeps how long the file was and a checksum of it; a resumed run cuts the file there and writes the same
lines again. So the file of a run that was killed and resumed is, bit for bit, the one of a run that was not.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import xxhash

from supertuner.core import durable
from supertuner.core.errors import CheckpointError
from supertuner.core.types import JSON

LOSSES_FILE = "losses.jsonl"
READ_BYTES = 1 << 20
FLOAT_FIELDS = ("loss", "grad_norm", "rate")
"""Fields whose value may be no number; JSON has no word for that, so `not_finite` says which, and what it was."""


@dataclass(frozen=True, slots=True)
class LossRecord:
    step: int
    """Optimizer steps done, this one included."""
    samples: int
    """Samples consumed, this window's included."""
    window: int
    """Samples of this window."""
    expert: str
    """Which one was trained."""
    loss: float
    """Mean over the window's samples."""
    grad_norm: float | None
    """Before clipping; None where it is not computed."""
    rate: float
    """Learning rate of this step."""


class LogPosition(NamedTuple):
    """A place in the log: how many bytes lie before it, and their checksum (XXH3-128)."""

    nbytes: int
    digest: str


class LossLog:
    """The log, opened to append. A file that holds something already must be `cut` first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}; it must be a plain file") from error
        durable.sync_folder(path.parent)
        self._nbytes = 0
        self._digest = xxhash.xxh3_128()
        self._ready = os.fstat(self._fd).st_size == 0

    def append(self, record: LossRecord) -> None:
        """Not synced: what a crash takes is written again by the resumed run, with the same bits."""
        self.append_line(encode_record(record))

    def append_line(self, line: bytes) -> None:
        """The same for a line of another log that is cut and continued like this one; it ends with a newline."""
        assert self._ready, f"{self.path} holds lines of before: cut it where the checkpoint says"
        remaining, at = memoryview(line), self._nbytes
        try:
            while remaining:
                count = os.pwrite(self._fd, remaining, at)
                remaining, at = remaining[count:], at + count
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}; make room and resume") from error
        self._nbytes += len(line)
        self._digest.update(line)

    def position(self) -> LogPosition:
        """Where the log ends now: for the checkpoint, which must not be seen before a `sync` that comes after this."""
        return LogPosition(self._nbytes, self._digest.hexdigest())

    def sync(self) -> None:
        """Everything that was appended is safe on disk. From any thread, while others are appended."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be synced: {error.strerror}; nothing was saved") from error

    def truncate(self, nbytes: int, digest: str) -> None:
        """Go back to a position: drop every line behind it. What lies before it must be what the checkpoint saw."""
        prefix_digest = self.require_prefix(nbytes, digest)
        os.ftruncate(self._fd, nbytes)
        os.fsync(self._fd)
        self._nbytes, self._digest, self._ready = nbytes, prefix_digest, True

    def require_prefix(self, nbytes: int, digest: str) -> xxhash.xxh3_128:
        """CheckpointError unless what lies before a position is what the checkpoint saw; nothing is changed."""
        available, prefix_digest = _prefix_digest(self._fd, nbytes)
        if available < nbytes:
            raise self._mismatch(f"it has {available} bytes, the checkpoint saw {nbytes}")
        if prefix_digest.hexdigest() != digest:
            raise self._mismatch(f"its first {nbytes} bytes are not those that the checkpoint saw")
        return prefix_digest

    def reset(self) -> None:
        """Drop every line: the run starts at its first step."""
        self.truncate(*EMPTY_POSITION)

    def _mismatch(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {problem}; put the file back as it was, resume from another checkpoint (`supertuner checkpoint "
            "ls RUN` lists them), or resume from this one in a run with another run.name"
        )

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> LossLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


EMPTY_POSITION = LogPosition(0, xxhash.xxh3_128_hexdigest(b""))


class NullLossLog(LossLog):
    """The log of a process of which another one keeps it."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)

    def append_line(self, line: bytes) -> None:
        pass

    def position(self) -> LogPosition:
        return EMPTY_POSITION

    def sync(self) -> None:
        pass

    def truncate(self, nbytes: int, digest: str) -> None:
        pass

    def require_prefix(self, nbytes: int, digest: str) -> xxhash.xxh3_128:
        return xxhash.xxh3_128()

    def close(self) -> None:
        pass


def encode_record(record: LossRecord) -> bytes:
    """One line. Numbers as Python's repr, which reads back to the same bits."""
    fields: dict[str, JSON] = {name: getattr(record, name) for name in record.__slots__}
    not_finite = {name: str(value) for name in FLOAT_FIELDS if not _is_finite(value := fields[name])}
    for name in not_finite:
        fields[name] = None
    if not_finite:
        fields["not_finite"] = not_finite
    return (json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_losses(path: Path) -> list[LossRecord]:
    """Every whole line of a log, also while the run writes it; a missing file has none."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_parse_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _parse_record(line: bytes, where: str) -> LossRecord:
    try:
        fields = json.loads(line)
        fields.update({name: float(text) for name, text in fields.pop("not_finite", {}).items()})
        return LossRecord(**_validate_fields(fields))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a line of a loss log ({error}); remove that line") from error


def _validate_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in fields.items():
        allowed_types: tuple[type, ...] = (str,) if name == "expert" else (int,)
        if name in FLOAT_FIELDS:
            allowed_types = (int, float, type(None)) if name == "grad_norm" else (int, float)
        if not isinstance(value, allowed_types) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}")
    return fields


def _is_finite(value: JSON) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _prefix_digest(fd: int, nbytes: int) -> tuple[int, xxhash.xxh3_128]:
    """(how many of the first `nbytes` bytes there are, their checksum as it can be gone on with)."""
    digest, at = xxhash.xxh3_128(), 0
    while at < nbytes and (content := os.pread(fd, min(READ_BYTES, nbytes - at), at)):
        digest.update(content)
        at += len(content)
    return at, digest
