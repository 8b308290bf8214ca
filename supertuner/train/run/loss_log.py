"""The append-only logs of a run: losses.jsonl, one line per optimizer step, and validation.jsonl.

A line contains nothing that depends on the moment it was written. A checkpoint stores the length and a checksum of each
file; a resumed run truncates the file to that length and writes the same lines again. So the files of a run that was
killed and resumed equal, bit for bit, those of a run that was not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import xxhash

from supertuner.core import durable
from supertuner.core.errors import CheckpointError
from supertuner.runs.loss_files import encode_step
from supertuner.sinks.training_events import StepRecord

READ_BYTES = 1 << 20


class LogPosition(NamedTuple):
    """A position in the log: the number of bytes before it, and their checksum (XXH3-128)."""

    nbytes: int
    digest: str


class LossLog:
    """A log, opened to append. A file that is not empty must be truncated first, with `truncate` or `reset`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = durable.open_plain_file(path, os.O_RDWR)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}; it must be a plain file") from error
        durable.sync_folder(path.parent)
        self._nbytes, self._digest = 0, xxhash.xxh3_128()
        self._ready = os.fstat(self._fd).st_size == 0

    def append(self, record: StepRecord) -> None:
        """Append a line without syncing: the resumed run writes lines that a crash lost again, with the same bits."""
        self.append_line(encode_step(record))

    def append_line(self, line: bytes) -> None:
        """Append a line that is encoded already; it must end with a newline."""
        assert self._ready, f"{self.path} is not empty: truncate it to the checkpoint's position first"
        remaining, at = memoryview(line), self._nbytes
        try:
            while remaining:
                count = os.pwrite(self._fd, remaining, at)
                remaining, at = remaining[count:], at + count
        except OSError as error:
            problem = f"{self.path} cannot be written: {error.strerror}"
            raise CheckpointError(f"{problem}; free some space and resume") from error
        self._nbytes += len(line)
        self._digest.update(line)

    def position(self) -> LogPosition:
        """The end of the log, for a checkpoint. Call `sync` afterwards, before the checkpoint is published."""
        return LogPosition(self._nbytes, self._digest.hexdigest())

    def sync(self) -> None:
        """Write everything appended so far to the disk. Any thread may call it while others append."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be synced: {error.strerror}; nothing was saved") from error

    def truncate(self, nbytes: int, digest: str) -> None:
        """Drop every line after a position. CheckpointError if the bytes before it are not those of the checkpoint."""
        prefix_digest = self.require_prefix(nbytes, digest)
        os.ftruncate(self._fd, nbytes)
        os.fsync(self._fd)
        self._nbytes, self._digest, self._ready = nbytes, prefix_digest, True

    def require_prefix(self, nbytes: int, digest: str) -> xxhash.xxh3_128:
        """CheckpointError unless the bytes before a position are those of the checkpoint. Changes nothing."""
        prefix_digest, available = xxhash.xxh3_128(), 0
        while available < nbytes and (content := os.pread(self._fd, min(READ_BYTES, nbytes - available), available)):
            prefix_digest.update(content)
            available += len(content)
        if available < nbytes:
            raise self._mismatch(f"it has {available} bytes, and the checkpoint was saved at {nbytes}")
        if prefix_digest.hexdigest() != digest:
            raise self._mismatch(f"its first {nbytes} bytes have changed since the checkpoint")
        return prefix_digest

    def reset(self) -> None:
        """Drop every line: the run begins at step 0."""
        self.truncate(*EMPTY_POSITION)

    def _mismatch(self, problem: str) -> CheckpointError:
        remedy = "put the file back, resume from another checkpoint (`supertuner checkpoint ls RUN` lists them)"
        return CheckpointError(f"{self.path}: {problem}; {remedy}, or resume from this one with another run.name")

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> LossLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


EMPTY_POSITION = LogPosition(0, xxhash.xxh3_128_hexdigest(b""))


class NullLossLog(LossLog):
    """The log of a rank other than 0, which writes nothing."""

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


def open_loss_log(path: Path, rank: int) -> LossLog:
    """Rank 0 writes the log; the others get a log that drops everything."""
    return LossLog(path) if rank == 0 else NullLossLog()
