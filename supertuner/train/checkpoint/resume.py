"""Resumes a run: finds the checkpoint, and restores the run from it to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from supertuner.arena.run_context import RunContext
from supertuner.core.durable import sync_folder
from supertuner.core.errors import CheckpointError
from supertuner.core.events import DecisionEvent, NullSink, Progress, Sink, WarningEvent
from supertuner.core.interrupts import interrupts_win
from supertuner.core.types import JSON
from supertuner.distributed.process_group import ProcessGroup
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Tensors
from supertuner.optim import optimizer_state
from supertuner.step.train_step import ExpertState
from supertuner.train.checkpoint.durable_save import finish_interrupted_saves
from supertuner.train.checkpoint.load import (
    LoadedCheckpoint,
    WantedRows,
    entry_names,
    find_checkpoints,
    load_checkpoint,
)
from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR, parse_checkpoint_name
from supertuner.train.checkpoint.state import dataset_digests, library_versions, parameter_name, side_file_digests
from supertuner.train.run.training_run import TrainingRun

UNUSED_PREFIX = "unused-"


def find_resume_checkpoint(context: RunContext, resume: str, process_group: ProcessGroup) -> LoadedCheckpoint | None:
    """The checkpoint that all ranks resume from: the one that rank 0 finds; None: the run begins at step 0.

    Only rank 0 may clean up after a killed save, and it alone verifies the files.
    """
    if process_group.rank == 0:
        loaded = find_checkpoint(context, resume)
        process_group.broadcast(b"" if loaded is None else os.fsencode(loaded.path))
        return loaded
    path = process_group.broadcast(None)
    return load_checkpoint(Path(os.fsdecode(path)), verified=True) if path else None


def find_checkpoint(context: RunContext, resume: str) -> LoadedCheckpoint | None:
    """The checkpoint that `resume` means: "latest", "never", or a path. A path of another run counts only for a run
    that has no checkpoints itself. CheckpointError if there is no intact one where there should be."""
    checkpoints = context.run_dir / CHECKPOINTS_DIR
    if resume == "never":
        if find_checkpoints(checkpoints):
            raise CheckpointError(f'{checkpoints} has checkpoints, and resume is "never"; use another run.name')
        return None
    path = Path(resume).expanduser()
    if resume != "latest" and (path.resolve().parent == checkpoints.resolve() or not path.is_dir()):
        return load_checkpoint(path, context.progress)  # a missing path is an error even if the run has checkpoints
    latest = load_latest(checkpoints, context.sink, context.progress)
    if latest is None and find_checkpoints(checkpoints):
        problem = "is intact (`supertuner checkpoint verify` reports what is wrong with each)"
        remedy = "restore one, or use another run.name to begin at step 0"
        raise CheckpointError(f"no checkpoint in {checkpoints} {problem}; {remedy}")
    if resume == "latest":
        return latest
    if latest is None:
        return load_checkpoint(path, context.progress)
    reason = f"this run has its own checkpoints already; {path} is where it began"
    context.sink.emit(DecisionEvent("checkpoints.resume", str(latest.path), reason))
    return latest


def load_latest(folder: Path, sink: Sink | None = None, progress: Progress | None = None) -> LoadedCheckpoint | None:
    """The newest intact checkpoint; None if there is none. Newer damaged ones cause a warning, and stay."""
    sink = sink or NullSink()
    finish_interrupted_saves(folder, sink)
    for info in reversed(find_checkpoints(folder)):
        try:
            with interrupts_win():
                return load_checkpoint(info.path, progress)
        except CheckpointError as error:
            sink.emit(WarningEvent(f"checkpoint of step {info.step}", f"skipped: {error}"))
    return None


def set_aside_later_checkpoints(folder: Path, step: int, sink: Sink) -> None:
    """Rename checkpoints of steps after `step`: the run resumes there and will save others.

    Without this, a run that was resumed from an older checkpoint and then killed would resume from the last old one.
    """
    for name in entry_names(folder):
        later_step = parse_checkpoint_name(name)
        if later_step is None or later_step <= step:
            continue
        aside, number = folder / f"{UNUSED_PREFIX}{name}", 0
        while aside.exists():
            number += 1
            aside = folder / f"{UNUSED_PREFIX}{name}-{number}"
        os.rename(folder / name, aside)
        sync_folder(folder)
        message = f"is later than step {step}, where this run resumes; it is renamed to {aside}"
        sink.emit(WarningEvent(f"checkpoint of step {later_step}", message))


def restore_run(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """Restore weights, optimizers, averages, random states and logs from a checkpoint, to the bit.

    A checkpoint of the same run also truncates its logs, and renames checkpoints of later steps.
    """
    state = loaded.state
    step, nonfinite, experts = state.get("step"), state.get("nonfinite"), state.get("experts")
    if not isinstance(step, int) or not isinstance(nonfinite, int) or not isinstance(experts, dict):
        raise CheckpointError(f"{loaded.path}: state.json lacks step, nonfinite or experts; use another checkpoint")
    if step > run.schedule.total_steps:
        total = f"{run.schedule.total_steps} ({run.schedule.end_reason})"
        remedy = "raise train.max_steps or train.num_epochs"
        raise CheckpointError(f"{loaded.path} is of step {step}, and this run has {total}; {remedy}")
    _warn_of_other_versions(run, loaded)
    _require_same_initial_weights(run, loaded)
    for expert_state in run.expert_states:
        _restore_expert(run, expert_state, loaded, experts)
    run.step, run.nonfinite_windows = step, nonfinite
    _set_random_states(loaded.read_part("random"), run.device)
    if loaded.path.parent.parent == run.context.run_dir.resolve():
        _warn_of_changed_data(run, loaded)
        losses, validations = _log_position(loaded, "losses"), _log_position(loaded, "validations")
        run.loss_log.require_prefix(*losses)  # check both before changing anything
        run.validation_log.require_prefix(*validations)
        # Before the logs are truncated: a kill in between would leave later checkpoints beside logs that are too short.
        if run.process_group.rank == 0:
            set_aside_later_checkpoints(run.context.run_dir / CHECKPOINTS_DIR, step, run.context.sink)
        run.loss_log.truncate(*losses)
        run.validation_log.truncate(*validations)
    else:
        run.loss_log.reset()
        run.validation_log.reset()


def _warn_of_other_versions(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """Other library versions may compute other bits: resuming is allowed, with a warning."""
    then, now = loaded.state.get("versions"), library_versions()
    then = then if isinstance(then, dict) else {}
    names = [name for name in now | then if then.get(name) != now.get(name)]
    if names:
        changed = "; ".join(f"{name} {then.get(name)} then, {now.get(name)} now" for name in names)
        _warn(run, loaded, f"{changed}: the run resumes, but its bits may differ")


def saved_revision(loaded: LoadedCheckpoint) -> str | None:
    """The hub revision of the model that a checkpoint was trained on; None: the model was a local folder."""
    revision = loaded.state.get("revision")
    return revision if isinstance(revision, str) else None


def saved_world_size(loaded: LoadedCheckpoint) -> int:
    """The number of ranks that the run began with, for which its windows were made."""
    world_size = loaded.state.get("processes", 1)
    return world_size if isinstance(world_size, int) and world_size >= 1 else 1


def _warn_of_changed_data(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """Warn if files have changed since the checkpoint. (Changed settings are refused when the run folder is opened.)"""
    for key, now, text in (
        ("data", dataset_digests(run), "other files in {}: from here on the order of samples differs"),
        ("beside", side_file_digests(run), "another content of {}: from here on the current content counts"),
    ):
        saved = loaded.state.get(key)
        if isinstance(saved, dict) and saved != now:
            names = ", ".join(sorted(name for name in now if saved.get(name) != now[name]))
            _warn(run, loaded, "was saved with " + text.format(names))


def _warn(run: TrainingRun, loaded: LoadedCheckpoint, text: str) -> None:
    run.context.sink.emit(WarningEvent(str(loaded.path), text))


def _require_same_initial_weights(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """CheckpointError if the file of a frozen adapter has changed: the trained adapter is meaningless on another.

    A warning instead if the checkpoint belongs to another run, or if the file only gave initial values.
    """
    saved = loaded.state.get("given")
    if not isinstance(saved, dict) or saved == run.initial_weight_digests:
        return
    is_own_checkpoint = loaded.path.parent.parent == run.context.run_dir.resolve()
    for name in sorted(saved.keys() | run.initial_weight_digests.keys()):
        if saved.get(name) == run.initial_weight_digests.get(name):
            continue
        expert, _, setting = name.partition(": ")
        decides = setting.endswith(".frozen") or any(dataset.prior for dataset in run.config.datasets)
        if is_own_checkpoint and decides:
            problem = f"{expert} was trained with other tensors in the adapter file that {setting} names"
            remedy = (
                "or, if the change is intended, start another run.name with checkpoints.resume set to this checkpoint"
            )
            raise CheckpointError(f"{loaded.path}: {problem}; restore that adapter file, {remedy}")
        effect = "training continues on the new file" if decides else "the checkpoint's values count, not the file's"
        _warn(run, loaded, f"{expert} was trained with other tensors (or none) in the file of {setting}: {effect}")


def _log_position(loaded: LoadedCheckpoint, name: str) -> tuple[int, str]:
    match loaded.state.get(name):
        case [int(nbytes), str(digest)] if nbytes >= 0:
            return nbytes, digest
        case other:
            problem = f"{name} in state.json is {other!r}, not bytes and a checksum"
            raise CheckpointError(f"{loaded.path}: {problem}; use another checkpoint")


def _restore_expert(run: TrainingRun, state: ExpertState, loaded: LoadedCheckpoint, experts: dict[str, JSON]) -> None:
    expert = state.expert.name
    facts = experts.get(expert)
    if not isinstance(facts, dict) or not isinstance(facts.get("optimizer"), dict):
        available = ", ".join(experts) or "none"
        raise CheckpointError(f"{loaded.path} has no state of expert {expert}, it has {available}; see model.experts")
    trainable = run.trainable_experts[expert]
    adapters.load_trainable_state(trainable, _read_part(loaded, f"adapter.{expert}", trainable))
    device = None if run.offload is None else run.offload.optimizer_state_device(expert)
    tensors = _read_part(loaded, f"optimizer.{expert}", trainable)
    optimizer_state.restore_state(state.optimizer, tensors, facts["optimizer"], device)
    if state.ema is not None:
        updates = facts.get("ema_updates")
        if not isinstance(updates, int):
            raise CheckpointError(f"{loaded.path} has no moving average of {expert}; unset train.ema_decay")
        state.ema.load(_read_part(loaded, f"ema.{expert}", trainable), updates)
    if state.loss_scaler is not None:
        scaler = facts.get("scaler")
        if not isinstance(scaler, dict):
            raise CheckpointError(f"{loaded.path} was not trained in fp16; see train.mixed_precision")
        state.loss_scaler.load(scaler)


def _set_random_states(states: Tensors, device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _read_part(loaded: LoadedCheckpoint, part: str, trainable: adapters.TrainableExpert) -> Tensors:
    """A part of a checkpoint; of a sharded expert, only the rows that this rank holds."""
    if trainable.shards is not None:
        row_shards = trainable.shards.row_shards
    elif part in loaded.parts and loaded.parts.is_sharded(part):
        row_shards = {name: adapters.RowShard(tuple(p.shape), 0) for name, p in trainable.parameters.items()}
    else:
        return loaded.read_part(part)

    def select_rows(name: str) -> WantedRows | None:
        parameter = parameter_name(name)
        if (shard := row_shards.get(parameter)) is None:
            return None
        end_row = shard.first_row + len(trainable.parameters[parameter])
        return WantedRows(shard.full_shape, range(shard.first_row, end_row))

    return loaded.read_part(part, select_rows)
