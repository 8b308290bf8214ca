"""The adapter of a run at one of its steps, as one file per expert: exported ones, or made from a checkpoint.

    runs/cats                            the newest step that was exported or saved
    runs/cats@500                        step 500
    runs/cats/checkpoints/step-00000500  this checkpoint
    runs/cats/exports/step-00000500      this export

A checkpoint holds parameters only; type, rank, alpha and layers come from the settings that its run folder records. The
files that are made from a checkpoint have the same bytes as those that the run exports at that step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from supertuner.config.families import FAMILIES
from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import load_config
from supertuner.core.durable import write_chunks
from supertuner.core.errors import ModelError
from supertuner.core.types import JSON
from supertuner.models import loading
from supertuner.models.adapters import attach as adapters
from supertuner.models.pipeline_files import INDEX_NAME, pipeline_folder, weight_files
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource, Tensors
from supertuner.optim.optimizer_registry import schedule_free_average
from supertuner.runs.run_reader import RunReader, open_run
from supertuner.sinks.run_folder import RUN_FILE
from supertuner.train.checkpoint.load import LoadedCheckpoint, find_checkpoints, load_checkpoint
from supertuner.train.checkpoint.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST_FILE,
    TENSORS_SUFFIX,
    parse_checkpoint_name,
)
from supertuner.train.checkpoint.tensor_file import plan_tensor_file
from supertuner.train.export.adapter_export import PROGRAMS
from supertuner.train.export.adapter_files import AdapterFile
from supertuner.train.export.export import TRAINED_MARK
from supertuner.train.export.export_metadata import RunFacts, add_tensor_hash, build_metadata, export_stem
from supertuner.train.run.model_source import open_model
from supertuner.train.run.training_run import EXPORTS_DIR

SettingChanges: TypeAlias = Mapping[str, JSON] | Sequence[str]
"""Path of each setting → its new value; or texts `path=value`."""
CONVERTED_SUFFIXES: Final = tuple(f".{program}{TENSORS_SUFFIX}" for program in PROGRAMS)


@dataclass(frozen=True, slots=True)
class RunAdapter:
    """The adapter of a run at one step."""

    run_dir: Path
    step: int
    files: tuple[Path, ...]
    """One per expert, in diffusers' or lycoris-lora's names."""
    origin: Path
    """The export or checkpoint that it comes from."""
    family: Family
    model: ModelDescription
    """The base model."""
    config: RunConfig
    """The settings of the run."""

    def base_weight_files(self, file: AdapterFile) -> tuple[Path, ...]:
        """The weight files of the denoiser that `file` is for. ModelError if they are not in diffusers' format."""
        experts = {expert.name: expert.component for expert in self.model.experts}
        return _weight_files(file, self.model.source, experts)

    def export_folder(self, program: str) -> Path:
        """Where exports for a program are written unless the user names a place; created now."""
        folder = self.run_dir / EXPORTS_DIR / program
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def denoiser_weight_files(pipeline: Path, file: AdapterFile) -> tuple[Path, ...]:
    """The weight files of the denoiser that `file` is for, in the folder of a pipeline."""
    if not (pipeline / INDEX_NAME).is_file():
        raise ModelError(f"{pipeline} is not the folder of a diffusers pipeline: it has no {INDEX_NAME}")
    return _weight_files(file, ModelSource(str(pipeline)), FAMILIES[file.reading.families[0]].experts)


def _weight_files(file: AdapterFile, source: ModelSource, components: Mapping[str, str]) -> tuple[Path, ...]:
    """`components`: expert → component of the pipeline."""
    named = [component for expert, component in components.items() if expert in file.reading.experts]
    component = named[0] if named else next(iter(components.values()))
    if component in source.single_files:
        problem = f"the base weights are in {source.single_files[component]}, whose layout is not that of diffusers"
        raise ModelError(f"{problem}; set `base` to the folder of a pipeline")
    return weight_files(source, pipeline_folder(source, (component,)), component)


def adapter_files_in(folder: Path) -> tuple[Path, ...]:
    """The adapter files in a folder that does not belong to a run; none if it is a run folder or part of one."""
    is_step_of_run = parse_checkpoint_name(folder.name) is not None and (folder.parent.parent / RUN_FILE).is_file()
    if is_step_of_run or (folder / RUN_FILE).is_file():
        return ()
    by_program = [tuple(sorted(folder.glob(f"*{suffix}"))) for suffix in CONVERTED_SUFFIXES]
    return next((files for files in (_own_files(folder), *by_program) if files), ())


def is_run_source(source: str) -> bool:
    """Whether `source` names a run, a step of a run, a checkpoint or an export, and not a file."""
    return Path(source).is_dir() or (not Path(source).exists() and _split_step(source) is not None)


@contextmanager
def open_run_adapter(source: str, changes: SettingChanges = ()) -> Iterator[RunAdapter]:
    """Yield the adapter that `source` names. Files that are made from a checkpoint exist only inside the block.

    `changes` are applied to the settings of the run.

    Raises ModelError if there is no such step or it cannot be exported; RunFolderError if there is no such run.
    """
    run, step, origin = _locate(source)
    settings = {str(row["path"]): row["value"] for row in run.explicit_settings()}
    config = change_settings(settings, changes)
    if config.adapter.type == "full":
        raise ModelError(f"{run.path} trains all weights (adapter.type), so that it has no adapter; see its exports")
    family, model = open_model(config, run.path)
    if origin.parent.name == EXPORTS_DIR:
        files = _own_files(origin)
        yield RunAdapter(run.path, step, files, origin, family, model, config)
        return
    with tempfile.TemporaryDirectory(prefix="supertuner-") as folder:
        files = tuple(_write_from_checkpoint(load_checkpoint(origin), run, config, (family, model), Path(folder)))
        yield RunAdapter(run.path, step, files, origin, family, model, config)


