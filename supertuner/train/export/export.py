"""Exports the trained weights of a run in files that other programs load, one folder per step; complete or absent.

    exports/step-00000500/
      NAME-step00000500_high_noise.safetensors            key names of diffusers, or of lycoris-lora
      NAME-step00000500_high_noise.comfyui.safetensors    key names of a program in `exports.formats`
      NAME-step00000500-trained_high_noise.safetensors    weights without averaging, if both are exported
      transformer/                                        a whole expert, if all its weights are trained

The training thread copies the weights between two windows (`RunExporter.collect`), and the thread that writes the
checkpoint of that step writes them first (`PendingExport.write`): the exports of a checkpoint are complete. Equal runs
give equal bytes, so a run that was killed and resumed ends with the same files as one that was not.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from supertuner.core.atomic_folder import atomic_folder, remove_folder
from supertuner.core.durable import write_chunks
from supertuner.core.errors import ModelError, TrainError
from supertuner.core.events import Sink, WarningEvent
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Tensors
from supertuner.step.train_step import ExpertState, evaluation_weights
from supertuner.train.checkpoint.manifest import checkpoint_name, parse_checkpoint_name
from supertuner.train.checkpoint.tensor_file import plan_tensor_file
from supertuner.train.export.adapter_export import export_adapter, program_path
from supertuner.train.export.adapter_files import open_adapter
from supertuner.train.export.comfyui_dora import trained_magnitude_factors
from supertuner.train.export.export_metadata import RunFacts, add_tensor_hash, build_metadata, export_stem
from supertuner.train.run.training_run import EXPORTS_DIR, TrainingRun

OWN_FORMAT: Final = "diffusers"
"""The format that is written first; the others are converted from its files."""
TRAINED_MARK: Final = "-trained"
"""In the names of files with trained weights, if the run also averages them."""


@dataclass(frozen=True, eq=False, slots=True)
class PendingFile:
    """One adapter file that is not written yet."""

    stem: str
    tensors: Tensors
    """Copies in host memory."""
    metadata: dict[str, str]
    """Without the hash of the tensors, which takes time."""
    magnitude_factors: Tensors | None
    """What DoRA's magnitudes are multiplied by for ComfyUI; None: it is no DoRA, or not for ComfyUI."""


