"""Makes a checkpoint durable: it is on disk completely, or not at all. A kill at any moment leaves the previous one, or
this one.

A save writes into a hidden folder, syncs every file and the folder, and then renames the folder. Removing does the
reverse: it renames to a hidden name first. What a kill leaves under hidden names is removed by the next save, or when
the latest checkpoint is searched. Only the process that holds the run's lock does any of this.

    .saving-step-00000040      being written
    .replaced-step-00000040    an earlier checkpoint of the same step, until the new one has its name
    .removing-step-00000020    being removed
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from supertuner.arena.run_context import RunContext
from supertuner.core.durable import sync_folder
from supertuner.core.errors import CheckpointError
from supertuner.core.events import NullSink, Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import bytes_text
from supertuner.train.checkpoint import load
from supertuner.train.checkpoint import manifest as manifests
from supertuner.train.checkpoint import write_files as write

SAVING_PREFIX, REPLACED_PREFIX, REMOVING_PREFIX = HIDDEN_PREFIXES = ".saving-", ".replaced-", ".removing-"


def save_checkpoint(
    folder: Path,
    contents: write.CheckpointContents,
    context: RunContext,
    *,
    keep: int,
    raise_if_abandoned: Callable[[], None] = lambda: None,
    sharding: write.CheckpointSharding | None = None,
) -> Path:
    """Write a checkpoint into `folder` durably, and remove all but the last `keep`. Returns its path.

    An existing checkpoint of the same step stays if it is equal, and is replaced otherwise. Checkpoints of later steps
    stay: they are damaged ones, which resuming skipped (it sets intact ones aside). `raise_if_abandoned` is called
    repeatedly until the checkpoint has its name; if it raises, nothing is left behind. With `sharding`, all ranks call
    this; rank 0, which holds the run's lock, publishes what all ranks wrote, and the others may return earlier.
    """
    step, parts, name = contents.step, list(contents.parts), manifests.checkpoint_name(contents.step)
    assert keep >= 1 and step >= 0 and all(map(manifests.is_part_name, parts)), f"{keep=} {step=} {parts=}"
    plan = write.plan_save(contents, sharding)
    with _as_checkpoint_error(folder, step):
        if sharding is not None and sharding.rank != 0:
            write.write_shard(folder / f"{SAVING_PREFIX}{name}", plan, sharding, raise_if_abandoned)
            return folder / name
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        finish_interrupted_saves(folder, context.sink)
        _require_disk_space(folder, plan, context.host, 1 if sharding is None else sharding.world_size)
        new, manifest = _write_hidden_folder(folder, plan, context.progress, raise_if_abandoned, sharding)
        path = _publish_durably(folder, new, manifest)
    _prune(folder, step, keep, context.sink)
    return path


def finish_interrupted_saves(folder: Path, sink: Sink) -> None:
    """Clean up after a killed save. Complete checkpoints stay; one that was about to be replaced gets its name back."""
    for name in load.entry_names(folder):
        prefix, visible_name = _split_hidden_name(name)
        if not prefix or manifests.parse_checkpoint_name(visible_name) is None:
            continue
        if prefix == REPLACED_PREFIX and not os.path.lexists(folder / visible_name):
            os.rename(folder / name, folder / visible_name)
            sync_folder(folder)
        else:
            _remove(folder, name, sink)


def _split_hidden_name(name: str) -> tuple[str, str]:
    """(the hidden prefix, or an empty one; the name without it)."""
    prefix = next((prefix for prefix in HIDDEN_PREFIXES if name.startswith(prefix)), "")
    return prefix, name.removeprefix(prefix)


@contextmanager
def _as_checkpoint_error(folder: Path, step: int) -> Iterator[None]:
    """Turn OSError into CheckpointError; the message says which earlier checkpoint is intact."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        problem = f"the checkpoint of step {step} cannot be saved: {where}{error.strerror}"
        raise CheckpointError(f"{problem}; {_intact_checkpoint_text(folder)}") from error


def _intact_checkpoint_text(folder: Path) -> str:
    try:
        intact = [info for info in load.find_checkpoints(folder) if info.problem is None]
    except OSError as error:
        return f"those in {folder} are unchanged, and cannot be listed: {error.strerror}"
    return f"the last good one is intact: {intact[-1].path}" if intact else f"there is none yet in {folder}"


