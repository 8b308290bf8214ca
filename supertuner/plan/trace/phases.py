"""The other phases of a run on fake tensors: encoding media and captions for the caches, and making a sample.

What is traced is the family's own encoders and denoiser. A sample's loop is not run: its schedulers decide by values.
Instead its parts are, in the order of the loop, with everything in memory that a validation finds there: text encoder,
one prediction of each expert, VAE. `SampleTrace` says what of it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Silence
from supertuner.models import loading
from supertuner.models.blocks import blocks_of
from supertuner.models.spec import Family, MediaEncoder, Model, TextEncoder
from supertuner.plan.placement.step_table import Work
from supertuner.plan.trace.record import Kind, Trace
from supertuner.plan.trace.recorder import Device, Plain, Recorder
from supertuner.plan.trace.shapes import CPU, BatchShape, Shaper, hollowed
from supertuner.plan.trace.training import fake_batch, fake_trainee, told_state, traced_config
from supertuner.step.precision import Precision
from supertuner.step.trainee import experts_of, rules_of
from supertuner.step.window import Trainee

MEDIA, TEXT, SAMPLE = "encode media", "encode text", "sample"
PREDICTION, REST = "prediction", "rest"
"""Parts of the work of a sample."""


def trace_media(family: Family, model: Model, media: tuple[int, ...], *, device: Device | None = None) -> Trace:
    """One sample of this shape (CHW or CFHW) through the media encoder: samples are encoded one by one."""
    recorder = Recorder(device or Plain(), threads=1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        encoder: MediaEncoder = family.media_encoder(hollowed(model), CPU)
        _watch(recorder, encoder)
        given = torch.empty(1, *media, dtype=torch.uint8)
        with recorder.device.behaving(), recorder:
            made = encoder.encode(given)
        del made
    return recorder.trace(MEDIA)


def trace_text(
    config: RunConfig,
    family: Family,
    model: Model,
    *,
    picture: tuple[int, ...] | None = None,
    text_tokens: int | None = None,
    device: Device | None = None,
) -> Trace:
    """One caption, as long as it can be, through the text encoders."""
    recorder = Recorder(device or Plain(), threads=1)
    shaper = Shaper(config, family, model, text_tokens)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        encoder: TextEncoder = family.text_encoder(hollowed(model, text_tokens), CPU, _dtype(config))
        _watch(recorder, encoder)
        with recorder.device.behaving(), recorder:
            made = shaper.said(encoder, picture)
        del made
    notes = ("what the text encoder sees of pictures is left out",) if picture is not None else ()
    return recorder.trace(TEXT, notes=notes)


@dataclass(frozen=True, eq=False, slots=True)
class SampleTrace:
    """A validation's sample, and the work of making it."""

    trace: Trace

    @property
    def prediction(self) -> Work:
        """One denoising step, with guidance; of the expert that works most."""
        return dict(self.trace.parts)[PREDICTION]

    @property
    def rest(self) -> Work:
        """Encoding the prompt, and decoding the latents: once."""
        return dict(self.trace.parts)[REST]

    def work(self, steps: int) -> Work:
        one = self.prediction
        scaled = Work(one.matmul_flops * steps, one.other_flops * steps, one.gpu_bytes * steps, one.operators * steps)
        return self.rest + scaled


