"""What a finished run gives away: adapters or whole experts, in files that others load, all of them or none."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

from safetensors import SafetensorError

from supertuner.core.durable import sync_folder, write_chunks
from supertuner.core.errors import TrainError
from supertuner.models.adapters import attach as adapters
from supertuner.step.window import evaluation_weights
from supertuner.train.checkpoint.tensor_file import plan_tensor_file
from supertuner.train.export.metadata import build_metadata
from supertuner.train.run.training_run import EXPORTS_DIR, TrainingRun


def export(run: TrainingRun) -> list[Path]:
    """Write the weights that validation uses into the run's `exports` folder; the files and folders made, by the
    first process of several. What processes share out, they put together for it."""
    if run.process_group.rank != 0:
        for number, expert_state in enumerate(run.expert_states):
            if run.trainable_experts[expert_state.expert.name].shards is not None:
                _export_expert(run, number, run.context.run_dir)  # of which nothing is written here
        return []
    making = run.context.run_dir / f".making-{EXPORTS_DIR}"
    try:
        return _export_experts(run, making)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(making, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise TrainError(
            f"{run.context.run_dir / EXPORTS_DIR} cannot be written: {reason}; make room and start the same command again: the last "
            "checkpoint has all that was trained"
        ) from error


def _export_experts(run: TrainingRun, making: Path) -> list[Path]:
    folder, old = run.context.run_dir / EXPORTS_DIR, run.context.run_dir / f".old-{EXPORTS_DIR}"
    for leftover in (making, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    making.mkdir()
    names = [_export_expert(run, number, making) for number in range(len(run.expert_states))]
    sync_folder(making)
    if folder.exists():
        os.rename(folder, old)
    os.rename(making, folder)
    sync_folder(run.context.run_dir)
    if old.exists():
        shutil.rmtree(old)
    return [folder / name for name in names]


def _export_expert(run: TrainingRun, number: int, folder: Path) -> str:
    expert_state = run.expert_states[number]
    expert, trainable = expert_state.expert, run.trainable_experts[expert_state.expert.name]
    values = evaluation_weights(expert_state)
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