def change_settings(settings: Mapping[str, JSON], changes: SettingChanges) -> RunConfig:
    """The configuration with these settings, and the changes on top of them."""
    sets, overrides = ((), changes) if isinstance(changes, Mapping) else (changes, {})
    loaded = load_config(None, overrides={**settings, **overrides}, sets=sets, environ={}, check_paths=False)
    return loaded.config


def _split_step(source: str) -> tuple[Path, int] | None:
    path, mark, step = source.rpartition("@")
    return (Path(path), int(step)) if mark and step.isdecimal() and Path(path).is_dir() else None


def _locate(source: str) -> tuple[RunReader, int, Path]:
    """The run, the step, and the folder of an export or checkpoint."""
    path = Path(source)
    if path.is_dir() and (step := parse_checkpoint_name(path.resolve().name)) is not None:
        run_dir = path.resolve().parent.parent
        if not (run_dir / RUN_FILE).is_file():
            what = "checkpoint" if (path / MANIFEST_FILE).is_file() else "folder"
            raise ModelError(
                f"{source} is a {what} outside of a run folder; its type, rank and alpha are settings of its run: move "
                f"it back below {CHECKPOINTS_DIR} of its run"
            )
        return open_run(run_dir), step, path.resolve()
    split = _split_step(source) if not path.is_dir() else None
    run = open_run(path if split is None else split[0])
    exported, saved = exported_steps(run.path), _saved_steps(run.path)
    steps = sorted({*exported, *saved})
    if not steps:
        raise ModelError(f"{run.path} has no export and no checkpoint yet; `supertuner run show {run.path}` shows it")
    step = steps[-1] if split is None else split[1]
    if step not in steps:
        listed = ", ".join(map(str, steps[-12:]))
        raise ModelError(f"{run.path} has no export and no checkpoint of step {step}; it has {listed}")
    return run, step, exported.get(step) or saved[step]


def exported_steps(run_dir: Path) -> dict[int, Path]:
    """Step → folder of its export, for exports with files in our own names."""
    folders = (run_dir / EXPORTS_DIR).glob("step-*")
    steps = {parse_checkpoint_name(folder.name): folder for folder in folders if _own_files(folder)}
    return {step: folder for step, folder in steps.items() if step is not None}


def _saved_steps(run_dir: Path) -> dict[int, Path]:
    folder = run_dir / CHECKPOINTS_DIR
    found = find_checkpoints(folder) if folder.is_dir() else []
    return {info.step: info.path for info in found if info.problem is None}


def _own_files(folder: Path) -> tuple[Path, ...]:
    """The files in our own names, of the averaged weights if there are both."""
    files = sorted(path for path in folder.glob(f"*{TENSORS_SUFFIX}") if not path.name.endswith(CONVERTED_SUFFIXES))
    return tuple(path for path in files if TRAINED_MARK not in path.name) or tuple(files)


def _write_from_checkpoint(
    loaded: LoadedCheckpoint, run: RunReader, config: RunConfig, opened: tuple[Family, ModelDescription], folder: Path
) -> Iterator[Path]:
    family, model = opened
    facts = RunFacts(run.name, config, family, model, loaded.step, int(str(loaded.state.get("samples", 0))))
    for expert in model.experts:
        if f"adapter.{expert.name}" in loaded.parts:
            settings = adapters.settings_for_expert(config.adapter, expert.name)
            trainable = _attach_values(family, model, expert, settings, _saved_values(loaded, expert, config))
            prefix = family.export_prefix[expert.component]
            tensors, adapter_metadata = adapters.export_tensors(trainable, prefix, settings)
            metadata = build_metadata(facts, expert, adapter_metadata)
            metadata = add_tensor_hash(metadata, plan_tensor_file(tensors).tensor_chunks())
            path = folder / f"{export_stem(facts, expert)}{TENSORS_SUFFIX}"
            write_chunks(path, plan_tensor_file(tensors, metadata).chunks())
            yield path


def _saved_values(loaded: LoadedCheckpoint, expert: Expert, config: RunConfig) -> Tensors:
    """The weights to export: averaged ones, if the run averages."""
    if config.train.ema_decay is not None:
        return loaded.read_part(f"ema.{expert.name}")
    values = loaded.read_part(f"adapter.{expert.name}")
    if config.optimizer.name == "schedule_free":
        state = loaded.read_part(f"optimizer.{expert.name}")
        return {name: schedule_free_average(value, state.get(f"{name}/z")) for name, value in values.items()}
    return values


def _attach_values(
    family: Family, model: ModelDescription, expert: Expert, settings: AdapterSettings, values: Tensors
) -> adapters.TrainableExpert:
    """The adapter on a module without weights, with these values."""
    if settings.type == "diff":
        raise ModelError(
            'adapter.type is "diff", whose export is the difference from the base weights; set exports.when to '
            '"checkpoints" so that the run exports it, or resume the run to its end'
        )
    module = loading.build_meta_module(model, expert.component)
    targets = adapters.resolve_targets(settings, family.target_presets)
    trainable = adapters.attach(module, settings, targets, seed=0, name=expert.name)
    adapters.assign_values(trainable, values)
    return trainable
