"""Checkpoints on disk: whole and new, or not there at all. A kill at any moment leaves the one before, or this one.

A save goes to a hidden folder; every file and the folder are synced; then it is renamed into place. Removing goes the
other way round: renamed to a hidden name first. What a kill left under hidden names is finished off by the next save,
or by whoever asks for the latest. All this is for the process that holds the run's lock.

    .saving-step-00000040      being written
    .replaced-step-00000040    an earlier one of the same step, until the new one has its name
    .removing-step-00000020    no longer wanted
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.core.durable import sync_folder
from supertuner.core.errors import CheckpointError
from supertuner.core.events import NullSink, Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON, bytes_text
from supertuner.train.checkpoint.load import (
    LoadedCheckpoint,
    entry_names,
    find_checkpoints,
    load_checkpoint,
    read_manifest,
    verify_checkpoint,
)
from supertuner.train.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointManifest,
    checkpoint_name,
    is_part_name,
    manifest_bytes,
    parse_checkpoint_name,
)
from supertuner.train.checkpoint.sharded import announce_save, collect_shards, discard_sharded_save, write_shard
from supertuner.train.checkpoint.write import (
    CheckpointSharding,
    CheckpointWritePlan,
    plan_save,
    write_file,
    write_parts,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CHECKPOINTS_DIR",
    "CheckpointSharding",
    "LoadedCheckpoint",
    "checkpoint_name",
    "find_checkpoints",
    "finish_interrupted_saves",
    "load_checkpoint",
    "load_latest",
    "save_checkpoint",
    "set_aside_later_checkpoints",
    "verify_checkpoint",
]

SAVING_PREFIX, REPLACED_PREFIX, REMOVING_PREFIX = ".saving-", ".replaced-", ".removing-"
UNUSED_PREFIX = "unused-"


def save_checkpoint(
    folder: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, JSON],
    *,
    keep: int,
    host: HostFacts,
    sink: Sink | None = None,
    progress: Progress | None = None,
    raise_if_abandoned: Callable[[], None] = lambda: None,
    sharding: CheckpointSharding | None = None,
) -> Path:
    """Write the checkpoint of `step` into `folder`, and remove all but the last `keep`; where it is.

    One of the same step stays if it is the same, and is replaced if it is not. Checkpoints of later steps are left
    alone: they are damaged ones that `latest` passed over. `go_on` is called again and again until the checkpoint gets
    its name; if it raises, nothing is left behind. Of several `sharers` each calls this, and the first, who holds the
    run's lock, publishes what all of them wrote; the others may be done before.
    """
    assert keep >= 1 and step >= 0 and all(map(is_part_name, parts)), f"{keep=} {step=} {list(parts)}"
    plan = plan_save(step, parts, state, sharding)
    sink = sink or NullSink()
    with _as_checkpoint_error(folder, step):
        if sharding is not None and sharding.rank != 0:
            write_shard(folder / f"{SAVING_PREFIX}{checkpoint_name(step)}", plan, sharding, raise_if_abandoned)
            return folder / checkpoint_name(step)
        _ensure_folder(folder)
        finish_interrupted_saves(folder, sink)
        _require_disk_space(folder, plan, host, 1 if sharding is None else sharding.world_size)
        new, manifest = _write_hidden_folder(folder, plan, progress or NullSink(), raise_if_abandoned, sharding)
        path = _publish(folder, new, manifest)
    _prune(folder, step, keep, sink)
    return path


def load_latest(folder: Path, sink: Sink | None = None, progress: Progress | None = None) -> LoadedCheckpoint | None:
    """The newest checkpoint that is whole. A newer one that is not is told, passed over, and stays where it is."""
    sink = sink or NullSink()
    if not folder.exists():
        return None
    finish_interrupted_saves(folder, sink)
    for info in reversed(find_checkpoints(folder)):
        try:
            return load_checkpoint(info.path, progress)
        except CheckpointError as error:
            sink.emit(WarningEvent(f"checkpoint of step {info.step}", f"passed over: {error}"))
    return None


def set_aside_later_checkpoints(folder: Path, step: int, sink: Sink) -> None:
    """Give checkpoints of later steps than `step` another name: the run goes on from there, and will have others.

    Without this, a run that was resumed from an older checkpoint and killed would go on from the last of the old ones.
    """
    for name in entry_names(folder):
        later_step = parse_checkpoint_name(name)
        if later_step is None or later_step <= step:
            continue
        aside = next(
            candidate
            for n in range(1 << 30)
            if not (candidate := folder / f"{UNUSED_PREFIX}{name}{f'-{n}' if n else ''}").exists()
        )
        os.rename(folder / name, aside)
        sync_folder(folder)
        sink.emit(
            WarningEvent(
                f"checkpoint of step {later_step}", f"is later than step {step}, where this goes on; now {aside}"
            )
        )


def finish_interrupted_saves(folder: Path, sink: Sink) -> None:
    """Finish what a killed save began. Whole checkpoints stay; one that lost its name to nobody gets it back."""
    for name in entry_names(folder):
        hidden_prefix = next(
            (prefix for prefix in (SAVING_PREFIX, REPLACED_PREFIX, REMOVING_PREFIX) if name.startswith(prefix)), None
        )
        if hidden_prefix is None or parse_checkpoint_name(name.removeprefix(hidden_prefix)) is None:
            continue
        target = folder / name.removeprefix(hidden_prefix)
        if hidden_prefix == REPLACED_PREFIX and not os.path.lexists(target):
            os.rename(folder / name, target)
            sync_folder(folder)
        else:
            _remove(folder, name, sink)


@contextmanager
def _as_checkpoint_error(folder: Path, step: int) -> Iterator[None]:
    """The system's refusal in our words; what matters to the user is that the last checkpoint is still there."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be saved: {where}{error.strerror}; {_intact_checkpoint_text(folder)}"
        ) from error


