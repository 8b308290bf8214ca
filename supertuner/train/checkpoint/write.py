"""The files of a checkpoint, laid out and written: their sizes are known before, their checksums come on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from supertuner.core.bulk_io import write_all
from supertuner.core.errors import CheckpointError
from supertuner.core.events import ProgressPhase
from supertuner.core.types import JSON
from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.manifest import (
    STATE_FILE,
    CheckpointManifest,
    FileFacts,
    json_bytes,
    manifest_bytes,
    part_file_name,
)

if TYPE_CHECKING:
    from torch import Tensor

DISK_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class CheckpointSharding:
    """The processes that write one checkpoint together, each the rows that it has."""

    rank: int
    world_size: int
    save_id: str
    """What all of them know this save by, and no other save."""
    row_offsets: Mapping[str, Mapping[str, int]]
    """Part → tensor → the row of the whole one that it begins with here. What is not named all of them have."""


@dataclass(frozen=True, eq=False, slots=True)
class CheckpointWritePlan:
    """Everything about a save that can be known before it begins."""

    step: int
    state: bytes
    layouts: Mapping[str, tensor_file.TensorFileLayout]
    """By file name, in order."""

    def file_sizes(self) -> list[int]:
        """Bytes of every file. A manifest's length does not depend on what its checksums are."""
        sizes = {STATE_FILE: len(self.state), **{name: layout.nbytes for name, layout in self.layouts.items()}}
        manifest = CheckpointManifest(self.step, {name: FileFacts(size, "0" * 32) for name, size in sizes.items()})
        return [*sizes.values(), len(manifest_bytes(manifest))]

    def disk_bytes(self) -> int:
        """What the folder will take on disk, in whole blocks."""
        return sum(-(-size // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES for size in self.file_sizes()) + DISK_BLOCK_BYTES


def plan_save(
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, JSON],
    sharding: CheckpointSharding | None = None,
) -> CheckpointWritePlan:
    try:
        content = json_bytes(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{STATE_FILE} of step {step} cannot be written: {error}; nothing was saved") from error
    return CheckpointWritePlan(step, content, dict(_plan_files(parts, sharding)))


def _plan_files(
    parts: Mapping[str, Mapping[str, Tensor]], sharding: CheckpointSharding | None
) -> Iterator[tuple[str, tensor_file.TensorFileLayout]]:
    """What all have, the first writes; of what is shared out, each its own rows, if it has any."""
    for part, tensors in sorted(parts.items()):
        row_offsets = {} if sharding is None else sharding.row_offsets.get(part, {})
        if sharding is None or not row_offsets:
            if sharding is None or sharding.rank == 0:
                yield part_file_name(part), tensor_file.plan_tensor_file(tensors)
            continue
        own_tensors = {
            name: one for name, one in tensors.items() if sharding.rank == 0 or (name in row_offsets and one.numel())
        }
        metadata = tensor_file.row_offsets_metadata(row_offsets, own_tensors)
        yield (
            part_file_name(part, sharding.rank, sharding.world_size),
            tensor_file.plan_tensor_file(own_tensors, metadata),
        )


def write_parts(
    folder: Path, plan: CheckpointWritePlan, phase: ProgressPhase, raise_if_abandoned: Callable[[], None]
) -> dict[str, FileFacts]:
    """Every tensor file of a plan, synced. `go_on` is called before each piece of it."""
    return {
        name: write_file(folder / name, _check_before_each(raise_if_abandoned, layout.chunks()), phase)
        for name, layout in plan.layouts.items()
    }


def write_file(path: Path, chunks: Iterable[memoryview], phase: ProgressPhase) -> FileFacts:
    digest, at = xxhash.xxh3_128(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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
    return FileFacts(at, digest.hexdigest())


def _check_before_each(raise_if_abandoned: Callable[[], None], chunks: Iterator[memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        raise_if_abandoned()
        yield chunk
