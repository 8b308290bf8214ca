"""What encoders make of media and captions, as shapes: learnt from small samples on fake tensors, scaled to any size.

A VAE's latents grow as its input does, in whole steps: two small samples say by how much. What no family would take
(sides that are no multiples, frames between two latents) is refused by the family before anybody asks here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.models.spec import Family, ImageTextEncoder, ModelDescription, Tensors
from supertuner.plan.trace.recorder import FakeScalarMode
from supertuner.step.precision import ComputePrecision, latent_storage_dtype

CPU = torch.device("cpu")
"""Where fake tensors are: torch without CUDA runs no operators on fake CUDA tensors. A trace's device says what
differs."""
PROBE_SIDE = 128
"""Side of the samples that shapes are learnt from: a multiple of what any family asks for."""
PROBE_FRAMES_FEW, PROBE_FRAMES_MORE = 5, 9
"""Frames of the two short films that shapes of films are learnt from."""


@dataclass(frozen=True, slots=True)
class BatchTensorSpec:
    """One tensor of a batch, without its first dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What goes into one forward pass."""

    samples: int
    latents: tuple[int, ...]
    """Of one sample."""
    text: Mapping[str, BatchTensorSpec]
    conditions: Mapping[str, BatchTensorSpec] = field(default_factory=dict)
    loss_inputs: Mapping[str, BatchTensorSpec] = field(default_factory=dict)
    """As in `StepBatch`."""
    latents_dtype: torch.dtype = torch.bfloat16
    """As they are stored."""


def without_weights(model: ModelDescription, text_tokens: int | None = None) -> ModelDescription:
    """The model, none of whose parts needs a weight; captions are taken for that long where their length counts."""
    source = replace(model.source, without_weights=True)
    return replace(model, source=source if text_tokens is None else replace(source, assumed_caption_tokens=text_tokens))


class EncoderShapeProbe:
    """Learns a model's shapes once, on first use, and answers for any size."""

    def __init__(
        self, config: RunConfig, family: Family, model: ModelDescription, text_tokens: int | None = None
    ) -> None:
        self._config, self._family, self._model = config, family, without_weights(model, text_tokens)
        self._precision = ComputePrecision(config.train.mixed_precision, CPU)
        self._probed_media: dict[tuple[int, ...], dict[str, BatchTensorSpec]] = {}
        self._probed_text: dict[tuple[int, ...], dict[str, BatchTensorSpec]] = {}

    def encoded_specs(self, media_shape: tuple[int, ...]) -> dict[str, BatchTensorSpec]:
        """What is stored about a sample of this shape (CHW or CFHW): its latents, and conditions."""
        if reason := self._family.unsupported_reason(self._model, media_shape):
            raise ModelError(f"a sample of shape {media_shape} cannot be encoded: {reason}")
        sides = Fraction(media_shape[-2], PROBE_SIDE), Fraction(media_shape[-1], PROBE_SIDE)
        if len(media_shape) == 3:
            probed = self._probe_media((3, PROBE_SIDE, PROBE_SIDE))
            return {name: _scale_sides(one, one.shape[:-2], sides) for name, one in probed.items()}
        fewer_frames, more_frames = (
            self._probe_media((3, PROBE_FRAMES_FEW, PROBE_SIDE, PROBE_SIDE)),
            self._probe_media((3, PROBE_FRAMES_MORE, PROBE_SIDE, PROBE_SIDE)),
        )
        return {
            name: _scale_sides(one, _leading_dimensions(one, more_frames[name], media_shape[1]), sides)
            for name, one in fewer_frames.items()
        }

    def text_specs(self, samples: int, reference_shape: tuple[int, ...] | None = None) -> dict[str, BatchTensorSpec]:
        """What a batch is told, as long as it can be; `picture` is what a model that edits changes. Several captions
        are taken to differ in their lengths."""
        key = (samples, *(reference_shape or ()))
        if key not in self._probed_text:
            with FakeTensorMode(allow_non_fake_inputs=True), FakeScalarMode(bool_value=samples > 1):
                encoder = self._family.build_text_encoder(self._model, CPU, self._precision.dtype)
                encoded_caption = self.encode_fake_caption(encoder, reference_shape)
                self._probed_text[key] = _specs_without_batch(
                    self._family.pad_text(self._model, [encoded_caption] * samples), self._precision.dtype
                )
        return self._probed_text[key]

    def encode_fake_caption(self, encoder: object, reference_shape: tuple[int, ...] | None) -> Tensors:
        """A caption through an encoder, on fake tensors."""
        if isinstance(encoder, ImageTextEncoder):
            if reference_shape is None:
                raise ModelError(f"{self._model.title} changes a picture, and nobody says how large it is")
            return encoder.encode_with_images(["a"], [torch.empty(reference_shape, dtype=torch.uint8)])[0]
        encoded: list[Tensors] = encoder.encode(["a"])  # type: ignore[attr-defined]
        return encoded[0]

    def batch_shape(
        self, samples: int, media_shape: tuple[int, ...], reference_shape: tuple[int, ...] | None = None
    ) -> BatchShape:
        """The batch that samples of this shape become."""
        specs = self.encoded_specs(media_shape)
        latents = specs.pop("latents")
        if self._model.edits_images and reference_shape is not None:
            specs["condition"] = self.encoded_specs(reference_shape)["latents"]
        if self._model.micro_conditioning:
            specs["framing"] = BatchTensorSpec((6,))
        return BatchShape(
            samples=samples,
            latents=latents.shape,
            text=self.text_specs(samples, reference_shape if self._model.edits_images else None),
            conditions=specs,
            loss_inputs=self._loss_weight_specs(latents.shape),
            latents_dtype=latents.dtype,
        )

    def _loss_weight_specs(self, latents: tuple[int, ...]) -> dict[str, BatchTensorSpec]:
        """What samples count, where some of the configured datasets say so."""
        trained = [dataset for dataset in self._config.datasets if not dataset.held_out]
        specs: dict[str, BatchTensorSpec] = {}
        if any(one.loss_weight != 1 or one.loss_weights_file is not None for one in trained):
            specs["weight"] = BatchTensorSpec(())
        if any(one.mask_dir is not None for one in trained):
            specs["mask"] = BatchTensorSpec((*(1 for _ in latents[:-2]), *latents[-2:]))
        if any(one.prior for one in trained):
            specs["prior"] = BatchTensorSpec((), torch.bool)
        return specs

    def _probe_media(self, media_shape: tuple[int, ...]) -> dict[str, BatchTensorSpec]:
        if media_shape not in self._probed_media:
            with FakeTensorMode(allow_non_fake_inputs=True), FakeScalarMode():
                encoder = self._family.build_media_encoder(self._model, CPU)
                encoded = encoder.encode(torch.empty(1, *media_shape, dtype=torch.uint8))
                self._probed_media[media_shape] = _specs_without_batch(
                    encoded, latent_storage_dtype(self._precision.dtype)
                )
        return self._probed_media[media_shape]


