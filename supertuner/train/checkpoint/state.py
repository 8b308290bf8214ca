"""What a checkpoint contains of a run: everything that cannot be computed from its position."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TypeAlias

import torch
import xxhash

from supertuner import __version__
from supertuner.core.types import JSON
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Tensors
from supertuner.optim import optimizer_state
from supertuner.train.checkpoint.write_files import CheckpointContents
from supertuner.train.run.training_run import TrainingRun

RowOffsets: TypeAlias = dict[str, dict[str, int]]
"""Sharded part → tensor → index, in the whole tensor, of the first row that this rank holds."""


def collect_contents(run: TrainingRun, constant_state: Mapping[str, JSON]) -> tuple[CheckpointContents, RowOffsets]:
    """The run as it is now. The tensors are the run's own, not copies: training changes them later."""
    parts: dict[str, Tensors] = {"random": _random_states(run.device)}
    experts: dict[str, JSON] = {}
    row_offsets: RowOffsets = {}
    for expert_state in run.expert_states:
        expert, trainable = expert_state.expert.name, run.trainable_experts[expert_state.expert.name]
        tensors, optimizer = optimizer_state.pack_state(expert_state.optimizer, copy=torch.Tensor.detach)
        expert_parts: dict[str, Tensors] = {"adapter": dict(trainable.parameters), "optimizer": tensors}
        facts: dict[str, JSON] = {"optimizer": optimizer}
        if expert_state.ema is not None:
            expert_parts["ema"], facts["ema_updates"] = dict(expert_state.ema.averages), expert_state.ema.updates
        if expert_state.loss_scaler is not None:
            facts["scaler"] = expert_state.loss_scaler.state()
        parts |= {f"{kind}.{expert}": tensors for kind, tensors in expert_parts.items()}
        row_offsets |= {f"{kind}.{expert}": _row_offsets(trainable, tensors) for kind, tensors in expert_parts.items()}
        experts[expert] = facts
    state: dict[str, JSON] = {
        **constant_state,
        "step": run.step,
        "samples": run.samples_consumed,
        "nonfinite": run.nonfinite_windows,
        "experts": experts,
        "losses": list(run.loss_log.position()),
        "validations": list(run.validation_log.position()),
    }
    sharded = {part: offsets for part, offsets in row_offsets.items() if offsets}
    return CheckpointContents(run.step, parts, state), sharded


def _row_offsets(trainable: adapters.TrainableExpert, tensors: Tensors) -> dict[str, int]:
    """Row offsets of a sharded expert's tensors: one with the shape of its parameter holds the same rows."""
    if trainable.shards is None:
        return {}
    row_shards, parameters = trainable.shards.row_shards, trainable.parameters
    return {
        name: row_shards[parameter].first_row
        for name, tensor in tensors.items()
        if (parameter := parameter_name(name)) in row_shards and tensor.shape == parameters[parameter].shape
    }


def parameter_name(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to: optimizer tensors are named `parameter/role`."""
    return name.rpartition("/")[0] or name


def collect_constant_state(run: TrainingRun) -> dict[str, JSON]:
    """The part of the state that is the same in every checkpoint of a session. Computing the digests takes time."""
    return {
        "processes": run.initial_world_size,
        "versions": library_versions(),
        "data": {**dataset_digests(run)},
        "beside": {**side_file_digests(run)},
        "given": {**run.initial_weight_digests},
        "revision": run.model.source.revision,
    }


def library_versions() -> dict[str, JSON]:
    """Versions, and the thread count, on which the bits of a step depend."""
    libraries: dict[str, JSON] = {name: version(name) for name in ("diffusers", "lycoris-lora", "peft")}
    return {"supertuner": __version__, "torch": torch.__version__, **libraries, "threads": torch.get_num_threads()}


def dataset_digests(run: TrainingRun) -> dict[str, str]:
    """Dataset → digest of its samples' bytes. They and the settings determine which sample a position means."""
    parts = [part.samples for part in run.collator.corpus.datasets]
    return {samples.id: xxhash.xxh3_128_hexdigest(samples.content_digests().tobytes()) for samples in parts}


def side_file_digests(run: TrainingRun) -> dict[str, str]:
    """Setting → digest of files beside the samples that affect training: captions, loss weights and masks."""
    parts = run.collator.corpus.datasets
    captions = {f"datasets[{part.settings.id}].captions": part.samples.caption_digest() for part in parts}
    return captions if run.collator.loss_weights is None else {**captions, **run.collator.loss_weights.digests()}


def _random_states(device: torch.device) -> Tensors:
    """States of torch's global generators: our code does not use them, libraries may."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
