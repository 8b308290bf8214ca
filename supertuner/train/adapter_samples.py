"""Makes samples with the adapter of a run or of a file on its base model, through the code that validates a run.

At strength 1 the adapter of a run is attached as in training, so that the same seed gives the sample of its validation.
Otherwise the adapter is merged into the weights in fp32, multiplied by the strength: 0 is the base model to the bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from supertuner.arena.run_context import RunContext
from supertuner.config.families import FAMILIES
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.settings.validation import ValidationSettings
from supertuner.core.atomic_folder import atomic_folder
from supertuner.core.errors import ModelError, OptionError
from supertuner.core.events import NullSink
from supertuner.core.types import JSON, MediaKind
from supertuner.memory.out_of_memory import explain_out_of_memory
from supertuner.models.adapters.existing_adapters import frozen_layer_merger, load_initial_values
from supertuner.models.attention import use_backend
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSampler
from supertuner.plan.sample_requests import SampleSize, ValidationSamplePlan
from supertuner.runs.run_reader import open_run
from supertuner.step import expert_setup
from supertuner.step.precision import ComputePrecision
from supertuner.train.export.adapter_files import open_adapter, with_expert
from supertuner.train.export.adapter_init import load_initial_adapters, load_layer_tensors
from supertuner.train.export.run_adapters import (
    SettingChanges,
    adapter_files_in,
    change_settings,
    is_run_source,
    open_run_adapter,
)
from supertuner.train.run.model_source import open_model
from supertuner.train.run_checks import require_backends, select_device
from supertuner.train.validation.sample_images import GRID_FILE, VIDEO_FILE, SampleSheet, preserve_training_state
from supertuner.train.validation.validate import load_start_image, require_possible_size

PROMPTS_DECISION, SIZE_DECISION = "validation.prompts", "validation.size"


@dataclass(frozen=True, slots=True)
class SampleOptions:
    prompts: tuple[str, ...] = ()
    """Empty: those of the run's validation."""
    seeds: tuple[int, ...] = ()
    """Empty: those of the run's validation."""
    strength: float = 1.0
    """Factor of the adapter."""


@dataclass(frozen=True, eq=False, slots=True)
class SampledAdapter:
    """An adapter and the base model to sample it on."""

    name: str
    step: int | None
    files: tuple[Path, ...]
    config: RunConfig
    family: Family
    model: ModelDescription
    run_dir: Path | None = None
    """None: it is not of a run."""


@contextmanager
def open_sampled_adapter(source: str, changes: SettingChanges) -> Iterator[SampledAdapter]:
    """The adapter that `source` names: a run, a step of a run, a checkpoint, a file, or a folder with a file per
    expert. `changes` are applied to the settings of the run; for a file they may name its base model."""
    path = Path(source)
    if not path.exists() and not is_run_source(source):
        raise OptionError(f"there is no {source}; name a run folder, RUN@STEP, a checkpoint or a .safetensors file")
    files = adapter_files_in(path) if path.is_dir() else () if is_run_source(source) else (path,)
    if not files:
        with open_run_adapter(source, changes) as adapter:
            name = adapter.run_dir.resolve().name
            yield SampledAdapter(
                name, adapter.step, adapter.files, adapter.config, adapter.family, adapter.model, adapter.run_dir
            )
        return
    changed = changes if isinstance(changes, Mapping) else dict(text.partition("=")[::2] for text in changes)
    named_family = changed.get("model.family")
    first = open_adapter(files[0], None if named_family is None else str(named_family))
    facts = first.supertuner_metadata
    recorded, recorded_family = facts.get("base_model"), facts.get("family")
    settings: dict[str, JSON] = {}
    if named_family is None:
        settings["model.family"] = str(recorded_family) if recorded_family in FAMILIES else first.family
    if not any(setting.startswith(("model.path", "model.single_file")) for setting in changed):
        if not (isinstance(recorded, str) and "/" in recorded):
            known = f" records only its folder's name, {recorded!r}" if recorded else " does not record its base model"
            raise ModelError(f"{files[0]}{known}; set model.path to its folder or its name on the hub")
        settings["model.path"] = recorded
        if isinstance(facts.get("revision"), str):
            settings["model.revision"] = str(facts["revision"])
    config = change_settings(settings, changes)
    family, model = open_model(config, path.parent)
    step = facts.get("step")
    yield SampledAdapter(path.resolve().stem, step if isinstance(step, int) else None, files, config, family, model)


def make_adapter_samples(
    adapter: SampledAdapter, options: SampleOptions, target: Path, context: RunContext
) -> tuple[Path, Path | None]:
    """Write the samples into the new folder `target`. Returns the grid as a picture, and as a video if they are."""
    plan = plan_adapter_samples(adapter, options)
    precision = ComputePrecision(adapter.config.train.mixed_precision, select_device(adapter.config.train.device))
    require_backends(adapter.config, adapter.model.experts, precision)
    remedy = 'lower validation.width, height or frames, or set train.device to "cpu"'
    with explain_out_of_memory("model and samples do", remedy), preserve_training_state(()):
        sampler = _build_sampler(adapter, options.strength, precision, context)
        title = f"samples of {adapter.name}"
        with (
            atomic_folder(target.parent, target.name, lambda existing, new: False) as folder,
            context.progress.phase(title, items=len(plan), noun="generated samples") as phase,
        ):
            sheet = SampleSheet(folder, plan, adapter.name, adapter.step, f"adapter at strength {options.strength:g}")
            for row, column, request in plan.requests():
                sheet.add(row, column, request, sampler.sample(request))
                phase.advance(1)
            has_video = sheet.close()
    return target / GRID_FILE, target / VIDEO_FILE if has_video else None