def _intact_checkpoint_text(folder: Path) -> str:
    try:
        intact = [found for found in find_checkpoints(folder) if found.problem is None]
    except OSError as error:
        return f"those in {folder} were not touched, and cannot be listed: {error.strerror}"
    return f"the last good one is intact: {intact[-1].path}" if intact else f"there is none yet in {folder}"


def _require_disk_space(folder: Path, plan: CheckpointWritePlan, host: HostFacts, writer_count: int) -> None:
    """Those who share write as much as the first, or a few rows less."""
    needed, free = plan.disk_bytes() * writer_count, host.free_bytes(folder)
    if needed > free:
        raise CheckpointError(
            f"the checkpoint of step {plan.step} needs {bytes_text(needed)}, {bytes_text(free)} are free below "
            f"{folder}: {bytes_text(needed - free)} are missing; free some space, or lower checkpoints.keep; "
            f"{_intact_checkpoint_text(folder)}"
        )


def _ensure_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def _write_hidden_folder(
    folder: Path,
    plan: CheckpointWritePlan,
    progress: Progress,
    raise_if_abandoned: Callable[[], None],
    sharding: CheckpointSharding | None,
) -> tuple[Path, CheckpointManifest]:
    """Everything of the checkpoint, synced, under its hidden name."""
    new = folder / f"{SAVING_PREFIX}{checkpoint_name(plan.step)}"
    new.mkdir()
    try:
        with progress.phase(f"saving {checkpoint_name(plan.step)}", nbytes=sum(plan.file_sizes()[:-1])) as phase:
            if sharding is not None:
                announce_save(new, sharding)
            files = {STATE_FILE: write_file(new / STATE_FILE, [memoryview(plan.state)], phase)}
            files |= write_parts(new, plan, phase, raise_if_abandoned)
            if sharding is not None:
                files |= collect_shards(new, sharding, raise_if_abandoned)
        manifest = CheckpointManifest(plan.step, dict(sorted(files.items())))
        write_file(new / MANIFEST_FILE, [memoryview(manifest_bytes(manifest))], NullSink().phase("manifest"))
        sync_folder(new)
        raise_if_abandoned()
    except BaseException:
        _discard(new, sharding)
        raise
    return new, manifest


def _publish(folder: Path, new: Path, manifest: CheckpointManifest) -> Path:
    name = checkpoint_name(manifest.step)
    target = folder / name
    if _is_identical(target, manifest):
        _discard(new)
        return target
    if os.path.lexists(target):
        os.rename(target, folder / f"{REPLACED_PREFIX}{name}")  # a kill from here to the next line is undone by `sweep`
    os.rename(new, target)
    sync_folder(folder)
    return target


def _discard(new: Path, sharding: CheckpointSharding | None = None) -> None:
    with suppress(OSError):  # then the next save removes it; what matters now is what the caller has to tell
        shutil.rmtree(new) if sharding is None else discard_sharded_save(new, sharding)


def _is_identical(path: Path, manifest: CheckpointManifest) -> bool:
    try:
        return path.is_dir() and read_manifest(path) == manifest and not verify_checkpoint(path)
    except CheckpointError:
        return False  # whatever is there is not whole, and is replaced


def _prune(folder: Path, step: int, keep: int, sink: Sink) -> None:
    """Remove what was replaced, and checkpoints before `step` but the last `keep - 1`. `step` itself is the newest."""
    try:
        entries = entry_names(folder)
    except OSError as error:
        message = f"cannot be listed: {error.strerror}; earlier checkpoints stay until the next save"
        return sink.emit(WarningEvent(str(folder), message))
    for name in entries:
        if name.startswith(REPLACED_PREFIX) and parse_checkpoint_name(name.removeprefix(REPLACED_PREFIX)) is not None:
            _remove(folder, name, sink)
    earlier = sorted(
        earlier_step
        for name in entries
        if (earlier_step := parse_checkpoint_name(name)) is not None and earlier_step < step
    )
    for old in earlier[: max(0, len(earlier) - (keep - 1))]:
        _remove(folder, checkpoint_name(old), sink)


def _remove(folder: Path, name: str, sink: Sink) -> None:
    """Remove one folder of ours; it loses its name first, so that no half of a checkpoint is ever found under it.

    A folder that cannot be removed is no reason to end a run: it is told, and tried again at the next save.
    """
    original_name = next(
        (name.removeprefix(p) for p in (SAVING_PREFIX, REPLACED_PREFIX, REMOVING_PREFIX) if name.startswith(p)), name
    )
    removing = folder / f"{REMOVING_PREFIX}{original_name}"
    try:
        if name != removing.name:
            os.rename(folder / name, removing)
            sync_folder(folder)
        if removing.is_symlink() or not removing.is_dir():
            removing.unlink()
        else:
            shutil.rmtree(removing)
    except OSError as error:
        message = f"cannot be removed: {error.strerror}; it takes up space until the next save, or until you remove it"
        sink.emit(WarningEvent(str(folder / name), message))
