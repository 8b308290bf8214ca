"""The format of a checkpoint's folder: file names, the manifest, plain JSON, and how its files are opened and checked.

    step-00000040/
      manifest.json         format version, step, size and checksum of every other file, and a checksum of itself
      state.json            plain values: step, samples consumed, library versions …
      <part>.safetensors    one per part: adapter.<expert>, optimizer.<expert>, ema.<expert>, random
      <part>.shard-00001-of-00004.safetensors    instead, for a sharded part: the rows that one rank holds

Equal contents give equal bytes: keys are sorted, and a checkpoint contains no times. Nothing here writes, and every
value read is validated.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from supertuner.core.errors import CheckpointError
from supertuner.core.events import ProgressPhase
from supertuner.core.types import JSON, bytes_text

CHECKPOINTS_DIR = "checkpoints"
"""The folder of checkpoints in a run's folder."""
FORMAT_VERSION = 2
"""The newest version, which has sharded parts. A checkpoint without sharded parts is written as version 1."""
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
TENSORS_SUFFIX = ".safetensors"
MAX_JSON_BYTES = 64 << 20
MAX_FILES = 1 << 16
PART_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
SHARD_PATTERN = re.compile(r"(?P<part>.+)\.shard-[0-9]{5}-of-[0-9]{5}\.safetensors")
CHECKPOINT_PATTERN = re.compile(r"step-([0-9]{8,18})")
READ_BYTES = 4 << 20
HASH_PATTERN = re.compile(r"[0-9a-f]{32}")
OTHER_CHECKPOINT_REMEDY = "resume from another one (`supertuner checkpoint ls RUN` lists them)"
NO_FOLLOW_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""Do not follow links, and do not block on pipes or devices."""


class FileFacts(NamedTuple):
    nbytes: int
    checksum: str
    """XXH3-128, 32 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    step: int
    files: Mapping[str, FileFacts]
    """Every file but the manifest, sorted by name."""

    @property
    def part_files(self) -> dict[str, list[str]]:
        """Part → its files, in the order of the ranks that wrote them."""
        files_by_part: dict[str, list[str]] = {}
        for name in self.files:
            if name.endswith(TENSORS_SUFFIX):
                shard = SHARD_PATTERN.fullmatch(name)
                part = shard["part"] if shard else name.removesuffix(TENSORS_SUFFIX)
                files_by_part.setdefault(part, []).append(name)
        return files_by_part

    @property
    def nbytes(self) -> int:
        return sum(facts.nbytes for facts in self.files.values())


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_checkpoint_name(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for any other name. Each step has exactly one valid name."""
    match = CHECKPOINT_PATTERN.fullmatch(name)
    return int(match[1]) if match and checkpoint_name(int(match[1])) == name else None


def part_file_name(part: str, rank: int | None = None, world_size: int = 1) -> str:
    """The file name of a part, or of one rank's shard of it."""
    return f"{part}{TENSORS_SUFFIX}" if rank is None else f"{part}.shard-{rank:05d}-of-{world_size:05d}{TENSORS_SUFFIX}"


def damaged_checkpoint(file: Path, problem: str, remedy: str = OTHER_CHECKPOINT_REMEDY) -> CheckpointError:
    return CheckpointError(f"{file}: {problem}; {remedy}")


def json_bytes(value: Mapping[str, JSON]) -> bytes:
    """JSON with sorted keys. A file name that is not UTF-8 survives as JSON escapes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    body: dict[str, JSON] = {
        "format": 2 if any(map(SHARD_PATTERN.fullmatch, manifest.files)) else 1,
        "step": manifest.step,
        "files": files_json(manifest.files),
    }
    return json_bytes({**body, "checksum": xxhash.xxh3_128_hexdigest(json_bytes(body))})


def parse_manifest(content: bytes, file: Path) -> CheckpointManifest:
    """The validated manifest; CheckpointError, naming `file`, if it is invalid. A newer version is reported first."""
    value = parse_object(content, file)
    version = value.get("format")
    if type(version) is not int or version < 1:
        raise damaged_checkpoint(file, f"its format is {version!r}, which is not a version number")
    if version > FORMAT_VERSION:
        remedy = "update SuperTuner, or " + OTHER_CHECKPOINT_REMEDY
        raise damaged_checkpoint(file, f"it has format {version}, this version reads up to {FORMAT_VERSION}", remedy)
    if set(value) != {"format", "step", "files", "checksum"}:
        keys = ", ".join(sorted(value))
        raise damaged_checkpoint(file, f"it has the keys {keys}; expected format, step, files, checksum")
    step, files = value["step"], value["files"]
    if type(step) is not int or not 0 <= step < 10**18:
        raise damaged_checkpoint(file, f"its step is {step!r}, not a whole number from 0 on")
    if not isinstance(files, dict) or STATE_FILE not in files or len(files) > MAX_FILES:
        raise damaged_checkpoint(file, f"its files are not an object with {STATE_FILE} and at most {MAX_FILES} files")
    manifest = CheckpointManifest(step, parse_files(files, file))
    _require_all_shards(manifest, file)
    # Compared as bytes, so that any change of the file is found, even one that does not change its meaning.
    if manifest_bytes(manifest) != content:
        raise damaged_checkpoint(file, "it has changed since it was written: its own checksum does not match")
    return manifest


def parse_object(content: bytes, file: Path) -> dict[str, JSON]:
    """Parse a JSON object; NaN and infinity are refused."""
    try:
        value = json.loads(content, parse_constant=_parse_finite, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        raise damaged_checkpoint(file, f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged_checkpoint(file, f"it is a JSON {type(value).__name__}, not an object")
    return value


def files_json(files: Mapping[str, FileFacts]) -> dict[str, JSON]:
    return {name: {"bytes": facts.nbytes, "xxh3_128": facts.checksum} for name, facts in files.items()}


def parse_files(value: Mapping[str, JSON], file: Path) -> dict[str, FileFacts]:
    """The inverse of `files_json`, sorted by name; CheckpointError, naming `file`, if it is invalid."""
    files = {}
    for name, facts in sorted(value.items()):
        part = name.removesuffix(TENSORS_SUFFIX)
        if name != STATE_FILE and (part == name or not is_part_name(part)):
            raise damaged_checkpoint(file, f"it lists {name!r}, which is not a valid file name in a checkpoint")
        if not isinstance(facts, dict) or set(facts) != {"bytes", "xxh3_128"}:
            raise damaged_checkpoint(file, f"its entry for {name} lacks bytes or xxh3_128")
        nbytes, checksum = facts["bytes"], facts["xxh3_128"]
        if type(nbytes) is not int or not 0 <= nbytes < 1 << 63:
            raise damaged_checkpoint(file, f"{name} has {nbytes!r} bytes, which is not a valid size")
        if not isinstance(checksum, str) or not HASH_PATTERN.fullmatch(checksum):
            raise damaged_checkpoint(file, f"{name} has the checksum {checksum!r}, not 32 hexadecimal digits")
        files[name] = FileFacts(nbytes, checksum)
    return files


def _require_all_shards(manifest: CheckpointManifest, file: Path) -> None:
    """CheckpointError unless each part has one file, or one of each rank."""
    for part, names in manifest.part_files.items():
        shards = [part_file_name(part, rank, len(names)) for rank in range(len(names))]
        if names not in ([part_file_name(part)], shards):
            raise damaged_checkpoint(file, f"of {part} it lists {', '.join(names[:4])}, which are not all of its files")


def is_part_name(name: str) -> bool:
    return len(name) <= 120 and PART_PATTERN.fullmatch(name) is not None


def _parse_finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Open the folder itself, so that files opened relative to it cannot be elsewhere."""
    try:
        folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else str(error.strerror)
        raise damaged_checkpoint(path, f"is not a checkpoint folder: {reason}") from error
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@contextmanager
def open_file(folder_fd: int, file: Path) -> Iterator[int]:
    """Open a regular file of the folder for reading. CheckpointError for links, devices and folders."""
    try:
        fd = os.open(file.name, NO_FOLLOW_FLAGS, dir_fd=folder_fd)
    except OSError as error:
        is_link = error.errno == errno.ELOOP  # open(2): the file is a link, and O_NOFOLLOW was given
        reason = "it is a link, which a checkpoint never contains" if is_link else error.strerror
        raise damaged_checkpoint(file, f"cannot be opened: {reason}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise damaged_checkpoint(file, "it is not a file")
        yield fd
    except OSError as error:
        raise damaged_checkpoint(file, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def read_json_file(file: Path) -> bytes:
    """The content of a JSON file of a checkpoint; CheckpointError if it is far too large."""
    with open_folder(file.parent) as folder_fd, open_file(folder_fd, file) as fd:
        size = os.fstat(fd).st_size
        if size > MAX_JSON_BYTES:
            raise damaged_checkpoint(file, f"it has {bytes_text(size)}, more than {bytes_text(MAX_JSON_BYTES)}")
        return os.pread(fd, size + 1, 0)


def check_size(fd: int, file: Path, facts: FileFacts) -> None:
    size = os.fstat(fd).st_size
    if size != facts.nbytes:
        raise damaged_checkpoint(file, f"it has {size} bytes, and {facts.nbytes} were written")


def check_content(fd: int, file: Path, facts: FileFacts, phase: ProgressPhase) -> None:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(READ_BYTES, facts.nbytes)))
    at = 0
    while count := os.preadv(fd, [buffer], at) if buffer else 0:
        digest.update(buffer[:count])
        at += count
        phase.advance(nbytes=count)
    check_digest(file, digest.hexdigest(), facts)


def check_digest(file: Path, checksum: str, facts: FileFacts) -> None:
    if checksum != facts.checksum:
        problem = "it has changed since it was written"
        raise damaged_checkpoint(file, f"{problem}: its checksum is {checksum}, not {facts.checksum}")
