"""Traces of the phases without training, on fake tensors: encoding media and captions, and generating a sample.

The traced code is the family's own encoders and denoiser. The sampling loop itself is not traced, because its
schedulers depend on values. Its parts are traced in the order of the loop, with everything in memory that a validation
finds there: text encoder, one prediction of each expert, VAE decoder. `sample_work` knows which part is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.models import loading
from supertuner.models.blocks import named_blocks
from supertuner.models.spec import Family, MediaEncoder, ModelDescription, TextEncoder
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace import trace_training_step as training_step
from supertuner.plan.trace.encoder_shapes import CPU, BatchShape, EncoderShapeProbe, MediaShape, without_weights
from supertuner.plan.trace.execution_trace import ExecutionTrace, TensorKind
from supertuner.plan.trace.fake_results import FakeResultMode
from supertuner.plan.trace.recorder import PLAIN_CPU, TracedDevice, TraceRecorder
from supertuner.step.expert_setup import build_step_options, quantize_base_weights, selected_experts
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState

ENCODE_MEDIA, ENCODE_TEXT, SAMPLING = "encode media", "encode text", "sample"
PREDICTION, ENCODE_AND_DECODE = "prediction", "rest"
"""Names in `ExecutionTrace.work_by_part` of a sample: one denoising step with guidance, of the expert with the most
work; encoding the prompt and decoding the latents, once per sample."""


def trace_media_encoding(
    family: Family, model: ModelDescription, media_shape: MediaShape, *, device: TracedDevice = PLAIN_CPU
) -> ExecutionTrace:
    """Encoding one sample of this shape (CHW or CFHW); the caches encode samples one by one."""
    recorder = TraceRecorder(device, threads=1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        encoder: MediaEncoder = family.build_media_encoder(without_weights(model), CPU)
        _track_encoder(recorder, encoder)
        pixels = torch.empty(1, *media_shape, dtype=torch.uint8)
        with recorder.device.emulate_dispatch(), recorder:
            encoded = encoder.encode(pixels)
        del encoded
    return recorder.build_trace(ENCODE_MEDIA)


def trace_text_encoding(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    *,
    reference_shape: MediaShape | None = None,
    device: TracedDevice = PLAIN_CPU,
) -> ExecutionTrace:
    """Encoding one caption of the greatest length. Arguments as in `CachedTraces.text`."""
    recorder = TraceRecorder(device, threads=1)
    shape_probe = EncoderShapeProbe(config, family, model)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        encoder: TextEncoder = family.build_text_encoder(without_weights(model), CPU, _compute_dtype(config))
        _track_encoder(recorder, encoder)
        with recorder.device.emulate_dispatch(), recorder:
            encoded = shape_probe.encode_fake_caption(encoder, reference_shape)
        del encoded
    notes = ("the text encoder's vision part is left out",) if reference_shape is not None else ()
    return recorder.build_trace(ENCODE_TEXT, notes=notes)


def sample_work(trace: ExecutionTrace, steps: int) -> OperatorWork:
    """The work of a sample with this many denoising steps, from the trace of a sample."""
    parts = dict(trace.work_by_part)
    return parts[ENCODE_AND_DECODE] + parts[PREDICTION] * steps


def trace_sampling(
    config: RunConfig, family: Family, model: ModelDescription, shape: BatchShape, *, device: TracedDevice = PLAIN_CPU
) -> ExecutionTrace:
    """Generating a sample of the batch's shape during training: trained weights, optimizer state and all parts of the
    pipeline are in memory at once."""
    config = training_step.traceable_config(training_step.with_checkpointing(config, False))
    model = without_weights(model)
    precision = ComputePrecision(config.train.mixed_precision, CPU)
    guided = config.validation.guidance_scale > 1
    guides_in_one_batch = family.batched_guidance and guided
    batch_shape = replace(shape, samples=2 if guides_in_one_batch else 1, loss_inputs={})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = TraceRecorder(device)
    experts = selected_experts(config, model)
    with torch.no_grad():
        expert_states = [training_step.build_fake_expert_state(config, family, model, one, mode) for one in experts]
        with mode:
            denoisers = _build_denoisers(config, family, model, expert_states)
            with FakeResultMode(device.results):
                for expert_state in expert_states:
                    _prime_optimizer(expert_state)
            for name, module in denoisers.items():
                module.eval()
                recorder.track_module(module, named_blocks(module), f"{name}.")
            for expert_state in expert_states:
                training_step.register_optimizer_state(recorder, expert_state, f"{expert_state.expert.component}.")
            vae = loading.load_module(model, "vae", torch.float32)
            encoder: TextEncoder = family.build_text_encoder(model, CPU, precision.dtype)
            _track_encoder(recorder, encoder)
            recorder.track_module(vae, {})
            options = build_step_options(config, family, model, precision, NullSink())
            batch = training_step.fake_batch(batch_shape)
            for tensor in batch.tensors():
                recorder.register_tensor(tensor, TensorKind.BATCH)
            with recorder.device.emulate_dispatch(), recorder:
                probe = EncoderShapeProbe(config, family, model)
                reference_shape = (3, *(side * 8 for side in shape.latents[-2:])) if model.edits_images else None
                prompts = [probe.encode_fake_caption(encoder, reference_shape) for _ in range(1 + guided)]
                work = [recorder.work_so_far()]  # after the prompts, after the prediction of each expert
                for module in denoisers.values():
                    outputs = []
                    for _ in range(1 + guided - guides_in_one_batch):
                        with options.precision.autocast():
                            inputs = (batch.latents, batch.sigmas, dict(batch.text), dict(batch.conditions))
                            outputs.append(options.denoise(module, *inputs))
                    work.append(recorder.work_so_far())
                    del outputs
                decoded = _decode_latents(vae, batch.latents[:1].float())
                encode_and_decode = work[0] + (recorder.work_so_far() - work[-1])
                del prompts, decoded
    prediction = max((after - before for before, after in pairwise(work)), key=lambda one: one.matmul_flops)
    trace = recorder.build_trace(SAMPLING, notes=("the sampler's own arithmetic between predictions is left out",))
    return replace(trace, work_by_part=((PREDICTION, prediction), (ENCODE_AND_DECODE, encode_and_decode)))


def _build_denoisers(
    config: RunConfig, family: Family, model: ModelDescription, expert_states: Sequence[ExpertState]
) -> dict[str, nn.Module]:
    """All experts by component: the trained ones, and those that a validation loads in addition, in the same format."""
    denoisers = {one.expert.component: one.module for one in expert_states}
    precision = ComputePrecision(config.train.mixed_precision, torch.device("meta"))
    for expert in model.experts:
        if expert.component not in denoisers:
            module = denoisers[expert.component] = family.load_denoiser(model, expert, precision.dtype)
            quantize_base_weights(config, module, precision, NullSink())
    return denoisers


def _prime_optimizer(expert_state: ExpertState) -> None:
    """Create the optimizer's state; most optimizers do that in their first step, which gets empty gradients."""
    for parameter in expert_state.parameters.values():
        parameter.grad = torch.empty_like(parameter)
    optimizer = expert_state.optimizer.torch_optimizer
    if isinstance(optimizer, Automagic):
        optimizer.create_state()
    else:
        expert_state.optimizer.step()
    expert_state.optimizer.zero_grad(set_to_none=True)


def _decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Pixels of latents. A video VAE decodes an image as a video of one frame."""
    is_video_vae = any(isinstance(part, nn.Conv3d) for part in vae.modules())
    if is_video_vae and latents.ndim == 4:
        latents = latents.unsqueeze(2)
    pixels: torch.Tensor = vae.decode(latents, return_dict=False)[0]
    return pixels


def _track_encoder(recorder: TraceRecorder, encoder: object) -> None:
    """Count the weights of every module that an encoder holds in its attributes, also in lists and dictionaries."""
    modules = list(_find_modules(vars(encoder)))
    assert modules, f"{type(encoder).__name__} holds no module in its attributes: its weights would not be counted"
    for module in modules:
        recorder.track_module(module, {})


def _find_modules(value: object) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _find_modules(one)


def _compute_dtype(config: RunConfig) -> torch.dtype:
    return ComputePrecision(config.train.mixed_precision, CPU).dtype
