"""The identity of files by their content: what an encoder computes is known by the bytes it was loaded from.

A memo remembers what was hashed, by path, size, times and inode, so that gigabytes are read once per machine. It is
only ever a shortcut: a memo that is lost or damaged costs time, never truth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import xxhash

from supertuner.core.durable import write_json
from supertuner.core.errors import ModelError

FORMAT: Final = 1
CHUNK_BYTES: Final = 8 << 20
THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class _Known:
    """What a file was when it was hashed. Content changed behind an equal stamp would need a forged change time."""

    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    digest: str

    def still(self, stamp: os.stat_result) -> bool:
        return (self.nbytes, self.modified_ns, self.changed_ns, self.inode) == _stamp(stamp)


def fingerprint(files: Sequence[Path], memo: Path | None) -> str:
    """32 hex digits over the names and contents of `files`, whatever folder they lie in and in whatever order."""
    resolved = [file.resolve() for file in files]
    known = _read_memo(memo)
    with ThreadPoolExecutor(THREADS) as threads:
        hashed = list(threads.map(lambda file: _hashed(file, known.get(str(file))), resolved))
    found = {str(file): one for file, one in zip(resolved, hashed, strict=True)}
    if memo is not None and any(known.get(file) != one for file, one in found.items()):
        _write_memo(memo, {**known, **found})
    # Parts have files of the same name (config.json), so the name of the folder belongs to the name of the file.
    named = sorted((f"{file.parent.name}/{file.name}", one.digest) for file, one in zip(files, hashed, strict=True))
    return xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, named]).encode())


def _hashed(file: Path, known: _Known | None) -> _Known:
    try:
        with file.open("rb", buffering=0) as opened:
            stamp = os.fstat(opened.fileno())
            if known is not None and known.still(stamp):
                return known
            digest = xxhash.xxh3_128()
            room = bytearray(min(CHUNK_BYTES, max(1, stamp.st_size)))
            while count := opened.readinto(room):
                digest.update(memoryview(room)[:count])
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    return _Known(*_stamp(stamp), digest.hexdigest())


def _stamp(stamp: os.stat_result) -> tuple[int, int, int, int]:
    return stamp.st_size, stamp.st_mtime_ns, stamp.st_ctime_ns, stamp.st_ino


def _read_memo(memo: Path | None) -> Mapping[str, _Known]:
    if memo is None or not memo.is_file():
        return {}
    try:
        read = json.loads(memo.read_bytes())
        if read["format"] != FORMAT:
            return {}
        return {file: _Known(**entry) for file, entry in read["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # not what was written: everything is hashed again, and the memo is written anew


def _write_memo(memo: Path, known: Mapping[str, _Known]) -> None:
    memo.parent.mkdir(parents=True, exist_ok=True)
    write_json(memo, {"format": FORMAT, "files": {file: asdict(known[file]) for file in sorted(known)}})
