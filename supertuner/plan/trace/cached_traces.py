"""Traces of phases by what decides them: asked twice, or for two experts that are alike, a step is traced once.

A key is the settings that change a tensor or an operator, the configs of the modules, the shape of the batch and the
device. What changes values only (rates, seeds, files of weights) is no part of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import JSON
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.plan.trace.encoder_shapes import BatchShape
from supertuner.plan.trace.execution_trace import ExecutionTrace
from supertuner.plan.trace.inference_phases import (
    SampleTrace,
    trace_media_encoding,
    trace_sampling,
    trace_text_encoding,
)
from supertuner.plan.trace.recorder import TracedDevice
from supertuner.plan.trace.trace_store import TraceCache
from supertuner.plan.trace.training_step import trace_training_step

IGNORED_ADAPTER_SETTINGS = {"start_from", "frozen", "high_noise", "low_noise"}
"""Of an adapter's settings: files, and what `for_expert` has chosen from already."""


def cached_training_trace(
    cache: TraceCache,
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    expert: Expert,
    shape: BatchShape,
    *,
    device: TracedDevice,
    checkpointing: bool | None = None,
    micro_batches: int = 1,
    shape_label: str = "",
) -> ExecutionTrace:
    """`trace_training`, or what was kept of it. `of` is for people: what the shape is called."""
    recomputed = config.train.gradient_checkpointing if checkpointing is None else checkpointing
    description = {
        **_phase_key("train", family, device),
        **_expert_key(config, model, expert),
        "shape": str(shape),
        "checkpointing": recomputed,
        "micro_batches": micro_batches,
        "objective": config.objective.model_dump(mode="json"),
        "max_grad_norm": config.train.max_grad_norm is not None,
    }
    trace = cache.get_or_create(
        description,
        lambda: trace_training_step(
            config,
            family,
            model,
            expert,
            shape,
            checkpointing=checkpointing,
            micro_batches=micro_batches,
            device=device,
        ),
        f"a step of {expert.name}{shape_label and ' with ' + shape_label}",
    )
    return replace(trace, phase=f"train {expert.name}")


def cached_media_trace(
    cache: TraceCache,
    family: Family,
    model: ModelDescription,
    media_shape: tuple[int, ...],
    *,
    device: TracedDevice,
    shape_label: str = "a sample",
) -> ExecutionTrace:
    """`trace_media`, or what was kept of it."""
    description = {
        **_phase_key("media", family, device),
        "config": _config_key(model.configs["vae"]),
        "shape": list(media_shape),
    }
    description["conditioned"] = model.needs_first_frame
    return cache.get_or_create(
        description,
        lambda: trace_media_encoding(family, model, media_shape, device=device),
        f"the encoding of {shape_label}",
    )


def cached_text_trace(
    cache: TraceCache,
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    *,
    device: TracedDevice,
    reference_shape: tuple[int, ...] | None = None,
    text_tokens: int | None = None,
) -> ExecutionTrace:
    """`trace_text`, or what was kept of it."""
    description = {
        **_phase_key("text", family, device),
        "configs": _text_encoder_key(model),
        "precision": config.train.mixed_precision,
        "picture": None if reference_shape is None else list(reference_shape),
        "tokens": model.source.assumed_caption_tokens if text_tokens is None else text_tokens,
    }
    return cache.get_or_create(
        description,
        lambda: trace_text_encoding(
            config, family, model, reference_shape=reference_shape, text_tokens=text_tokens, device=device
        ),
        "the encoding of a caption",
    )


def cached_sampling_trace(
    cache: TraceCache,
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    shape: BatchShape,
    *,
    device: TracedDevice,
    shape_label: str = "",
) -> SampleTrace:
    """`trace_sampling`, or what was kept of it."""
    description = {
        **_phase_key("sample", family, device),
        "experts": [_expert_key(config, model, expert) for expert in model.experts],
        "trained": config.model.experts,
        "configs": _text_encoder_key(model),
        "vae": _config_key(model.configs["vae"]),
        "shape": str(shape),
        "guided": config.validation.guidance_scale > 1,
    }
    trace = cache.get_or_create(
        description,
        lambda: trace_sampling(config, family, model, shape, device=device).trace,
        f"a sample{shape_label and ' of ' + shape_label}",
    )
    return SampleTrace(trace)


def _phase_key(name: str, family: Family, device: TracedDevice) -> dict[str, JSON]:
    return {"phase": name, "family": family.name, "device": repr(device)}


def _expert_key(config: RunConfig, model: ModelDescription, expert: Expert) -> dict[str, JSON]:
    """What is trained of an expert, and how."""
    settings = adapters.settings_for_expert(config.adapter, expert.name)
    return {
        "config": _config_key(model.configs[expert.component]),
        "class": str(model.configs[""][expert.component]),
        "index": _config_key({key: value for key, value in model.configs[""].items() if not isinstance(value, list)}),
        "adapter": settings.model_dump(mode="json", exclude=IGNORED_ADAPTER_SETTINGS),
        "base_weights": config.model.base_weights,
        "left_out": [config.model.compile, config.model.attention],
        "precision": config.train.mixed_precision,
        "optimizer": [config.optimizer.name, config.optimizer.weight_decay],
        "averaged": config.train.ema_decay is not None,
        "prior": any(dataset.prior for dataset in config.datasets),
        "told": [model.needs_first_frame, model.edits_images, model.micro_conditioning, model.prediction],
    }


def _text_encoder_key(model: ModelDescription) -> dict[str, JSON]:
    return {part: _config_key(config) for part, config in model.configs.items() if part.startswith("text_encoder")}


def _config_key(config: Any) -> JSON:
    """A config as it stands in a file, without what names where it came from."""
    return {str(key): str(value) for key, value in config.items() if not str(key).startswith("_name_or_path")}
