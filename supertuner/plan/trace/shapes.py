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

from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import ModelError
from supertuner.models.spec import Family, Model, PictureTextEncoder, Tensors
from supertuner.plan.trace.recorder import Answering
from supertuner.step.precision import Precision, stored_dtype

CPU = torch.device("cpu")
"""Where fake tensors are: torch without CUDA runs no operators on fake CUDA tensors. A trace's device says what
differs."""
SMALL = 128
"""Side of the samples that shapes are learnt from: a multiple of what any family asks for."""
FEW, MORE = 5, 9
"""Frames of the two short films that shapes of films are learnt from."""


@dataclass(frozen=True, slots=True)
class Field:
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
    text: Mapping[str, Field]
    conditions: Mapping[str, Field] = field(default_factory=dict)
    counts: Mapping[str, Field] = field(default_factory=dict)
    """As in `StepBatch`."""
    latents_dtype: torch.dtype = torch.bfloat16
    """As they are stored."""


def hollowed(model: Model, text_tokens: int | None = None) -> Model:
    """The model, none of whose parts needs a weight; captions are taken for that long where their length counts."""
    source = replace(model.source, hollow=True)
    return replace(model, source=source if text_tokens is None else replace(source, hollow_tokens=text_tokens))


class Shaper:
    """Learns a model's shapes once, on first use, and answers for any size."""

    def __init__(self, config: RunConfig, family: Family, model: Model, text_tokens: int | None = None) -> None:
        self._config, self._family, self._model = config, family, hollowed(model, text_tokens)
        self._precision = Precision(config.train.mixed_precision, CPU)
        self._learnt: dict[tuple[int, ...], dict[str, Field]] = {}
        self._said: dict[tuple[int, ...], dict[str, Field]] = {}

    def encoded(self, media: tuple[int, ...]) -> dict[str, Field]:
        """What is stored about a sample of this shape (CHW or CFHW): its latents, and conditions."""
        if why := self._family.why_not(self._model, media):
            raise ModelError(f"a sample of shape {media} cannot be encoded: {why}")
        sides = Fraction(media[-2], SMALL), Fraction(media[-1], SMALL)
        if len(media) == 3:
            found = self._small((3, SMALL, SMALL))
            return {name: _scaled(one, one.shape[:-2], sides) for name, one in found.items()}
        few, more = self._small((3, FEW, SMALL, SMALL)), self._small((3, MORE, SMALL, SMALL))
        return {name: _scaled(one, _leading(one, more[name], media[1]), sides) for name, one in few.items()}

    def text(self, samples: int, picture: tuple[int, ...] | None = None) -> dict[str, Field]:
        """What a batch is told, as long as it can be; `picture` is what a model that edits changes. Several captions
        are taken to differ in their lengths."""
        key = (samples, *(picture or ()))
        if key not in self._said:
            with FakeTensorMode(allow_non_fake_inputs=True), Answering(truth=samples > 1):
                encoder = self._family.text_encoder(self._model, CPU, self._precision.dtype)
                one = self.said(encoder, picture)
                self._said[key] = _fields(self._family.pad_text(self._model, [one] * samples), self._precision.dtype)
        return self._said[key]

    def said(self, encoder: object, picture: tuple[int, ...] | None) -> Tensors:
        """A caption through an encoder, on fake tensors."""
        if isinstance(encoder, PictureTextEncoder):
            if picture is None:
                raise ModelError(f"{self._model.title} changes a picture, and nobody says how large it is")
            return encoder.encode_of(["a"], [torch.empty(picture, dtype=torch.uint8)])[0]
        found: list[Tensors] = encoder.encode(["a"])  # type: ignore[attr-defined]
        return found[0]

    def batch(self, samples: int, media: tuple[int, ...], picture: tuple[int, ...] | None = None) -> BatchShape:
        """The batch that samples of this shape become."""
        fields = self.encoded(media)
        latents = fields.pop("latents")
        if self._model.edits and picture is not None:
            fields["condition"] = self.encoded(picture)["latents"]
        if self._model.told_framing:
            fields["framing"] = Field((6,))
        return BatchShape(
            samples=samples,
            latents=latents.shape,
            text=self.text(samples, picture if self._model.edits else None),
            conditions=fields,
            counts=self._counts(latents.shape),
            latents_dtype=latents.dtype,
        )

    def _counts(self, latents: tuple[int, ...]) -> dict[str, Field]:
        """What samples count, where some of the configured datasets say so."""
        trained = [dataset for dataset in self._config.datasets if not dataset.held_out]
        found: dict[str, Field] = {}
        if any(one.loss_weight != 1 or one.loss_weights_file is not None for one in trained):
            found["weight"] = Field(())
        if any(one.mask_dir is not None for one in trained):
            found["mask"] = Field((*(1 for _ in latents[:-2]), *latents[-2:]))
        if any(one.prior for one in trained):
            found["prior"] = Field((), torch.bool)
        return found

    def _small(self, media: tuple[int, ...]) -> dict[str, Field]:
        if media not in self._learnt:
            with FakeTensorMode(allow_non_fake_inputs=True), Answering():
                encoder = self._family.media_encoder(self._model, CPU)
                made = encoder.encode(torch.empty(1, *media, dtype=torch.uint8))
                self._learnt[media] = _fields(made, stored_dtype(self._precision.dtype))
        return self._learnt[media]


def _fields(made: Tensors, dtype: torch.dtype) -> dict[str, Field]:
    """Without the batch, and numbers in the format that they are stored in."""
    return {
        name: Field(tuple(one.shape[1:]), dtype if one.is_floating_point() else one.dtype) for name, one in made.items()
    }


def _leading(few: Field, more: Field, frames: int) -> tuple[int, ...]:
    """All dimensions but the sides, in a film of so many frames."""
    return tuple(
        _whole(at_few + Fraction(at_more - at_few, MORE - FEW) * (frames - FEW))
        for at_few, at_more in zip(few.shape[:-2], more.shape[:-2], strict=True)
    )


def _scaled(one: Field, leading: Sequence[int], sides: tuple[Fraction, Fraction]) -> Field:
    height, width = (_whole(side * size) for side, size in zip(sides, one.shape[-2:], strict=True))
    return replace(one, shape=(*leading, height, width))


def _whole(size: Fraction) -> int:
    assert size.denominator == 1, f"a size of {size}"
    return int(size)
