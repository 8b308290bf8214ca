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
from supertuner.train.checkpoint.tensor_file import lay_out
from supertuner.train.export.metadata import described
from supertuner.train.run import EXPORTS, Run


def export(run: Run) -> list[Path]:
    """Write the weights that validation uses into the run's `exports` folder; the files and folders made, by the
    first process of several. What processes share out, they put together for it."""
    if run.parallel.rank != 0:
        for number, trainee in enumerate(run.trainees):
            if run.trained[trainee.expert.name].parts is not None:
                _export_expert(run, number, run.folder)  # of which nothing is written here
        return []
    making = run.folder / f".making-{EXPORTS}"
    try:
        return _export(run, making)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(making, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise TrainError(
            f"{run.folder / EXPORTS} cannot be written: {reason}; make room and start the same command again: the last "
            "checkpoint has all that was trained"
        ) from error


def _export(run: Run, making: Path) -> list[Path]:
    folder, old = run.folder / EXPORTS, run.folder / f".old-{EXPORTS}"
    for leftover in (making, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    making.mkdir()
    names = [_export_expert(run, number, making) for number in range(len(run.trainees))]
    sync_folder(making)
    if folder.exists():
        os.rename(folder, old)
    os.rename(making, folder)
    sync_folder(run.folder)
    if old.exists():
        shutil.rmtree(old)
    return [folder / name for name in names]


def _export_expert(run: Run, number: int, folder: Path) -> str:
    trainee = run.trainees[number]
    expert, trained = trainee.expert, run.trained[trainee.expert.name]
    values = evaluation_weights(trainee)
    with nullcontext() if values is None else adapters.applied(trained, values):
        if trained.kind == "full":
            adapters.save_full(trained, folder / expert.part, run.dtype)
            return expert.part
        name = f"{run.name}.safetensors" if len(run.model.experts) == 1 else f"{run.name}_{expert.name}.safetensors"
        settings = adapters.for_expert(run.config.adapter, expert.name)
        tensors, metadata = adapters.exported(trained, run.family.export_prefix[expert.part], settings)
        told = described(run, expert, metadata, lay_out(tensors).content())
        write_chunks(folder / name, lay_out(tensors, told).chunks())
        return name
