"""The shapes that encoders produce from media and captions: probed with small fake inputs, and scaled to any size.

The sides and frames of a VAE's latents are linear functions of those of its input: two small inputs determine them.
Sizes that are not valid for a family (sides that are no multiple, frames between two latents) raise ModelError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError
from supertuner.models.spec import Family, ImageTextEncoder, ModelDescription, Tensors
from supertuner.plan.trace.recorder import FakeScalarMode
from supertuner.step.precision import ComputePrecision, latent_storage_dtype

MediaShape: TypeAlias = tuple[int, ...]
"""CHW or CFHW."""

CPU = torch.device("cpu")
"""The device of fake tensors: torch without CUDA runs no operators on fake CUDA tensors. `TracedDevice` adds what
differs on the real device."""
PROBE_SIDE = 128
"""Side of the probed inputs: a multiple of what any family requires."""
PROBE_FRAMES_FEW, PROBE_FRAMES_MORE = 5, 9
"""Frames of the two probed videos."""


@dataclass(frozen=True, slots=True)
class BatchTensorSpec:
    """Shape and type of one tensor of a batch, without the batch dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The tensors of one micro-batch."""

    samples: int
    latents: tuple[int, ...]
    """Shape for one sample."""
    text: Mapping[str, BatchTensorSpec]
    conditions: Mapping[str, BatchTensorSpec] = field(default_factory=dict)
    loss_inputs: Mapping[str, BatchTensorSpec] = field(default_factory=dict)
    """As in `StepBatch`."""
    latents_dtype: torch.dtype = torch.bfloat16
    """As they are stored."""


def without_weights(model: ModelDescription) -> ModelDescription:
    """The model, built without weight files."""
    return replace(model, source=replace(model.source, without_weights=True))


class EncoderShapeProbe:
    """Probes a model's encoders on first use, and computes shapes for any size from the result."""

    def __init__(self, config: RunConfig, family: Family, model: ModelDescription) -> None:
        self._config, self._family, self._model = config, family, without_weights(model)
        self._precision = ComputePrecision(config.train.mixed_precision, CPU)
        self._probed_media: dict[tuple[int, ...], dict[str, BatchTensorSpec]] = {}
        self._probed_text: dict[tuple[int, ...], dict[str, BatchTensorSpec]] = {}

    def encoded_specs(self, media_shape: tuple[int, ...]) -> dict[str, BatchTensorSpec]:
        """The tensors that are cached for a sample of this shape (CHW or CFHW): latents and conditions. Raises
        ModelError if the family cannot encode the shape."""
        if reason := self._family.unsupported_reason(self._model, media_shape):
            raise ModelError(f"a sample of shape {media_shape} cannot be encoded: {reason}")
        sides = Fraction(media_shape[-2], PROBE_SIDE), Fraction(media_shape[-1], PROBE_SIDE)
        if len(media_shape) == 3:
            probed = self._probe_media((3, PROBE_SIDE, PROBE_SIDE))
            return {name: _scale_sides(one, one.shape[:-2], sides) for name, one in probed.items()}
        fewer_frames = self._probe_media((3, PROBE_FRAMES_FEW, PROBE_SIDE, PROBE_SIDE))
        more_frames = self._probe_media((3, PROBE_FRAMES_MORE, PROBE_SIDE, PROBE_SIDE))
        leading = {n: _leading_dimensions(one, more_frames[n], media_shape[1]) for n, one in fewer_frames.items()}
        return {name: _scale_sides(one, leading[name], sides) for name, one in fewer_frames.items()}

    def text_specs(self, samples: int, reference_shape: tuple[int, ...] | None = None) -> dict[str, BatchTensorSpec]:
        """The text tensors of a batch whose captions have the greatest length.

        `reference_shape`: of the image that an editing model receives. Several captions are assumed to have different
        lengths, so that a family that masks padding does.
        """
        key = (samples, *(reference_shape or ()))
        if key not in self._probed_text:
            with FakeTensorMode(allow_non_fake_inputs=True), FakeScalarMode(bool_value=samples > 1):
                encoder = self._family.build_text_encoder(self._model, CPU, self._precision.dtype)
                caption = self.encode_fake_caption(encoder, reference_shape)
                padded = self._family.pad_text(self._model, [caption] * samples)
                self._probed_text[key] = _specs_without_batch(padded, self._precision.dtype)
        return self._probed_text[key]

    def encode_fake_caption(self, encoder: object, reference_shape: tuple[int, ...] | None) -> Tensors:
        """The encoding of one caption on fake tensors."""
        if isinstance(encoder, ImageTextEncoder):
            if reference_shape is None:
                raise ModelError(f"{self._model.title} edits an image, and its size is not known")
            return encoder.encode_with_images(["a"], [torch.empty(reference_shape, dtype=torch.uint8)])[0]
        encoded: list[Tensors] = encoder.encode(["a"])  # type: ignore[attr-defined]
        return encoded[0]

    def batch_shape(self, samples: int, media_shape: MediaShape, reference: MediaShape | None = None) -> BatchShape:
        """The micro-batch of samples of this shape."""
        specs = self.encoded_specs(media_shape)
        latents = specs.pop("latents")
        if self._model.edits_images and reference is not None:
            specs["condition"] = self.encoded_specs(reference)["latents"]
        if self._model.micro_conditioning:
            specs["framing"] = BatchTensorSpec((6,))
        return BatchShape(
            samples=samples,
            latents=latents.shape,
            text=self.text_specs(samples, reference if self._model.edits_images else None),
            conditions=specs,
            loss_inputs=self._loss_weight_specs(latents.shape),
            latents_dtype=latents.dtype,
        )

    def _loss_weight_specs(self, latents: tuple[int, ...]) -> dict[str, BatchTensorSpec]:
        """The loss weights, masks and prior flags that the configured datasets add to a batch."""
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
                dtype = latent_storage_dtype(self._precision.dtype)
                self._probed_media[media_shape] = _specs_without_batch(encoded, dtype)
        return self._probed_media[media_shape]


def _specs_without_batch(encoded: Tensors, dtype: torch.dtype) -> dict[str, BatchTensorSpec]:
    """Specs without the batch dimension; floating-point tensors in the type that they are stored in."""
    dtypes = {name: dtype if one.is_floating_point() else one.dtype for name, one in encoded.items()}
    return {name: BatchTensorSpec(tuple(one.shape[1:]), dtypes[name]) for name, one in encoded.items()}


def _leading_dimensions(fewer_frames: BatchTensorSpec, more_frames: BatchTensorSpec, frames: int) -> tuple[int, ...]:
    """All dimensions except the sides for a video with this many frames, by linear extrapolation."""
    extra = Fraction(frames - PROBE_FRAMES_FEW, PROBE_FRAMES_MORE - PROBE_FRAMES_FEW)
    pairs = zip(fewer_frames.shape[:-2], more_frames.shape[:-2], strict=True)
    return tuple(_as_integer(at_few + (at_more - at_few) * extra) for at_few, at_more in pairs)


def _scale_sides(spec: BatchTensorSpec, leading: Sequence[int], factors: tuple[Fraction, Fraction]) -> BatchTensorSpec:
    height, width = (_as_integer(side * size) for side, size in zip(factors, spec.shape[-2:], strict=True))
    return replace(spec, shape=(*leading, height, width))


def _as_integer(size: Fraction) -> int:
    assert size.denominator == 1, f"{size} is not a whole number"
    return int(size)
