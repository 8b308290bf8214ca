"""Compares full-size training windows on the phantom with their forecasts.

A window runs as in a run: the family's own module, with adapters, optimizer and objective from `step/expert_setup.py`,
and `train_window` twice, so that the second finds what the first left in memory. Weights are uninitialized CUDA
tensors.

As a program it prints the table of docs/forecast.md: scripts/phantom_python.sh -m tests.phantom.full_size
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from supertuner.config.settings.model import ModelSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.models import loading
from supertuner.models.published_models import describe_model
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.plan.trace.caching_allocator import simulate_allocator
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.cuda_reductions import GpuChip
from supertuner.plan.trace.encoder_shapes import BatchShape, EncoderShapeProbe
from supertuner.plan.trace.recorder import FakeScalarMode
from supertuner.plan.trace.trace_training_step import trace_training_step
from supertuner.step.batch import StepBatch
from supertuner.step.expert_setup import (
    build_expert_state,
    build_step_options,
    build_trainable_expert,
    place_base_weights,
    weight_dtype,
)
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, train_window

GIB = 1 << 30
WAN = "wan-ai/wan2.2-t2v-a14b-diffusers"
WAN_I2V = "wan-ai/wan2.2-i2v-a14b-diffusers"
WAN_5B = "wan-ai/wan2.2-ti2v-5b-diffusers"
QWEN = "qwen/qwen-image"
EDIT = "qwen/qwen-image-edit"
FLUX = "black-forest-labs/flux.1-dev"
SD35 = "stabilityai/stable-diffusion-3.5-large"
SD35_MEDIUM = "stabilityai/stable-diffusion-3.5-medium"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"


@dataclass(frozen=True)
class Case:
    """One configuration of a run, and the samples that it trains on."""

    title: str
    family: str
    path: str
    media: tuple[int, ...]
    """CHW or CFHW, in pixels."""
    samples: int = 1
    micro_batches: int = 1
    adapter: Mapping[str, Any] = field(default_factory=lambda: {"type": "lora", "rank": 16})
    train: Mapping[str, Any] = field(default_factory=lambda: {"gradient_checkpointing": True})
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    denoiser: Mapping[str, Any] = field(default_factory=dict)
    """Entries that differ from the published config."""
    shape: BatchShape | None = None
    """The shape of a batch; None: probed with the model's own encoders."""
    convolutions: bool = False
    """Whether convolutions determine its peak: the phantom does not have cuDNN's real workspaces."""


KEEP = {"gradient_checkpointing": False}
FULL = {"type": "full"}
CASES = (
    Case("Wan2.2 14B T2V, LoRA, 81 frames of 832×480, checkpointing", "wan2.2", WAN, (3, 81, 480, 832)),
    Case("Wan2.2 14B T2V, LoRA, 81 frames of 1280×720, checkpointing", "wan2.2", WAN, (3, 81, 720, 1280)),
    Case("Wan2.2 14B T2V, LoRA, 4 pictures of 1024×1024, checkpointing", "wan2.2", WAN, (3, 1024, 1024), samples=4),
    Case("Wan2.2 14B T2V, LoRA, 17 frames of 832×480", "wan2.2", WAN, (3, 17, 480, 832), train=KEEP),
    Case("Wan2.2 14B T2V, full, 33 frames of 832×480, checkpointing", "wan2.2", WAN, (3, 33, 480, 832), adapter=FULL),
    Case("Wan2.2 14B I2V, LoRA, 81 frames of 832×480, checkpointing", "wan2.2", WAN_I2V, (3, 81, 480, 832)),
    Case("Wan2.2 5B, LoRA, 121 frames of 1280×704, checkpointing", "wan2.2", WAN_5B, (3, 121, 704, 1280)),
    Case("Wan2.2 5B, full, 49 frames of 1280×704, checkpointing", "wan2.2", WAN_5B, (3, 49, 704, 1280), adapter=FULL),
    Case("Qwen-Image, LoRA, 1024×1024, checkpointing", "qwen-image", QWEN, (3, 1024, 1024)),
    Case("Qwen-Image, LoRA, 4 of 1024×1024", "qwen-image", QWEN, (3, 1024, 1024), samples=4, train=KEEP),
    Case("Qwen-Image-Edit, LoRA, 2 of 1024×1024, checkpointing", "qwen-image-edit", EDIT, (3, 1024, 1024), samples=2),
    Case("Flux dev, LoRA, 1024×1024, checkpointing", "flux", FLUX, (3, 1024, 1024)),
    Case("Flux dev, LoRA, 4 of 1024×1024", "flux", FLUX, (3, 1024, 1024), samples=4, train=KEEP),
    Case("Flux dev, full, 1024×1024, checkpointing", "flux", FLUX, (3, 1024, 1024), adapter=FULL),
    Case("SD3.5 large, LoRA, 4 of 1024×1024", "sd3.5", SD35, (3, 1024, 1024), samples=4, train=KEEP),
    Case("SD3.5 large, LoRA, 1024×1024, checkpointing", "sd3.5", SD35, (3, 1024, 1024)),
    Case("SD3.5 medium, full, 4 of 1024×1024", "sd3.5", SD35_MEDIUM, (3, 1024, 1024), 4, adapter=FULL, train=KEEP),
    Case("SDXL, LoRA, 4 of 1024×1024", "sdxl", SDXL, (3, 1024, 1024), 4, train=KEEP, convolutions=True),
)
"""The table of docs/forecast.md."""


