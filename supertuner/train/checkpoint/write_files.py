"""Plans and writes the files of a checkpoint, by one process or by all ranks together.

File sizes are known before anything is written; checksums are computed while writing. Ranks that shard the weights
write their own files into one hidden folder, which rank 0 publishes. They coordinate through files in that folder only:
the writer threads cannot use the process group, which training uses at the same time.

    .saving-step-00000040/
      attempt-<save id>               written by rank 0: the folder belongs to this save, not to a killed one
      wrote-00001-<save id>.json      written last by each other rank: its files with sizes and checksums

Rank 0 removes both before it writes the manifest, and `attempt-` when it abandons the save: a rank that no longer finds
`attempt-` stops. A rank that survived an earlier job still has that job's folder open, so it cannot write into a new
folder of the same name.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from supertuner.core.bulk_io import write_all
from supertuner.core.durable import FILE_MODE
from supertuner.core.errors import CheckpointError
from supertuner.core.events import NullSink, ProgressPhase
from supertuner.core.types import JSON
from supertuner.train.checkpoint import manifest as manifests
from supertuner.train.checkpoint import tensor_file

if TYPE_CHECKING:
    from torch import Tensor


DISK_BLOCK_BYTES = 4096
POLL_S = 0.02
DISCARD_S = 5.0
ABANDONED_MESSAGE = "rank 0 abandoned the checkpoint"


class SaveAbandonedError(CheckpointError):
    """A save that was stopped before it was complete, because its checkpoint is no longer wanted."""


@dataclass(frozen=True, slots=True)
class CheckpointSharding:
    """How several ranks write one checkpoint together: each writes the rows that it holds."""

    rank: int
    world_size: int
    save_id: str
    """Identifies this save: the same on all ranks, and different for every save."""
    row_offsets: Mapping[str, Mapping[str, int]]
    """Part → tensor → index of the first row held here. Tensors that are not listed are whole on all ranks."""


@dataclass(frozen=True, eq=False, slots=True)
class CheckpointContents:
    """What a checkpoint of a step consists of."""

    step: int
    parts: Mapping[str, Mapping[str, Tensor]]
    """Part → name → tensor; each part becomes a file, or one per rank."""
    state: Mapping[str, JSON]


@dataclass(frozen=True, eq=False, slots=True)
class CheckpointWritePlan:
    """Everything about a save that is known before it begins."""

    step: int
    state: bytes
    layouts: Mapping[str, tensor_file.TensorFileLayout]
    """File name → layout, in the order of writing."""

    def file_sizes(self) -> list[int]:
        """Bytes of every file, the manifest last. Its length does not depend on the values of its checksums."""
        sizes = {manifests.STATE_FILE: len(self.state)} | {name: file.nbytes for name, file in self.layouts.items()}
        files = {name: manifests.FileFacts(size, "0" * 32) for name, size in sizes.items()}
        return [*sizes.values(), len(manifests.manifest_bytes(manifests.CheckpointManifest(self.step, files)))]

    def disk_bytes(self) -> int:
        """Bytes that the folder takes on disk, in whole blocks."""
        return sum(-(-size // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES for size in self.file_sizes()) + DISK_BLOCK_BYTES


def plan_save(contents: CheckpointContents, sharding: CheckpointSharding | None = None) -> CheckpointWritePlan:
    """CheckpointError if the state is not plain JSON."""
    try:
        state = manifests.json_bytes(contents.state)
    except (TypeError, ValueError) as error:
        message = f"{manifests.STATE_FILE} of step {contents.step} cannot be written: {error}; nothing was saved"
        raise CheckpointError(message) from error
    layouts = {}
    for part, tensors in sorted(contents.parts.items()):
        row_offsets = {} if sharding is None else sharding.row_offsets.get(part, {})
        if sharding is not None and row_offsets:  # each rank writes its own rows, if it has any
            is_first, file = sharding.rank == 0, manifests.part_file_name(part, sharding.rank, sharding.world_size)
            own = {name: t for name, t in tensors.items() if is_first or (name in row_offsets and t.numel())}
            metadata = tensor_file.row_offsets_metadata(row_offsets, own)
            layouts[file] = tensor_file.plan_tensor_file(own, metadata)
        elif sharding is None or sharding.rank == 0:  # rank 0 writes what all ranks hold
            layouts[manifests.part_file_name(part)] = tensor_file.plan_tensor_file(tensors)
    return CheckpointWritePlan(contents.step, state, layouts)


def write_parts(
    folder: Path, plan: CheckpointWritePlan, phase: ProgressPhase, raise_if_abandoned: Callable[[], None]
) -> dict[str, manifests.FileFacts]:
    """Write and sync every tensor file of a plan; `raise_if_abandoned` is called before each chunk."""

    def checked(chunks: Iterator[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            raise_if_abandoned()
            yield chunk

    return {name: write_file(folder / name, checked(layout.chunks()), phase) for name, layout in plan.layouts.items()}


def write_file(path: Path, chunks: Iterable[memoryview], phase: ProgressPhase) -> manifests.FileFacts:
    """Write a new file and sync it; returns its size and checksum. An OSError names the file."""
    digest, at = xxhash.xxh3_128(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        for chunk in chunks:
            write_all(fd, chunk, at)
            digest.update(chunk)
            at += len(chunk)
            phase.advance(nbytes=len(chunk))
        os.fsync(fd)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(fd)
    return manifests.FileFacts(at, digest.hexdigest())


def announce_save(folder: Path, sharding: CheckpointSharding) -> None:
    """Rank 0: mark the folder as that of this save, so that the other ranks write into it."""
    write_file(folder / _announcement_name(sharding), [], NullSink().phase("announcing"))


def write_shard(
    folder: Path, plan: CheckpointWritePlan, sharding: CheckpointSharding, raise_if_abandoned: Callable[[], None]
) -> None:
    """Ranks other than 0: wait for the folder, write this rank's files, and report them in a file."""
    fd, phase = _open_announced_folder(folder, sharding, raise_if_abandoned), NullSink().phase("writing")
    folder_by_fd = Path(f"/proc/self/fd/{fd}")  # this folder, even after it is renamed

    def raise_if_unwanted() -> None:
        raise_if_abandoned()
        if not (folder_by_fd / _announcement_name(sharding)).exists():
            raise SaveAbandonedError(ABANDONED_MESSAGE)

    try:
        facts = write_parts(folder_by_fd, plan, phase, raise_if_unwanted)
        os.fsync(fd)
        completion_file = folder_by_fd / _completion_name(sharding, sharding.rank)
        unfinished = completion_file.with_name(f".{completion_file.name}")
        write_file(unfinished, [memoryview(manifests.json_bytes(manifests.files_json(facts)))], phase)
        os.rename(unfinished, completion_file)
    except FileNotFoundError as error:  # rank 0 removed the folder, or files in it
        raise SaveAbandonedError(ABANDONED_MESSAGE) from error
    except OSError as error:
        error.filename = str(folder / Path(error.filename or "").name)  # the real path instead of /proc
        raise
    finally:
        os.close(fd)


