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
from supertuner.core.events import Progress, Silence, Sink, Warned
from supertuner.core.host import Host
from supertuner.core.types import JSON, bytes_text
from supertuner.train.checkpoint.load import Loaded, find, load, names, read_manifest, verify
from supertuner.train.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    STATE,
    Manifest,
    folder_name,
    is_part,
    manifest_bytes,
    step_of,
)
from supertuner.train.checkpoint.sharded import announce, contribute, discard, gathered
from supertuner.train.checkpoint.write import Plan, Sharers, plan_save, write_file, write_parts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FOLDER",
    "Loaded",
    "Sharers",
    "find",
    "folder_name",
    "latest",
    "load",
    "save",
    "sweep",
    "turn_back",
    "verify",
]

SAVING, REPLACED, REMOVING = ".saving-", ".replaced-", ".removing-"
UNUSED = "unused-"


def save(
    folder: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, JSON],
    *,
    keep: int,
    host: Host,
    sink: Sink | None = None,
    progress: Progress | None = None,
    go_on: Callable[[], None] = lambda: None,
    sharers: Sharers | None = None,
) -> Path:
    """Write the checkpoint of `step` into `folder`, and remove all but the last `keep`; where it is.

    One of the same step stays if it is the same, and is replaced if it is not. Checkpoints of later steps are left
    alone: they are damaged ones that `latest` passed over. `go_on` is called again and again until the checkpoint gets
    its name; if it raises, nothing is left behind. Of several `sharers` each calls this, and the first, who holds the
    run's lock, publishes what all of them wrote; the others may be done before.
    """
    assert keep >= 1 and step >= 0 and all(map(is_part, parts)), f"{keep=} {step=} {list(parts)}"
    plan = plan_save(step, parts, state, sharers)
    sink = sink or Silence()
    with _said(folder, step):
        if sharers is not None and sharers.rank != 0:
            contribute(folder / f"{SAVING}{folder_name(step)}", plan, sharers, go_on)
            return folder / folder_name(step)
        _make(folder)
        sweep(folder, sink)
        _refuse_without_room(folder, plan, host, 1 if sharers is None else sharers.ranks)
        new, manifest = _write(folder, plan, progress or Silence(), go_on, sharers)
        made = _put_in_place(folder, new, manifest)
    _prune(folder, step, keep, sink)
    return made


def latest(folder: Path, sink: Sink | None = None, progress: Progress | None = None) -> Loaded | None:
    """The newest checkpoint that is whole. A newer one that is not is told, passed over, and stays where it is."""
    sink = sink or Silence()
    if not folder.exists():
        return None
    sweep(folder, sink)
    for found in reversed(find(folder)):
        try:
            return load(found.path, progress)
        except CheckpointError as error:
            sink.emit(Warned(f"checkpoint of step {found.step}", f"passed over: {error}"))
    return None


def turn_back(folder: Path, step: int, sink: Sink) -> None:
    """Give checkpoints of later steps than `step` another name: the run goes on from there, and will have others.

    Without this, a run that was resumed from an older checkpoint and killed would go on from the last of the old ones.
    """
    for name in names(folder):
        later = step_of(name)
        if later is None or later <= step:
            continue
        aside = next(a for n in range(1 << 30) if not (a := folder / f"{UNUSED}{name}{f'-{n}' if n else ''}").exists())
        os.rename(folder / name, aside)
        sync_folder(folder)
        sink.emit(Warned(f"checkpoint of step {later}", f"is later than step {step}, where this goes on; now {aside}"))


def sweep(folder: Path, sink: Sink) -> None:
    """Finish what a killed save began. Whole checkpoints stay; one that lost its name to nobody gets it back."""
    for name in names(folder):
        begun = next((prefix for prefix in (SAVING, REPLACED, REMOVING) if name.startswith(prefix)), None)
        if begun is None or step_of(name.removeprefix(begun)) is None:
            continue
        own = folder / name.removeprefix(begun)
        if begun == REPLACED and not os.path.lexists(own):
            os.rename(folder / name, own)
            sync_folder(folder)
        else:
            _remove(folder, name, sink)


