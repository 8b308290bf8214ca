"""Fingerprints of files by content, which identify what an encoder computes.

A memo file stores the hashes with path, size, times and inode of each file, so that gigabytes are read once per
machine. A lost or damaged memo costs time, but never changes a fingerprint.
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
class _HashedFile:
    """A file's hash, with its size, times and inode when it was hashed.

    Content can only change behind equal metadata if the change time (ctime) is forged.
    """

    nbytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    digest: str

    def matches(self, file_stat: os.stat_result) -> bool:
        return (self.nbytes, self.modified_ns, self.changed_ns, self.inode) == _stat_key(file_stat)


def fingerprint(files: Sequence[Path], memo: Path | None) -> str:
    """32 hex digits for names and contents of `files`, independent of their order and of the model's location.

    `memo` is the memo file; None: hash everything.
    """
    resolved = [file.resolve() for file in files]
    remembered = _read_memo(memo)
    with ThreadPoolExecutor(THREADS) as threads:
        hashed_files = list(threads.map(lambda file: _hash_file(file, remembered.get(str(file))), resolved))
    entries = {str(file): hashed for file, hashed in zip(resolved, hashed_files, strict=True)}
    if memo is not None and any(remembered.get(file) != hashed for file, hashed in entries.items()):
        _write_memo(memo, {**remembered, **entries})
    # Components have files of equal names (config.json), so the name of the component's folder is included.
    pairs = zip(files, hashed_files, strict=True)
    named_digests = sorted((f"{file.parent.name}/{file.name}", hashed.digest) for file, hashed in pairs)
    return xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, named_digests]).encode())


def _hash_file(file: Path, remembered: _HashedFile | None) -> _HashedFile:
    try:
        with file.open("rb", buffering=0) as stream:
            file_stat = os.fstat(stream.fileno())
            if remembered is not None and remembered.matches(file_stat):
                return remembered
            digest = xxhash.xxh3_128()
            buffer = bytearray(min(CHUNK_BYTES, max(1, file_stat.st_size)))
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    return _HashedFile(*_stat_key(file_stat), digest.hexdigest())


def _stat_key(file_stat: os.stat_result) -> tuple[int, int, int, int]:
    return file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns, file_stat.st_ino


def _read_memo(memo: Path | None) -> Mapping[str, _HashedFile]:
    if memo is None or not memo.is_file():
        return {}
    try:
        content = json.loads(memo.read_bytes())
        if content["format"] != FORMAT:
            return {}
        return {file: _HashedFile(**entry) for file, entry in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # a damaged memo: everything is hashed again, and the memo is rewritten


def _write_memo(memo: Path, entries: Mapping[str, _HashedFile]) -> None:
    memo.parent.mkdir(parents=True, exist_ok=True)
    write_json(memo, {"format": FORMAT, "files": {file: asdict(entries[file]) for file in sorted(entries)}})
