"""What of a run goes into a checkpoint, and back: everything that cannot be computed from its position."""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

import torch
import xxhash

from supertuner import __version__
from supertuner.core.errors import CheckpointError
from supertuner.core.events import WarningEvent
from supertuner.core.types import JSON
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Tensors
from supertuner.optim import optimizer_state
from supertuner.step.window import ExpertState
from supertuner.train.checkpoint import durable_save as checkpoint
from supertuner.train.checkpoint.load import LoadedCheckpoint
from supertuner.train.checkpoint.parts import WantedRows
from supertuner.train.run.training_run import TrainingRun


class CheckpointContents(NamedTuple):
    """A run as it is now."""

    parts: dict[str, Tensors]
    """Its own tensors: training goes on to change them."""
    state: dict[str, JSON]
    row_offsets: dict[str, dict[str, int]]
    """Of parts whose tensors are shared out over processes: tensor → the row of the whole one that it begins with."""


def collect_contents(run: TrainingRun) -> CheckpointContents:
    parts: dict[str, Tensors] = {"random": _random_states(run.device)}
    experts: dict[str, JSON] = {}
    row_offsets: dict[str, dict[str, int]] = {}
    for expert_state in run.expert_states:
        expert, trainable = expert_state.expert.name, run.trainable_experts[expert_state.expert.name]
        expert_parts: dict[str, Tensors] = {"adapter": dict(trainable.parameters)}
        expert_parts["optimizer"], optimizer = optimizer_state.pack_state(
            expert_state.optimizer, copy=torch.Tensor.detach
        )
        facts: dict[str, JSON] = {"optimizer": optimizer}
        if expert_state.ema is not None:
            expert_parts["ema"], facts["ema_updates"] = dict(expert_state.ema.averages), expert_state.ema.updates
        if expert_state.loss_scaler is not None:
            facts["scaler"] = expert_state.loss_scaler.state()
        parts |= {f"{kind}.{expert}": tensors for kind, tensors in expert_parts.items()}
        row_offsets |= {f"{kind}.{expert}": _row_offsets(trainable, tensors) for kind, tensors in expert_parts.items()}
        experts[expert] = facts
    state: dict[str, JSON] = {
        "step": run.step,
        "samples": run.samples_consumed,
        "nonfinite": run.nonfinite_windows,
        "experts": experts,
        "losses": list(run.loss_log.position()),
        "validations": list(run.validation_log.position()),
    }
    return CheckpointContents(parts, state, {part: found for part, found in row_offsets.items() if found})


def _row_offsets(trainable: adapters.TrainableExpert, tensors: Tensors) -> dict[str, int]:
    """Of what is shared out: what has a parameter's rows has those that the parameter has here."""
    if trainable.shards is None:
        return {}
    row_shards, parameters = trainable.shards.row_shards, trainable.parameters
    return {
        name: row_shards[parameter].first_row
        for name, tensor in tensors.items()
        if (parameter := _parameter_name(name)) in row_shards and tensor.shape == parameters[parameter].shape
    }


def _read_part(loaded: LoadedCheckpoint, part: str, trainable: adapters.TrainableExpert) -> Tensors:
    """A part of a checkpoint, or the rows of it that are here."""
    if trainable.shards is not None:
        row_shards = trainable.shards.row_shards
    elif part in loaded.parts and loaded.parts.is_sharded(part):
        row_shards = {name: adapters.RowShard(tuple(one.shape), 0) for name, one in trainable.parameters.items()}
    else:
        return loaded.read_part(part)

    def select_rows(name: str) -> WantedRows | None:
        place = row_shards.get(_parameter_name(name))
        if place is None:
            return None
        return WantedRows(
            place.full_shape, range(place.first_row, place.first_row + len(trainable.parameters[_parameter_name(name)]))
        )

    return loaded.read_part(part, select_rows)