def _require_disk_space(folder: Path, plan: write.CheckpointWritePlan, host: HostFacts, writer_count: int) -> None:
    """CheckpointError if the disk is too full. Each rank writes its shard, none larger than rank 0's."""
    needed, free = plan.disk_bytes() * writer_count, host.free_bytes(folder)
    if needed > free:
        problem = f"needs {bytes_text(needed)}, {bytes_text(free)} are free below {folder}"
        remedy = f"{bytes_text(needed - free)} are missing; free some space, or lower checkpoints.keep"
        text = f"the checkpoint of step {plan.step} {problem}: {remedy}; {_intact_checkpoint_text(folder)}"
        raise CheckpointError(text)


def _write_hidden_folder(
    folder: Path,
    plan: write.CheckpointWritePlan,
    progress: Progress,
    raise_if_abandoned: Callable[[], None],
    sharding: write.CheckpointSharding | None,
) -> tuple[Path, manifests.CheckpointManifest]:
    """Write and sync all files under the hidden name; on any error, remove them."""
    name, state_file = manifests.checkpoint_name(plan.step), manifests.STATE_FILE
    new = folder / f"{SAVING_PREFIX}{name}"
    new.mkdir()
    try:
        with progress.phase(f"saving {name}", nbytes=sum(plan.file_sizes()[:-1])) as phase:
            if sharding is not None:
                write.announce_save(new, sharding)
            files = {state_file: write.write_file(new / state_file, [memoryview(plan.state)], phase)}
            files |= write.write_parts(new, plan, phase, raise_if_abandoned)
            if sharding is not None:
                files |= write.collect_shards(new, sharding, raise_if_abandoned)
        manifest = manifests.CheckpointManifest(plan.step, dict(sorted(files.items())))
        content = memoryview(manifests.manifest_bytes(manifest))
        write.write_file(new / manifests.MANIFEST_FILE, [content], NullSink().phase("manifest"))
        sync_folder(new)
        raise_if_abandoned()
    except BaseException:
        _discard(new, sharding)
        raise
    return new, manifest


def _publish_durably(folder: Path, new: Path, manifest: manifests.CheckpointManifest) -> Path:
    """Rename the synced hidden folder to the checkpoint's name, and sync the rename."""
    name = manifests.checkpoint_name(manifest.step)
    target = folder / name
    if _is_identical(target, manifest):
        _discard(new)
        return target
    if os.path.lexists(target):
        os.rename(target, folder / f"{REPLACED_PREFIX}{name}")  # `finish_interrupted_saves` undoes this after a kill
    os.rename(new, target)
    sync_folder(folder)
    return target


def _discard(new: Path, sharding: write.CheckpointSharding | None = None) -> None:
    with suppress(OSError):  # the next save removes it then; the caller's own error matters more
        shutil.rmtree(new) if sharding is None else write.discard_sharded_save(new, sharding)


def _is_identical(path: Path, manifest: manifests.CheckpointManifest) -> bool:
    try:
        return path.is_dir() and load.read_manifest(path) == manifest and not load.verify_checkpoint(path)
    except CheckpointError:
        return False  # it is damaged, and is replaced


def _prune(folder: Path, step: int, keep: int, sink: Sink) -> None:
    """Remove replaced checkpoints, and those before `step` except the last `keep - 1`. `step` was saved just now."""
    try:
        entries = load.entry_names(folder)
    except OSError as error:
        message = f"cannot be listed: {error.strerror}; earlier checkpoints stay until the next save"
        return sink.emit(WarningEvent(str(folder), message))
    for name in entries:
        prefix, visible_name = _split_hidden_name(name)
        if prefix == REPLACED_PREFIX and manifests.parse_checkpoint_name(visible_name) is not None:
            _remove(folder, name, sink)
    steps = map(manifests.parse_checkpoint_name, entries)
    earlier = sorted(other for other in steps if other is not None and other < step)
    for old in earlier[: max(0, len(earlier) - (keep - 1))]:
        _remove(folder, manifests.checkpoint_name(old), sink)


def _remove(folder: Path, name: str, sink: Sink) -> None:
    """Remove one of our folders. It is renamed first, so that no incomplete checkpoint is ever found under its name.

    A folder that cannot be removed does not end the run: it causes a warning, and the next save tries again.
    """
    removing = folder / f"{REMOVING_PREFIX}{_split_hidden_name(name)[1]}"
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
