"""Exports a finished run: adapters or whole experts, in files that other programs load; all of them or none.

The metadata of an adapter file follow Stability's ModelSpec 1.0.1, and record how the adapter was trained. Equal runs
give equal metadata, without times and folders of the machine: the files of a run and of the same run after a resume are
equal to the byte, and can be published.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from supertuner.config.settings.block import SettingsBlock
from supertuner.core.atomic_folder import atomic_folder
from supertuner.core.durable import write_chunks
from supertuner.core.errors import TrainError
from supertuner.core.types import JSON
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert, ModelSource
from supertuner.step.train_step import ExpertState, evaluation_weights
from supertuner.train.checkpoint.state import library_versions
from supertuner.train.checkpoint.tensor_file import plan_tensor_file
from supertuner.train.run.training_run import EXPORTS_DIR, TrainingRun

RECORDED_SECTIONS: Final = ("adapter", "objective", "optimizer")
"""Sections of the configuration that affect the result. Others contain folders, or affect only the speed."""
SUPERTUNER_KEY: Final = "supertuner"
MODELSPEC_PREFIX: Final = "modelspec."


def export(run: TrainingRun) -> list[Path]:
    """Write the weights that validation uses into the run's `exports` folder. Returns the new files and folders.

    Rank 0 writes and the other ranks return an empty list; sharded weights are gathered, for which all ranks call this.
    """
    run_dir = run.context.run_dir
    if run.process_group.rank != 0:
        for state in run.expert_states:
            if run.trainable_experts[state.expert.name].shards is not None:
                _export_expert(run, state, run_dir)  # takes part in the gathering, and writes nothing
        return []
    try:
        with atomic_folder(run_dir, EXPORTS_DIR, lambda existing, new: False) as folder:
            names = [_export_expert(run, state, folder) for state in run.expert_states]
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "free some space and start the same command again: the last checkpoint has everything that was trained"
        raise TrainError(f"{run_dir / EXPORTS_DIR} cannot be written: {reason}; {remedy}") from error
    return [run_dir / EXPORTS_DIR / name for name in names]


def _export_expert(run: TrainingRun, state: ExpertState, folder: Path) -> str:
    """Write one expert into `folder`; returns the name of its file or folder."""
    expert, trainable, values = state.expert, run.trainable_experts[state.expert.name], evaluation_weights(state)
    with nullcontext() if values is None else adapters.temporary_weights(trainable, values):
        if trainable.adapter_type == "full":
            adapters.save_full_weights(trainable, folder / expert.component, run.dtype)
            return expert.component
        name = f"{run.name}.safetensors" if len(run.model.experts) == 1 else f"{run.name}_{expert.name}.safetensors"
        settings = adapters.settings_for_expert(run.config.adapter, expert.name)
        tensors, metadata = adapters.export_tensors(trainable, run.family.export_prefix[expert.component], settings)
        file_metadata = build_metadata(run, expert, metadata, plan_tensor_file(tensors).tensor_chunks())
        write_chunks(folder / name, plan_tensor_file(tensors, file_metadata).chunks())
        return name


def build_metadata(
    run: TrainingRun, expert: Expert, adapter_metadata: Mapping[str, str], tensors: Iterable[memoryview]
) -> dict[str, str]:
    """Metadata of a file whose tensors have these bytes. `adapter_metadata` comes from the adapter itself."""
    adapter_facts = json.loads(adapter_metadata.get(SUPERTUNER_KEY, "{}"))
    family = run.family.name
    digest = hashlib.sha256()
    for chunk in tensors:
        digest.update(chunk)
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{run.family.modelspec_architecture or family}/{adapter_facts.get('type', 'lora')}",
        "implementation": "https://github.com/huggingface/diffusers",
        "title": run.name if len(run.model.experts) == 1 else f"{run.name}, {expert.name}",
        "hash_sha256": f"0x{digest.hexdigest()}",
    }
    prediction = run.model.prediction or run.family.prediction
    if prediction != "flow":  # ModelSpec has no name for flow matching
        spec["prediction_type"] = prediction
    facts: dict[str, JSON] = {
        **adapter_facts,
        "run": run.name,
        "family": family,
        "base_model": _base_model(run.model.source),
        "revision": run.model.source.revision,
        "step": run.step,
        "samples": run.samples_consumed,
        "seed": run.config.run.seed,
        "versions": {name: number for name, number in library_versions().items() if name != "threads"},
        "settings": {name: _changed_settings(getattr(run.config, name)) for name in RECORDED_SECTIONS},
    }
    return {
        **adapter_metadata,
        **{MODELSPEC_PREFIX + key: text for key, text in spec.items()},
        SUPERTUNER_KEY: json.dumps(facts, sort_keys=True),
    }


def _base_model(source: ModelSource) -> str:
    """The model's name on the hub, or the last part of a local folder: its location is private."""
    return Path(source.path).name if Path(source.path).is_dir() else source.path


def _changed_settings(block: SettingsBlock) -> JSON:
    settings: JSON = block.model_dump(mode="json", exclude_defaults=True)
    return _strip_folders(settings)


def _strip_folders(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _strip_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strip_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value