def _parameter_name(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to: an optimizer's have names of their own behind it."""
    return name.rpartition("/")[0] or name


def collect_constant_state(run: TrainingRun) -> dict[str, JSON]:
    """The facts that are the same in every checkpoint of a session. To look through the captions takes its time."""
    return {
        "processes": run.initial_world_size,
        "versions": library_versions(),
        "data": {**dataset_digests(run)},
        "beside": {**_side_file_digests(run)},
        "given": {**run.initial_weight_digests},
        "revision": run.model.source.revision,
    }


def restore_run(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """Go on from a checkpoint, to the bit."""
    state = loaded.state
    step, nonfinite, experts = state.get("step"), state.get("nonfinite"), state.get("experts")
    if not isinstance(step, int) or not isinstance(nonfinite, int) or not isinstance(experts, dict):
        raise CheckpointError(f"{loaded.path}: state.json lacks step, nonfinite or experts; use another checkpoint")
    if step > run.schedule.total_steps:
        raise CheckpointError(
            f"{loaded.path}: is of step {step}, and this run has {run.schedule.total_steps} ({run.schedule.end_reason}); "
            "raise train.max_steps or train.num_epochs"
        )
    _warn_of_other_versions(run, loaded)
    _require_same_initial_weights(run, loaded)
    for expert_state in run.expert_states:
        _restore_expert(run, expert_state, loaded, experts)
    run.step, run.nonfinite_windows = step, nonfinite
    _set_random_states(loaded.read_part("random"), run.device)
    if loaded.path.parent.parent == run.folder.resolve():
        _warn_of_changed_data(run, loaded)
        logs = (
            (run.loss_log, _log_position(loaded, "losses")),
            (run.validation_log, _log_position(loaded, "validations")),
        )
        for log, position in logs:
            log.require_prefix(*position)  # a refusal must leave everything as it was
        # Before the cuts: a kill between them would leave later checkpoints beside logs that are too short for them.
        if run.process_group.rank == 0:
            checkpoint.set_aside_later_checkpoints(run.folder / checkpoint.CHECKPOINTS_DIR, step, run.sink)
        for log, position in logs:
            log.truncate(*position)
    else:
        run.loss_log.reset()
        run.validation_log.reset()


def _warn_of_other_versions(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """Other versions may compute other bits: going on with them is allowed, and said."""
    then, now = loaded.state.get("versions"), library_versions()
    then = then if isinstance(then, dict) else {}
    changed = [
        f"{name} {then.get(name)} then, {now.get(name)} now" for name in now | then if then.get(name) != now.get(name)
    ]
    if changed:
        run.sink.emit(WarningEvent(str(loaded.path), f"{'; '.join(changed)}: going on works, and bits may differ"))


def library_versions() -> dict[str, JSON]:
    """Of what decides the bits of a step."""
    libraries: dict[str, JSON] = {name: version(name) for name in ("diffusers", "lycoris-lora", "peft")}
    return {"supertuner": __version__, "torch": torch.__version__, **libraries, "threads": torch.get_num_threads()}


def saved_revision(loaded: LoadedCheckpoint) -> str | None:
    """The commit of the model on the hub that a checkpoint was trained on; None: it was a folder."""
    revision = loaded.state.get("revision")
    return revision if isinstance(revision, str) else None


def saved_world_size(loaded: LoadedCheckpoint) -> int:
    """How many processes the windows of a run were made for when it began."""
    world_size = loaded.state.get("processes", 1)
    return world_size if isinstance(world_size, int) and world_size >= 1 else 1


def dataset_digests(run: TrainingRun) -> dict[str, str]:
    """Dataset → digest of its samples' bytes. Which sample a position is follows from them and from the settings."""
    parts = [part.samples for part in run.collator.corpus.datasets]
    return {samples.id: xxhash.xxh3_128_hexdigest(samples.content_digests().tobytes()) for samples in parts}


def _warn_of_changed_data(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """Settings that changed are refused with the run's folder; files behind the same settings may well change."""
    saved, now = loaded.state.get("data"), dataset_digests(run)
    if isinstance(saved, dict) and saved != now:
        names = ", ".join(sorted(name for name in now if saved.get(name) != now[name]))
        text = f"was saved with other files in {names}: from here on the order of samples is another one"
        run.sink.emit(WarningEvent(str(loaded.path), text))
    saved, now = loaded.state.get("beside"), _side_file_digests(run)
    if isinstance(saved, dict) and saved != now:
        names = ", ".join(sorted(name for name in now if saved.get(name) != now[name]))
        run.sink.emit(
            WarningEvent(str(loaded.path), f"was saved with others in {names}: from here on those of now count")
        )


def _side_file_digests(run: TrainingRun) -> dict[str, str]:
    """What lies beside the samples and decides what they teach: setting → what it is known by."""
    parts = run.collator.corpus.datasets
    captions = {f"datasets[{part.settings.id}].captions": part.samples.caption_digest() for part in parts}
    return captions if run.collator.loss_weights is None else {**captions, **run.collator.loss_weights.digests()}


def _require_same_initial_weights(run: TrainingRun, loaded: LoadedCheckpoint) -> None:
    """An adapter that learnt on top of another one means nothing on top of a third."""
    saved = loaded.state.get("given")
    if not isinstance(saved, dict) or saved == run.initial_weight_digests:
        return
    is_own_checkpoint = loaded.path.parent.parent == run.folder.resolve()
    for name in sorted(saved.keys() | run.initial_weight_digests.keys()):
        if saved.get(name) == run.initial_weight_digests.get(name):
            continue
        expert, _, setting = name.partition(": ")
        decides = setting.endswith(".frozen") or any(dataset.prior for dataset in run.config.datasets)
        if is_own_checkpoint and decides:
            raise CheckpointError(
                f"{loaded.path}: {expert} was trained with other tensors in the file of {setting}; put it back as it "
                "was, or begin another run.name with --resume and this checkpoint if you mean it"
            )
        effect = "what is trained goes on above it" if decides else "the checkpoint's values count, not the file's"
        text = f"{expert} was trained with other tensors (or none) in the file of {setting}: {effect}"
        run.sink.emit(WarningEvent(str(loaded.path), text))


def _log_position(loaded: LoadedCheckpoint, name: str) -> tuple[int, str]:
    match loaded.state.get(name):
        case [int(nbytes), str(digest)]:
            return nbytes, digest
        case other:
            raise CheckpointError(f"{loaded.path}: state.json has {name} {other!r}, not bytes and a checksum")


def _restore_expert(
    run: TrainingRun, expert_state: ExpertState, loaded: LoadedCheckpoint, experts: dict[str, JSON]
) -> None:
    expert = expert_state.expert.name
    facts = experts.get(expert)
    if not isinstance(facts, dict) or not isinstance(facts.get("optimizer"), dict):
        available = ", ".join(experts) or "none"
        raise CheckpointError(
            f"{loaded.path}: has no state of the expert {expert}, it has {available}; see model.experts"
        )
    trainable = run.trainable_experts[expert]
    adapters.load_trainable_state(trainable, _read_part(loaded, f"adapter.{expert}", trainable))
    state_device = None if run.offload is None else run.offload.optimizer_state_device(expert)
    optimizer_state.restore_state(
        expert_state.optimizer, _read_part(loaded, f"optimizer.{expert}", trainable), facts["optimizer"], state_device
    )
    if expert_state.ema is not None:
        updates = facts.get("ema_updates")
        if not isinstance(updates, int):
            raise CheckpointError(f"{loaded.path}: has no moving average of {expert}; unset train.ema_decay")
        expert_state.ema.load(_read_part(loaded, f"ema.{expert}", trainable), updates)
    if expert_state.loss_scaler is not None:
        scaler = facts.get("scaler")
        if not isinstance(scaler, dict):
            raise CheckpointError(f"{loaded.path}: was not trained in fp16; see train.mixed_precision")
        expert_state.loss_scaler.load(scaler)


def _random_states(device: torch.device) -> Tensors:
    """Nothing of ours draws on these; a library may."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Tensors, device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
