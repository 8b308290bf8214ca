"""The traces that a forecast is made of: of each phase of a configured run, made once, and kept for the next look."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from supertuner.config.tree import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.originals import Originals
from supertuner.models import adapters
from supertuner.models.published import described
from supertuner.models.spec import Expert
from supertuner.plan.forecast import Room
from supertuner.plan.kept import Kept, versions
from supertuner.plan.kernels import Cuda
from supertuner.plan.phases import SampleTrace, trace_media, trace_sampling, trace_text
from supertuner.plan.record import Trace
from supertuner.plan.recorder import Device, Plain
from supertuner.plan.shapes import BatchShape, Field, Shaper
from supertuner.plan.storage import Sizes
from supertuner.plan.trace import trace_training

FOLDER: Final = ".traces"
"""Below `run.output_dir`."""


class Traces:
    """Of one configuration on one kind of device. Experts that are alike are traced once."""

    def __init__(self, config: RunConfig, room: Room, sink: Sink, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self.family, self.model, self.source = described(config.model)
        self._shaper = Shaper(config, self.family, self.model)
        self._device: Device = Plain() if room.on_cpu else Cuda()
        self._kept = Kept(config.run.output_dir / FOLDER, versions(), sink)
        self._made: dict[str, Trace] = {}

    def shape(self, bucket: Bucket) -> BatchShape:
        return self._shaper.batch(self._config.train.batch_size, bucket.shape, self._picture(bucket))

    def tokens(self, bucket: Bucket) -> int:
        """Of one sample."""
        return self.family.tokens(self.model, self._shaper.encoded(bucket.shape)["latents"].shape)

    def training(self, expert: Expert, bucket: Bucket, checkpointing: bool, micro_batches: int = 1) -> Trace:
        """A step of an expert; of those that differ in their names and noise levels alone it is the same."""
        shape = self.shape(bucket)
        settings = adapters.for_expert(self._config.adapter, expert.name)
        trace = self._once(
            f"a step of {expert.name} with {bucket.label}",
            {
                "phase": "train",
                "module": self.model.configs[expert.part],
                "adapter": settings.model_dump(mode="json", exclude={"high_noise", "low_noise"}),
                "shape": str(shape),
                "checkpointing": checkpointing,
                "micro_batches": micro_batches,
                **self._trained(),
            },
            lambda: trace_training(
                self._config,
                self.family,
                self.model,
                expert,
                shape,
                checkpointing=checkpointing,
                micro_batches=micro_batches,
                device=self._device,
            ),
        )
        return replace(trace, phase=f"train {expert.name}")

    def media(self, bucket: Bucket) -> Trace:
        """One sample through the media encoder."""
        return self._once(
            f"the encoding of {bucket.label}",
            {"phase": "media", "parts": self.model.configs, "shape": str(bucket.shape)},
            lambda: trace_media(self.family, self.model, bucket.shape, device=self._device),
        )

    def text(self) -> Trace:
        """One caption through the text encoders."""
        picture = self._square()
        precision = self._config.train.mixed_precision
        return self._once(
            "the encoding of a caption",
            {"phase": "text", "parts": self.model.configs, "picture": str(picture), "precision": precision},
            lambda: trace_text(self._config, self.family, self.model, picture=picture, device=self._device),
        )

    def sampling(self, bucket: Bucket) -> SampleTrace:
        """One sample of a validation."""
        shape = self._shaper.batch(1, bucket.shape, self._picture(bucket))
        trace = self._once(
            f"a sample of {bucket.label}",
            {
                "phase": "sample",
                "parts": self.model.configs,
                "adapter": self._config.adapter.model_dump(mode="json"),
                "experts": self._config.model.experts,
                "guided": self._config.validation.guidance_scale > 1,
                "shape": str(shape),
                **self._trained(),
            },
            lambda: trace_sampling(self._config, self.family, self.model, shape, device=self._device).trace,
        )
        return SampleTrace(trace)

    def _trained(self) -> dict[str, Any]:
        """What else decides a step: who computes, in which formats, and what is kept about what is trained."""
        config, model = self._config, self.model
        return {
            "optimizer": config.optimizer.model_dump(mode="json"),
            "objective": config.objective.model_dump(mode="json"),
            "train": config.train.model_dump(mode="json", include={"mixed_precision", "max_grad_norm", "ema_decay"}),
            "base_weights": config.model.base_weights,
            "prior": any(dataset.prior for dataset in config.datasets),
            "model": [model.starts_from_frame, model.edits, model.told_framing, model.prediction],
        }

    def _once(self, title: str, what: Mapping[str, Any], make: Callable[[], Trace]) -> Trace:
        whole = json.loads(json.dumps({**what, "family": self.family.name, "device": str(self._device)}, default=str))

        def made() -> Trace:
            with self._progress.phase(f"tracing {title}"):
                return make()

        key = self._kept.key(whole)
        if key not in self._made:
            self._made[key] = self._kept.trace(whole, made)
        return self._made[key]

    def sizes(self) -> Sizes:
        """Of what the caches keep: latents as stored, captions as long as they can be."""
        largest = self._shaper.text(1, self._square())
        per_token = {one.nbytes // one.shape[0] for one in largest.values() if len(one.shape) == 2}
        tokens_only = len(largest) == 1 and len(per_token) == 1 and not self.model.edits
        return Sizes(
            latents=lambda bucket: sum(one.nbytes for one in self._stored(bucket).values()),
            token_bytes=per_token.pop() if tokens_only else None,
            longest_text=sum(one.nbytes for one in largest.values()),
        )

    def _stored(self, bucket: Bucket) -> dict[str, Field]:
        fields = self._shaper.encoded(bucket.shape)
        picture = self._picture(bucket)
        if self.model.edits and picture is not None:
            fields["condition"] = self._shaper.encoded(picture)["latents"]
        return fields

    def _picture(self, bucket: Bucket) -> tuple[int, ...] | None:
        """What a model that edits starts from: all datasets have theirs of one area."""
        if not self.model.edits:
            return None
        side = max((dataset.conditioning_resolution for dataset in self._config.datasets), default=1024)
        originals = Originals((), side, "lanczos", (), np.zeros(0, np.int32))
        width, height = originals.size(bucket)
        return (3, height, width)

    def _square(self) -> tuple[int, ...] | None:
        if not self.model.edits:
            return None
        side = max((dataset.conditioning_resolution for dataset in self._config.datasets), default=1024)
        return (3, side, side)