def trace_sampling(
    config: RunConfig, family: Family, model: Model, shape: BatchShape, *, device: Device | None = None
) -> SampleTrace:
    """A sample of the batch's shape, made in the middle of training: what is trained, its optimizer's state, and all
    parts of the pipeline are in memory at once."""
    config, model = traced_config(config, checkpointing=False), hollowed(model)
    precision = Precision(config.train.mixed_precision, CPU)
    guided = config.validation.guidance_scale > 1
    together = family.guides_together and guided
    batch_shape = replace(shape, samples=2 if together else 1, counts={})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(device or Plain())
    with torch.no_grad():
        trainees = [fake_trainee(config, family, model, expert, mode) for expert in experts_of(config, model)]
        with mode:
            denoisers = _denoisers(config, family, model, trainees)
            for trainee in trainees:
                _primed(trainee)
            for name, module in denoisers.items():
                module.eval()
                recorder.watch(module, blocks_of(module), f"{name}.")
            for trainee in trainees:
                told_state(recorder, trainee, f"{trainee.expert.part}.")
            vae = loading.module(model, "vae", torch.float32)
            encoder: TextEncoder = family.text_encoder(model, CPU, precision.dtype)
            _watch(recorder, encoder)
            recorder.watch(vae, {})
            rules = rules_of(config, family, model, precision, Silence())
            batch = fake_batch(batch_shape)
            for tensor in batch.tensors():
                recorder.known(tensor, Kind.BATCH)
            with recorder.device.behaving(), recorder:
                worked = _Worked(recorder)
                picture = (3, *(side * 8 for side in shape.latents[-2:])) if model.edits else None
                prompts = [Shaper(config, family, model).said(encoder, picture) for _ in range(1 + guided)]
                text = worked.since()
                predictions = []
                for module in denoisers.values():
                    said = []
                    for _ in range(1 + guided - together):
                        with rules.precision.autocast():
                            said.append(
                                rules.denoise(
                                    module, batch.latents, batch.levels, dict(batch.text), dict(batch.conditions)
                                )
                            )
                    predictions.append(worked.since())
                    del said
                decoded = _decoded(vae, batch.latents[:1].float())
                rest = text + worked.since()
                del prompts, decoded
    notes = ("the sampler's own arithmetic between predictions is left out",)
    most = max(predictions, key=lambda one: one.matmul_flops)
    return SampleTrace(replace(recorder.trace(SAMPLE, notes=notes), parts=((PREDICTION, most), (REST, rest))))


class _Worked:
    """The work of a recorder's stretches, taken piece by piece."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._before = recorder, Work()

    def since(self) -> Work:
        """What was worked since this was asked last."""
        total = self._recorder.worked()
        before, self._before = self._before, total
        return Work(
            total.matmul_flops - before.matmul_flops,
            total.other_flops - before.other_flops,
            total.gpu_bytes - before.gpu_bytes,
            total.operators - before.operators,
        )


def _denoisers(config: RunConfig, family: Family, model: Model, trainees: Sequence[Trainee]) -> dict[str, nn.Module]:
    """All experts by part: those in training, and those that the sampler loads for itself."""
    found = {trainee.expert.part: trainee.module for trainee in trainees}
    for expert in model.experts:
        if expert.part not in found:
            found[expert.part] = family.denoiser(model, expert, _dtype(config))
    return found


def _primed(trainee: Trainee) -> None:
    """One step of the optimizer with gradients of nothing: what it keeps is there."""
    for parameter in trainee.parameters.values():
        parameter.grad = torch.empty_like(parameter)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)


def _decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Pixels of latents; a VAE of films takes a picture as a film of one frame."""
    films = any(isinstance(part, nn.Conv3d) for part in vae.modules())
    if films and latents.ndim == 4:
        latents = latents.unsqueeze(2)
    pixels: torch.Tensor = vae.decode(latents, return_dict=False)[0]
    return pixels


def _watch(recorder: Recorder, encoder: object) -> None:
    """Count the weights of every module that an encoder holds."""
    for module in _modules(vars(encoder)):
        recorder.watch(module, {})


def _modules(held: object) -> Iterator[nn.Module]:
    if isinstance(held, nn.Module):
        yield held
    elif isinstance(held, dict):
        for one in held.values():
            yield from _modules(one)
    elif isinstance(held, list | tuple):
        for one in held:
            yield from _modules(one)


def _dtype(config: RunConfig) -> torch.dtype:
    return Precision(config.train.mixed_precision, CPU).dtype