@dataclass(frozen=True, eq=False, slots=True)
class PendingExport:
    """The adapters of one step, in host memory."""

    folder: Path
    """The run's `exports` folder."""
    step: int
    files: tuple[PendingFile, ...]
    formats: tuple[str, ...]
    keep: int | None

    @property
    def nbytes(self) -> int:
        """The bytes of the copies in memory."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors.values())

    def write(self, sink: Sink, raise_if_abandoned: Callable[[], None] = lambda: None) -> list[Path]:
        """Write all files durably and remove exports that are not kept. Returns the new files.

        An equal export of this step stays, another one is replaced. TrainError if a file cannot be written.
        """
        target = self.folder / checkpoint_name(self.step)
        with _explain_export_errors(target), atomic_folder(self.folder, target.name, _have_same_files) as new:
            names = [name for file in self.files for name in self._write_file(file, new, raise_if_abandoned)]
        _prune(self.folder, self.step, self.keep, sink)
        return [target / name for name in names]

    def _write_file(self, file: PendingFile, folder: Path, raise_if_abandoned: Callable[[], None]) -> Iterator[str]:
        raise_if_abandoned()
        own_file = folder / f"{file.stem}.safetensors"
        metadata = add_tensor_hash(file.metadata, plan_tensor_file(file.tensors).tensor_chunks())
        write_chunks(own_file, plan_tensor_file(file.tensors, metadata).chunks())
        for program in self.formats:
            raise_if_abandoned()
            if program == OWN_FORMAT:
                yield own_file.name
                continue
            out = program_path(own_file, program)
            export_adapter(open_adapter(own_file), program, out, magnitude_factors=file.magnitude_factors)
            yield out.name
        if OWN_FORMAT not in self.formats:
            own_file.unlink()


class RunExporter:
    """Exports the weights of a run at its current step. Only rank 0 writes."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._writes = run.process_group.rank == 0
        self._trains_all_weights = run.config.adapter.type == "full"

    def collect(self) -> PendingExport | None:
        """The adapters to write with the checkpoint of this step; None if none are due.

        Only scheduled checkpoints are exported: a run that was stopped and resumed has the exports of one that was not.
        If all weights are trained, there is no copy: they are written here, while training waits.
        """
        when, every = self._run.config.exports_when, self._run.config.checkpoints.every_steps
        is_last = self._run.step == self._run.schedule.total_steps
        is_scheduled = is_last or (every > 0 and self._run.step % every == 0)
        if (when == "checkpoints" and is_scheduled) or (when == "end" and is_last):
            if self._trains_all_weights:
                self._write_all_weights()
            elif self._writes:
                return self._collect_adapters()
        return None

    def finish(self) -> list[Path]:
        """The files and folders of this step, which are written now if they do not exist. Empty on ranks other than 0,
        and if nothing is exported."""
        if self._run.config.exports_when == "never":
            return []
        target = self._run.context.run_dir / EXPORTS_DIR / checkpoint_name(self._run.step)
        names = list(self._file_names())
        is_complete = all((target / name).exists() for name in names)
        if self._run.process_group.world_size > 1:
            is_complete = not self._run.process_group.all_reduce_max([int(self._writes and not is_complete)])[0]
        if not is_complete:
            if self._trains_all_weights:
                self._write_all_weights()
            elif self._writes:
                self._collect_adapters().write(self._run.context.sink)
        return [target / name for name in names] if self._writes else []

    def _file_names(self) -> Iterator[str]:
        for state in self._run.expert_states:
            if self._trains_all_weights:
                yield state.expert.component
                continue
            for is_averaged in self._variants():
                own_file = Path(f"{self._stem(state, is_averaged)}.safetensors")
                for program in self._run.config.exports.formats:
                    yield (own_file if program == OWN_FORMAT else program_path(own_file, program)).name

    def _variants(self) -> tuple[bool, ...]:
        """For each file of an expert: whether it has the averaged weights."""
        wanted = self._run.config.exports.weights if self._run.config.has_weight_average else "trained"
        return {"averaged": (True,), "trained": (False,), "both": (True, False)}[wanted]

    def _stem(self, state: ExpertState, is_averaged: bool) -> str:
        mark = TRAINED_MARK if self._run.config.has_weight_average and not is_averaged else ""
        return export_stem(self._facts(), state.expert, mark)

    def _facts(self) -> RunFacts:
        run = self._run
        return RunFacts(run.name, run.config, run.family, run.model, run.step, run.samples_consumed)

    def _collect_adapters(self) -> PendingExport:
        run, exports = self._run, self._run.config.exports
        files = (self._collect_file(state, averaged) for state in run.expert_states for averaged in self._variants())
        return PendingExport(run.context.run_dir / EXPORTS_DIR, run.step, tuple(files), exports.formats, exports.keep)

    def _collect_file(self, state: ExpertState, is_averaged: bool) -> PendingFile:
        run, expert, trainable = self._run, state.expert, self._run.trainable_experts[state.expert.name]
        values = evaluation_weights(state) if is_averaged else None
        settings = adapters.settings_for_expert(run.config.adapter, expert.name)
        with nullcontext() if values is None else adapters.temporary_weights(trainable, values):
            prefix = run.family.export_prefix[expert.component]
            tensors, adapter_metadata = adapters.export_tensors(trainable, prefix, settings)
            needs_factors = settings.dora and "comfyui" in run.config.exports.formats
            factors = trained_magnitude_factors(trainable, tensors, prefix) if needs_factors else None
        metadata = build_metadata(self._facts(), expert, adapter_metadata)
        return PendingFile(self._stem(state, is_averaged), tensors, metadata, factors)

    def _write_all_weights(self) -> None:
        """Write whole experts. Sharded weights are gathered, for which all ranks call this."""
        run, parent = self._run, self._run.context.run_dir / EXPORTS_DIR
        target = parent / checkpoint_name(run.step)
        if not self._writes:
            for state in run.expert_states:
                if run.trainable_experts[state.expert.name].shards is not None:
                    self._save_expert(state, target)  # takes part in the gathering, and writes nothing
            return
        with _explain_export_errors(target), atomic_folder(parent, target.name, lambda existing, new: False) as folder:
            for state in run.expert_states:
                self._save_expert(state, folder)
        _prune(parent, run.step, run.config.exports.keep, run.context.sink)

    def _save_expert(self, state: ExpertState, folder: Path) -> None:
        trainable = self._run.trainable_experts[state.expert.name]
        values = evaluation_weights(state) if self._variants()[0] else None
        with nullcontext() if values is None else adapters.temporary_weights(trainable, values):
            adapters.save_full_weights(trainable, folder / state.expert.component, self._run.dtype)


@contextmanager
def _explain_export_errors(path: Path) -> Iterator[None]:
    """Turn errors of writing and converting into TrainError."""
    try:
        yield
    except (OSError, SafetensorError, ModelError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "free some space and start the same command again: the last checkpoint has everything that was trained"
        if isinstance(error, ModelError):
            remedy = "change exports.formats and start the same command again"
        raise TrainError(f"{path} cannot be written: {reason}; {remedy}") from error


def _have_same_files(existing: Path, new: Path) -> bool:
    names = sorted(path.name for path in new.iterdir())
    if sorted(path.name for path in existing.iterdir()) != names:
        return False
    return filecmp.cmpfiles(existing, new, names, shallow=False)[0] == names


def _prune(folder: Path, step: int, keep: int | None, sink: Sink) -> None:
    """Remove the exports of earlier steps but the last `keep - 1`. What cannot be removed causes a note."""
    if keep is None:
        return
    steps = (parse_checkpoint_name(path.name) for path in folder.iterdir())
    earlier = sorted(other for other in steps if other is not None and other < step)
    for old in earlier[: max(0, len(earlier) - (keep - 1))]:
        try:
            remove_folder(folder, checkpoint_name(old))
        except OSError as error:
            text = f"{folder / checkpoint_name(old)} cannot be removed: {error.strerror}; remove it yourself"
            sink.emit(WarningEvent("exports.keep", text))