def _specs_without_batch(encoded: Tensors, dtype: torch.dtype) -> dict[str, BatchTensorSpec]:
    """Without the batch, and numbers in the format that they are stored in."""
    return {
        name: BatchTensorSpec(tuple(one.shape[1:]), dtype if one.is_floating_point() else one.dtype)
        for name, one in encoded.items()
    }


def _leading_dimensions(fewer_frames: BatchTensorSpec, more_frames: BatchTensorSpec, frames: int) -> tuple[int, ...]:
    """All dimensions but the sides, in a film of so many frames."""
    return tuple(
        _as_integer(
            at_few + Fraction(at_more - at_few, PROBE_FRAMES_MORE - PROBE_FRAMES_FEW) * (frames - PROBE_FRAMES_FEW)
        )
        for at_few, at_more in zip(fewer_frames.shape[:-2], more_frames.shape[:-2], strict=True)
    )


def _scale_sides(spec: BatchTensorSpec, leading: Sequence[int], factors: tuple[Fraction, Fraction]) -> BatchTensorSpec:
    height, width = (_as_integer(side * size) for side, size in zip(factors, spec.shape[-2:], strict=True))
    return replace(spec, shape=(*leading, height, width))


def _as_integer(size: Fraction) -> int:
    assert size.denominator == 1, f"a size of {size}"
    return int(size)