@dataclass(frozen=True)
class Bytes:
    """Peaks of allocated and of reserved memory."""

    allocated: int
    reserved: int


def forecast(case: Case) -> Bytes:
    """The peaks by the trace and the model of the allocator."""
    trace = trace_training_step(*_described(case), micro_batches=case.micro_batches, device=CudaDevice(chip=chip()))
    peaks = simulate_allocator(trace)
    return Bytes(peaks.allocated_bytes, peaks.reserved_bytes)


def chip() -> GpuChip:
    """The chip that the phantom presents (FAKECUDA_PROFILE)."""
    chip = torch.cuda.get_device_properties(0)
    return GpuChip((chip.major, chip.minor), chip.multi_processor_count, chip.max_threads_per_multi_processor)


def on_the_phantom(case: Case) -> Bytes:
    """The peaks of torch's own allocator in the second window. Measured."""
    config, family, model, expert, shape = _described(case)
    device = torch.device("cuda")
    precision = ComputePrecision(config.train.mixed_precision, device)
    module = family.load_denoiser(model, expert, weight_dtype(config, precision))
    load_uninitialized(module, config, device)
    trained = build_trainable_expert(config, family, expert, module, precision, NullSink())
    expert_state = build_expert_state(config, expert, trained, precision)
    _read_ones_instead_of_zeros(expert_state)
    options = build_step_options(config, family, model, precision, NullSink())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        # LyCORIS and torchao compile parts of themselves, and there is no compiler here.
        with torch.compiler.set_stance("force_eager"):
            train_window(
                expert_state,
                zero_batches(shape, case.micro_batches, device),
                samples=case.samples * case.micro_batches,
                learning_rate=1e-4,
                options=options,
                seed=0,
            )
    peaks = Bytes(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    _clear_caches(module)
    del module, trained, expert_state, options
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0, "this case would leave memory to the next one"
    return peaks


def _described(case: Case) -> tuple[RunConfig, Family, ModelDescription, Expert, BatchShape]:
    settings = {"family": case.family, "path": case.path, **case.model}
    config = RunConfig.model_validate(
        {
            "model": settings,
            "adapter": dict(case.adapter),
            "train": {"max_grad_norm": 1.0, **case.train},
            "optimizer": dict(case.optimizer),
        }
    )
    family, model, _ = describe_model(ModelSettings.model_validate(settings))
    expert = model.experts[0]
    if case.denoiser:
        changed = {**model.configs[expert.component], **case.denoiser}
        model = replace(model, configs={**model.configs, expert.component: changed})
    reference_shape = case.media if model.edits_images else None
    shape = case.shape or EncoderShapeProbe(config, family, model).batch_shape(
        case.samples, case.media, reference_shape
    )
    return config, family, model, expert, shape


def _read_ones_instead_of_zeros(expert_state: ExpertState) -> None:
    """Values that the optimizer reads are 1, as in a trace. On the phantom they would be 0, and Prodigy ends its step
    early if all gradients are. Every tensor is allocated and released by torch as before."""
    step = expert_state.optimizer.torch_optimizer.step

    def step_with_ones() -> None:
        with FakeScalarMode():
            step()

    expert_state.optimizer.torch_optimizer.step = step_with_ones


def load_uninitialized(module: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Brings a module without weights to a device as a run does, layer by layer and quantized; only the copies from
    host memory are replaced by uninitialized tensors."""
    original = loading.place_tensors
    loading.place_tensors = partial(_place_uninitialized, WeakValueDictionary())
    try:
        place_base_weights(module, config.model.base_weights, device, NullSink())
    finally:
        loading.place_tensors = original
    _zero_plain_tensors(module)


def placed(device: torch.device, module: nn.Module) -> nn.Module:
    """Moves a module from the meta device to this one, uninitialized; its plain tensors go to the CPU, as after
    loading."""
    _place_uninitialized(WeakValueDictionary(), module, device)
    _zero_plain_tensors(module)
    return module


def _place_uninitialized(
    moved: MutableMapping[nn.Parameter, nn.Parameter], module: nn.Module, device: torch.device, *, recurse: bool = True
) -> None:
    """`moved`: parameters without weights that were moved before → their replacements, because modules may share them.
    It must not keep them alive: quantization replaces them."""
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                replacement = moved.get(parameter)
                if replacement is None:
                    values = torch.empty_like(parameter, device=device)
                    replacement = moved[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                part._parameters[name] = replacement
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def _zero_plain_tensors(module: nn.Module) -> None:
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                vars(part)[name] = torch.zeros_like(value, device="cpu")


def _clear_caches(module: nn.Module) -> None:
    """Clears lru_caches of the module's classes: Qwen-Image caches the RoPE of every shape for the life of the
    process."""
    for kind in {type(part) for part in module.modules()}:
        for value in vars(kind).values():
            for cell in getattr(value, "__closure__", None) or ():
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()


def zero_batches(shape: BatchShape, count: int, device: torch.device) -> Iterator[StepBatch]:
    for _ in range(count):
        latents = torch.zeros(shape.samples, *shape.latents, dtype=shape.latents_dtype)

        def zeros(fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
            return {name: torch.zeros(shape.samples, *one.shape, dtype=one.dtype) for name, one in fields.items()}

        yield StepBatch(
            latents=latents,
            noise=torch.zeros(latents.shape),
            sigmas=torch.full((shape.samples,), 0.5),
            text=zeros(shape.text),
            conditions=zeros(shape.conditions),
            loss_inputs=zeros(shape.loss_inputs),
        ).to(device)


def row(case: Case) -> str:
    """A row of the table of docs/forecast.md."""
    start = time.perf_counter()
    modelled = forecast(case)
    seconds = time.perf_counter() - start
    measured = on_the_phantom(case)
    parts = [case.title]
    pairs = ((modelled.allocated, measured.allocated), (modelled.reserved, measured.reserved))
    for ours, theirs in pairs:
        parts += [f"{ours / GIB:.2f}", f"{theirs / GIB:.2f}", f"{100 * (ours / theirs - 1):+.2f} %"]
    return " | ".join(["", *parts, f"{seconds:.0f}", ""]).strip()


def main(words: Sequence[str]) -> None:
    if words[:1] == ["--json"]:
        case = _case_by_title(words[1])
        sys.stdout.write(json.dumps([astuple(forecast(case)), astuple(on_the_phantom(case))]) + "\n")
        return
    for case in CASES:
        if all(word in case.title for word in words):
            sys.stdout.write(row(case) + "\n")
            sys.stdout.flush()


def _case_by_title(title: str) -> Case:
    """A case of the table, or a random one: `seed 7`."""
    if title.startswith("seed "):
        from tests.phantom.random_cases import random_case

        return random_case(int(title.removeprefix("seed ")))
    return next(case for case in CASES if case.title == title)


if __name__ == "__main__":
    main(sys.argv[1:])
