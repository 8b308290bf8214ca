"""Makes samples with the adapter of a run or of a file on its base model, through the code that validates a run.

At strength 1 the adapter of a run is attached as in training, so that the same seed gives the sample of its validation.
Otherwise the adapter is merged into the weights in fp32, multiplied by the strength: 0 is the base model to the bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from supertuner.arena.run_context import RunContext
from supertuner.config.families import FAMILIES
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import load_config
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
from supertuner.train.export.run_adapters import adapter_files_in, is_run_source, open_run_adapter
from supertuner.train.run.model_source import open_model
from supertuner.train.run_checks import require_backends, select_device
from supertuner.train.validation.sample_images import GRID_FILE, VIDEO_FILE, SampleSheet, preserve_training_state

SIZE_DECISION = "validation.size"


@dataclass(frozen=True, eq=False, slots=True)
class SampleOptions:
    """What to sample. Values that are None are those of the run's validation."""

    prompts: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    image: Path | None = None
    strength: float = 1.0


@dataclass(frozen=True, eq=False, slots=True)
class SampledAdapter:
    """An adapter and the base model to sample it on."""

    name: str
    step: int | None
    files: tuple[Path, ...]
    config: RunConfig
    family: Family
    model: ModelDescription
    run_dir: Path | None
    """None: it is not of a run."""


@contextmanager
def open_sampled_adapter(
    source: str, model_path: str | None, family: str | None, device: str | None
) -> Iterator[SampledAdapter]:
    """The adapter that `source` names: a run, a step of a run, a checkpoint, a file, or a folder with a file per
    expert. `model_path` is the base model of a file, if its metadata does not name it."""
    path = Path(source)
    files = adapter_files_in(path) if path.is_dir() else () if is_run_source(source) else (path,)
    if not files:
        if model_path is not None:
            raise OptionError(f"{source} is a run, whose base model is known; leave out `model`")
        with open_run_adapter(source) as adapter:
            config, name = _with_device(adapter.config, device), adapter.run_dir.resolve().name
            yield SampledAdapter(
                name, adapter.step, adapter.files, config, adapter.family, adapter.model, adapter.run_dir
            )
        return
    first = open_adapter(files[0], family)
    facts = first.supertuner_metadata
    recorded, recorded_family = facts.get("base_model"), facts.get("family")
    if model_path is None and not (isinstance(recorded, str) and "/" in recorded):
        known = f" records only its folder's name, {recorded!r}" if recorded else " does not record its base model"
        raise ModelError(f"{files[0]}{known}; set `model` to its folder or its name on the hub")
    if family is None:
        family = str(recorded_family) if recorded_family in FAMILIES else first.family
    overrides: dict[str, JSON] = {"model.family": family, "model.path": model_path or str(recorded)}
    if model_path is None and isinstance(facts.get("revision"), str):
        overrides["model.revision"] = str(facts["revision"])
    config = _with_device(load_config(None, overrides=overrides, environ={}, check_paths=False).config, device)
    opened_family, model = open_model(config, path.parent)
    step = facts.get("step")
    step_number = step if isinstance(step, int) else None
    yield SampledAdapter(path.resolve().stem, step_number, files, config, opened_family, model, None)


def make_adapter_samples(
    adapter: SampledAdapter, options: SampleOptions, target: Path, context: RunContext
) -> tuple[Path, Path | None]:
    """Write the samples into the new folder `target`. Returns the grid as a picture, and as a video if they are."""
    plan = plan_adapter_samples(adapter, options)
    precision = ComputePrecision(adapter.config.train.mixed_precision, select_device(adapter.config.train.device))
    require_backends(adapter.config, adapter.model.experts, precision)
    remedy = 'make samples with a smaller width, height or number of frames, or on the device "cpu"'
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
    """All samples to make. OptionError for what is missing or impossible, before anything is loaded."""
    validation = adapter.config.validation
    prompts = options.prompts or validation.prompts
    if not prompts:
        raise OptionError("there is no prompt, and the run has no validation.prompts; set one with --prompt")
    if not math.isfinite(options.strength):
        raise OptionError(f"strength is {options.strength}; it must be finite (1 is the adapter as trained)")
    size = _sample_size(adapter, options)
    model, image = adapter.model, None if options.image is None else _read_image(options.image)
    if image is None and (model.needs_first_frame or model.edits_images):
        raise OptionError(f"{model.title} starts from an image; set one with `image`")
    shape = (size.frames, size.height, size.width) if size.frames > 1 else (size.height, size.width)
    reason = adapter.family.unsupported_reason(model, (3, *shape))
    if size.frames > 1 and MediaKind.VIDEO not in model.media_kinds:
        reason = f"{model.title} generates single images; set frames to 1"
    if reason:
        problem = f"width, height and frames are {size.width}, {size.height} and {size.frames}"
        raise OptionError(f"{problem}, which the model cannot produce: {reason}")
    return ValidationSamplePlan(
        prompts=prompts,
        images=(image,) * len(prompts),
        seeds=validation.seeds if options.seeds is None else options.seeds,
        size=size,
        fps=validation.fps,
        negative_prompt=validation.negative_prompt if options.negative_prompt is None else options.negative_prompt,
        inference_steps=options.inference_steps or validation.inference_steps,
        guidance_scale=validation.guidance_scale if options.guidance_scale is None else options.guidance_scale,
    )


def _with_device(config: RunConfig, device: str | None) -> RunConfig:
    return (
        config
        if device is None
        else config.model_copy(update={"train": config.train.model_copy(update={"device": device})})
    )


def _sample_size(adapter: SampledAdapter, options: SampleOptions) -> SampleSize:
    """The requested size; values that are not given are those of the run's validation."""
    validation, run_dir = adapter.config.validation, adapter.run_dir
    default = None if run_dir is None else _size_of_largest_bucket(run_dir)
    width, height = options.width or validation.width, options.height or validation.height
    frames = options.frames or validation.frames or (1 if default is None else default.frames)
    if default is not None:
        width, height = width or default.width, height or default.height
    if width is None or height is None:
        raise OptionError(f"the size of samples of {adapter.name} is not known; set --width and --height")
    return SampleSize(width, height, frames)


def _size_of_largest_bucket(run_dir: Path) -> SampleSize | None:
    """The size that the run decided on, where its settings give none."""
    values = [row.get("value") for row in open_run(run_dir).decisions() if row["what"] == SIZE_DECISION]
    match = re.match(r"(\d+)×(\d+), (\d+) frame", str(values[-1])) if values else None
    return None if match is None else SampleSize(*map(int, match.groups()))


def _read_image(path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise OptionError(f"{path} cannot be read as an image: {error}; name a PNG or JPEG file") from error


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