@contextmanager
def _said(folder: Path, step: int) -> Iterator[None]:
    """The system's refusal in our words; what matters to the user is that the last checkpoint is still there."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be saved: {where}{error.strerror}; {_still_there(folder)}"
        ) from error


def _still_there(folder: Path) -> str:
    try:
        whole = [found for found in find(folder) if found.problem is None]
    except OSError as error:
        return f"those in {folder} were not touched, and cannot be listed: {error.strerror}"
    return f"the last good one is intact: {whole[-1].path}" if whole else f"there is none yet in {folder}"


def _refuse_without_room(folder: Path, plan: Plan, host: Host, sharers: int) -> None:
    """Those who share write as much as the first, or a few rows less."""
    needed, free = plan.room() * sharers, host.free_bytes(folder)
    if needed > free:
        raise CheckpointError(
            f"the checkpoint of step {plan.step} needs {bytes_text(needed)}, {bytes_text(free)} are free below "
            f"{folder}: {bytes_text(needed - free)} are missing; free some space, or lower checkpoints.keep; "
            f"{_still_there(folder)}"
        )


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def _write(
    folder: Path, plan: Plan, progress: Progress, go_on: Callable[[], None], sharers: Sharers | None
) -> tuple[Path, Manifest]:
    """Everything of the checkpoint, synced, under its hidden name."""
    new = folder / f"{SAVING}{folder_name(plan.step)}"
    new.mkdir()
    try:
        with progress.phase(f"saving {folder_name(plan.step)}", nbytes=sum(plan.sizes()[:-1])) as phase:
            if sharers is not None:
                announce(new, sharers)
            files = {STATE: write_file(new / STATE, [memoryview(plan.state)], phase)}
            files |= write_parts(new, plan, phase, go_on)
            if sharers is not None:
                files |= gathered(new, sharers, go_on)
        manifest = Manifest(plan.step, dict(sorted(files.items())))
        write_file(new / MANIFEST, [memoryview(manifest_bytes(manifest))], Silence().phase("manifest"))
        sync_folder(new)
        go_on()
    except BaseException:
        _discard(new, sharers)
        raise
    return new, manifest


def _put_in_place(folder: Path, new: Path, manifest: Manifest) -> Path:
    name = folder_name(manifest.step)
    made = folder / name
    if _is_the_same(made, manifest):
        _discard(new)
        return made
    if os.path.lexists(made):
        os.rename(made, folder / f"{REPLACED}{name}")  # a kill from here to the next line is undone by `sweep`
    os.rename(new, made)
    sync_folder(folder)
    return made


def _discard(new: Path, sharers: Sharers | None = None) -> None:
    with suppress(OSError):  # then the next save removes it; what matters now is what the caller has to tell
        shutil.rmtree(new) if sharers is None else discard(new, sharers)


def _is_the_same(made: Path, manifest: Manifest) -> bool:
    try:
        return made.is_dir() and read_manifest(made) == manifest and not verify(made)
    except CheckpointError:
        return False  # whatever is there is not whole, and is replaced


def _prune(folder: Path, step: int, keep: int, sink: Sink) -> None:
    """Remove what was replaced, and checkpoints before `step` but the last `keep - 1`. `step` itself is the newest."""
    try:
        there = names(folder)
    except OSError as error:
        message = f"cannot be listed: {error.strerror}; earlier checkpoints stay until the next save"
        return sink.emit(Warned(str(folder), message))
    for name in there:
        if name.startswith(REPLACED) and step_of(name.removeprefix(REPLACED)) is not None:
            _remove(folder, name, sink)
    earlier = sorted(s for name in there if (s := step_of(name)) is not None and s < step)
    for old in earlier[: max(0, len(earlier) - (keep - 1))]:
        _remove(folder, folder_name(old), sink)


def _remove(folder: Path, name: str, sink: Sink) -> None:
    """Remove one folder of ours; it loses its name first, so that no half of a checkpoint is ever found under it.

    A folder that cannot be removed is no reason to end a run: it is told, and tried again at the next save.
    """
    own = next((name.removeprefix(p) for p in (SAVING, REPLACED, REMOVING) if name.startswith(p)), name)
    gone = folder / f"{REMOVING}{own}"
    try:
        if name != gone.name:
            os.rename(folder / name, gone)
            sync_folder(folder)
        if gone.is_symlink() or not gone.is_dir():
            gone.unlink()
        else:
            shutil.rmtree(gone)
    except OSError as error:
        message = f"cannot be removed: {error.strerror}; it takes up space until the next save, or until you remove it"
        sink.emit(Warned(str(folder / name), message))
