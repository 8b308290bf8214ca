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
from supertuner.core.events import Phase
from supertuner.core.types import JSON
from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.manifest import STATE, FileFacts, Manifest, json_bytes, manifest_bytes, part_file

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Sharers:
    """The processes that write one checkpoint together, each the rows that it has."""

    rank: int
    ranks: int
    attempt: str
    """What all of them know this save by, and no other save."""
    begins: Mapping[str, Mapping[str, int]]
    """Part → tensor → the row of the whole one that it begins with here. What is not named all of them have."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Everything about a save that can be known before it begins."""

    step: int
    state: bytes
    layouts: Mapping[str, tensor_file.Layout]
    """By file name, in order."""

    def sizes(self) -> list[int]:
        """Bytes of every file. A manifest's length does not depend on what its checksums are."""
        sizes = {STATE: len(self.state), **{name: layout.nbytes for name, layout in self.layouts.items()}}
        manifest = Manifest(self.step, {name: FileFacts(size, "0" * 32) for name, size in sizes.items()})
        return [*sizes.values(), len(manifest_bytes(manifest))]

    def room(self) -> int:
        """What the folder will take on disk, in whole blocks."""
        return sum(-(-size // BLOCK) * BLOCK for size in self.sizes()) + BLOCK


def plan_save(
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, JSON],
    sharers: Sharers | None = None,
) -> Plan:
    try:
        content = json_bytes(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{STATE} of step {step} cannot be written: {error}; nothing was saved") from error
    return Plan(step, content, dict(_layouts(parts, sharers)))


def _layouts(
    parts: Mapping[str, Mapping[str, Tensor]], sharers: Sharers | None
) -> Iterator[tuple[str, tensor_file.Layout]]:
    """What all have, the first writes; of what is shared out, each its own rows, if it has any."""
    for part, tensors in sorted(parts.items()):
        begins = {} if sharers is None else sharers.begins.get(part, {})
        if sharers is None or not begins:
            if sharers is None or sharers.rank == 0:
                yield part_file(part), tensor_file.lay_out(tensors)
            continue
        own = {name: one for name, one in tensors.items() if sharers.rank == 0 or (name in begins and one.numel())}
        metadata = tensor_file.rows_metadata(begins, own)
        yield part_file(part, sharers.rank, sharers.ranks), tensor_file.lay_out(own, metadata)


def write_parts(folder: Path, plan: Plan, phase: Phase, go_on: Callable[[], None]) -> dict[str, FileFacts]:
    """Every tensor file of a plan, synced. `go_on` is called before each piece of it."""
    return {
        name: write_file(folder / name, _while(go_on, layout.chunks()), phase) for name, layout in plan.layouts.items()
    }


def write_file(path: Path, chunks: Iterable[memoryview], phase: Phase) -> FileFacts:
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


def _while(go_on: Callable[[], None], chunks: Iterator[memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        go_on()
        yield chunk