def plan_adapter_samples(adapter: SampledAdapter, options: SampleOptions) -> ValidationSamplePlan:
    """All samples to make. What `options` leave open is as in the settings `validation`.

    OptionError or TrainError for what is missing or impossible, before anything is loaded.
    """
    seeds = options.seeds
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < 1 << 63 for seed in seeds):
        raise OptionError(f"`seeds` are {list(seeds)}; they must be different numbers from 0 on")
    if not math.isfinite(options.strength):
        raise OptionError(f"`strength` is {options.strength}; it must be finite (1 is the adapter as trained)")
    settings, model = adapter.config.validation, adapter.model
    recorded = [] if adapter.run_dir is None else open_run(adapter.run_dir).decisions()
    decisions = {row["what"]: row.get("value") for row in recorded}
    captions = decisions.get(PROMPTS_DECISION)
    prompts = options.prompts or settings.prompts or (tuple(map(str, captions)) if isinstance(captions, list) else ())
    if not prompts:
        raise OptionError(f"{adapter.name} has no validation.prompts; set `prompts`")
    image = None if settings.image is None else load_start_image(settings.image, model)
    if image is None and (model.needs_first_frame or model.edits_images):
        raise OptionError(f"the model ({model.title}) starts from an image; set validation.image to one")
    size = _sample_size(settings, str(decisions.get(SIZE_DECISION)))
    if size.frames > 1 and MediaKind.VIDEO not in model.media_kinds:
        raise OptionError(
            f"validation.frames is {size.frames}, but the model ({model.title}) makes single images; set it to 1"
        )
    require_possible_size(adapter.family, model, size)
    return ValidationSamplePlan(
        prompts=prompts,
        images=(image,) * len(prompts),
        seeds=seeds or settings.seeds,
        size=size,
        fps=settings.fps,
        negative_prompt=settings.negative_prompt,
        inference_steps=settings.inference_steps,
        guidance_scale=settings.guidance_scale,
    )


def _sample_size(settings: ValidationSettings, decision: str) -> SampleSize:
    """The size in the settings; what they leave open is as the run decided ("64×64, 5 frames")."""
    match = re.match(r"(\d+)×(\d+), (\d+) frame", decision)
    default = SampleSize(0, 0, 1) if match is None else SampleSize(*map(int, match.groups()))
    width, height = settings.width or default.width, settings.height or default.height
    if not width or not height:
        raise OptionError("the size of samples is not known; set validation.width and validation.height")
    return SampleSize(width, height, settings.frames or default.frames)


def _build_sampler(
    adapter: SampledAdapter, strength: float, precision: ComputePrecision, context: RunContext
) -> ModelSampler:
    file_by_expert = _files_by_expert(adapter)
    modules: dict[str, nn.Module] = {}
    with context.progress.phase("loading the model", items=len(adapter.model.experts), noun="denoisers") as phase:
        for expert in adapter.model.experts:
            file = file_by_expert.get(expert.name)
            modules[expert.component] = _load_expert(adapter, expert, file, strength, precision)
            phase.advance(1)
        return adapter.family.build_sampler(adapter.model, modules, precision.device, precision.dtype)


def _files_by_expert(adapter: SampledAdapter) -> dict[str, Path]:
    """Expert → the adapter file for it. ModelError if a file is for no expert of the model, or two are for one."""
    experts = [expert.name for expert in adapter.model.experts]
    files: dict[str, Path] = {}
    for path in adapter.files:
        named = with_expert(open_adapter(path, adapter.family.name), None).reading.experts
        for expert in experts[:1] if len(experts) == 1 else named:
            if expert is None or expert not in experts:
                ending = " or ".join(f"_{name}.safetensors" for name in experts)
                raise ModelError(f"{path} does not say which expert it is for; end its name with {ending}")
            if expert in files:
                raise ModelError(f"{files[expert]} and {path} are both for {expert}; name the one to sample")
            files[expert] = path
    return files


def _load_expert(
    adapter: SampledAdapter, expert: Expert, file: Path | None, strength: float, precision: ComputePrecision
) -> nn.Module:
    """A denoiser with its adapter attached or merged; the base model's if there is no adapter for it."""
    config, family, model, only_expert = adapter.config, adapter.family, adapter.model, len(adapter.model.experts) == 1
    is_attached = adapter.run_dir is not None and strength == 1.0
    layers = None if file is None else load_layer_tensors(file, family.name, expert.name, only_expert=only_expert)
    to_merge = []
    if config.model.experts in ("all", expert.name):  # only trained experts are trained on top of a frozen adapter
        initial = load_initial_adapters(config.adapter, family.name, expert.name, only_expert=only_expert)
        to_merge += [(frozen.layers, frozen.path, 1.0) for name, frozen in initial.items() if name == "frozen"]
    if file is not None and layers is not None and not is_attached:
        to_merge.append((layers, file, strength))

    def place(module: nn.Module) -> None:
        mergers = [frozen_layer_merger(module, *arguments) for arguments in to_merge]

        def merge_layer(name: str, layer: nn.Module) -> None:
            for merge in mergers:
                merge(name, layer)

        kind = config.model.base_weights
        expert_setup.place_base_weights(module, kind, precision.device, NullSink(), change_layer=merge_layer)

    module = family.load_denoiser(model, expert, precision.dtype, place)
    if file is None or layers is None or not is_attached:
        use_backend(module, config.model.attention)
        return module
    trainable = expert_setup.build_trainable_expert(config, family, expert, module, precision, NullSink())
    load_initial_values(trainable, layers, file)
    return trainable.module
