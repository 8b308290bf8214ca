"""Traces of phases by what decides them: asked twice, or for two experts that are alike, a step is traced once.

A key is the settings that change a tensor or an operator, the configs of the modules, the shape of the batch and the
device. What changes values only (rates, seeds, files of weights) is no part of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supertuner.config.settings.tree import RunConfig
from supertuner.core.types import JSON
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert, Family, Model
from supertuner.plan.trace.phases import SampleTrace, trace_media, trace_sampling, trace_text
from supertuner.plan.trace.record import Trace
from supertuner.plan.trace.recorder import Device
from supertuner.plan.trace.shapes import BatchShape
from supertuner.plan.trace.trace_store import Kept
from supertuner.plan.trace.training import trace_training

VALUES_ONLY = {"start_from", "frozen", "high_noise", "low_noise"}
"""Of an adapter's settings: files, and what `for_expert` has chosen from already."""


def training(
    kept: Kept,
    config: RunConfig,
    family: Family,
    model: Model,
    expert: Expert,
    shape: BatchShape,
    *,
    device: Device,
    checkpointing: bool | None = None,
    micro_batches: int = 1,
    of: str = "",
) -> Trace:
    """`trace_training`, or what was kept of it. `of` is for people: what the shape is called."""
    recomputed = config.train.gradient_checkpointing if checkpointing is None else checkpointing
    what = {
        **_phase("train", family, device),
        **_trained(config, model, expert),
        "shape": str(shape),
        "checkpointing": recomputed,
        "micro_batches": micro_batches,
        "objective": config.objective.model_dump(mode="json"),
        "max_grad_norm": config.train.max_grad_norm is not None,
    }
    made = kept.trace(
        what,
        lambda: trace_training(
            config,
            family,
            model,
            expert,
            shape,
            checkpointing=checkpointing,
            micro_batches=micro_batches,
            device=device,
        ),
        f"a step of {expert.name}{of and ' with ' + of}",
    )
    return replace(made, phase=f"train {expert.name}")


def media(
    kept: Kept, family: Family, model: Model, shape: tuple[int, ...], *, device: Device, of: str = "a sample"
) -> Trace:
    """`trace_media`, or what was kept of it."""
    what = {**_phase("media", family, device), "config": _plain(model.configs["vae"]), "shape": list(shape)}
    what["conditioned"] = model.starts_from_frame
    return kept.trace(what, lambda: trace_media(family, model, shape, device=device), f"the encoding of {of}")


def text(
    kept: Kept,
    config: RunConfig,
    family: Family,
    model: Model,
    *,
    device: Device,
    picture: tuple[int, ...] | None = None,
    text_tokens: int | None = None,
) -> Trace:
    """`trace_text`, or what was kept of it."""
    what = {
        **_phase("text", family, device),
        "configs": _encoders(model),
        "precision": config.train.mixed_precision,
        "picture": None if picture is None else list(picture),
        "tokens": model.source.hollow_tokens if text_tokens is None else text_tokens,
    }
    return kept.trace(
        what,
        lambda: trace_text(config, family, model, picture=picture, text_tokens=text_tokens, device=device),
        "the encoding of a caption",
    )


def sampling(
    kept: Kept,
    config: RunConfig,
    family: Family,
    model: Model,
    shape: BatchShape,
    *,
    device: Device,
    of: str = "",
) -> SampleTrace:
    """`trace_sampling`, or what was kept of it."""
    what = {
        **_phase("sample", family, device),
        "experts": [_trained(config, model, expert) for expert in model.experts],
        "trained": config.model.experts,
        "configs": _encoders(model),
        "vae": _plain(model.configs["vae"]),
        "shape": str(shape),
        "guided": config.validation.guidance_scale > 1,
    }
    made = kept.trace(
        what,
        lambda: trace_sampling(config, family, model, shape, device=device).trace,
        f"a sample{of and ' of ' + of}",
    )
    return SampleTrace(made)


def _phase(name: str, family: Family, device: Device) -> dict[str, JSON]:
    return {"phase": name, "family": family.name, "device": repr(device)}


def _trained(config: RunConfig, model: Model, expert: Expert) -> dict[str, JSON]:
    """What is trained of an expert, and how."""
    settings = adapters.for_expert(config.adapter, expert.name)
    return {
        "config": _plain(model.configs[expert.part]),
        "class": str(model.configs[""][expert.part]),
        "index": _plain({key: value for key, value in model.configs[""].items() if not isinstance(value, list)}),
        "adapter": settings.model_dump(mode="json", exclude=VALUES_ONLY),
        "base_weights": config.model.base_weights,
        "left_out": [config.model.compile, config.model.attention],
        "precision": config.train.mixed_precision,
        "optimizer": [config.optimizer.name, config.optimizer.weight_decay],
        "averaged": config.train.ema_decay is not None,
        "prior": any(dataset.prior for dataset in config.datasets),
        "told": [model.starts_from_frame, model.edits, model.told_framing, model.prediction],
    }


def _encoders(model: Model) -> dict[str, JSON]:
    return {part: _plain(config) for part, config in model.configs.items() if part.startswith("text_encoder")}


def _plain(config: Any) -> JSON:
    """A config as it stands in a file, without what names where it came from."""
    return {str(key): str(value) for key, value in config.items() if not str(key).startswith("_name_or_path")}