def discard_sharded_save(folder: Path, sharding: CheckpointSharding) -> None:
    """Rank 0: abandon the save and remove its folder, again until no other rank creates a file in it any more."""
    (folder / _announcement_name(sharding)).unlink(missing_ok=True)
    end = time.monotonic() + DISCARD_S
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > end:
                raise
            time.sleep(POLL_S)


def collect_shards(
    folder: Path, sharding: CheckpointSharding, raise_if_abandoned: Callable[[], None]
) -> dict[str, manifests.FileFacts]:
    """Rank 0: wait until all other ranks have written, and remove the coordination files. Returns the ranks' files."""
    files: dict[str, manifests.FileFacts] = {}
    for rank in range(1, sharding.world_size):
        completion_file = folder / _completion_name(sharding, rank)
        while not completion_file.exists():
            raise_if_abandoned()
            time.sleep(POLL_S)
        facts = manifests.parse_object(completion_file.read_bytes(), completion_file)
        files |= manifests.parse_files(facts, completion_file)
        completion_file.unlink()
    (folder / _announcement_name(sharding)).unlink()
    return files


def _open_announced_folder(folder: Path, sharding: CheckpointSharding, raise_if_abandoned: Callable[[], None]) -> int:
    """Wait for the folder of this save; returns an open descriptor of it."""
    while True:
        raise_if_abandoned()
        with suppress(FileNotFoundError):  # rank 0 has not created it yet
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if os.path.exists(f"/proc/self/fd/{fd}/{_announcement_name(sharding)}"):
                return fd
            os.close(fd)
        time.sleep(POLL_S)


def _announcement_name(sharding: CheckpointSharding) -> str:
    return f"attempt-{sharding.save_id}"


def _completion_name(sharding: CheckpointSharding, rank: int) -> str:
    return f"wrote-{rank:05d}-{sharding.save_id}.json"
