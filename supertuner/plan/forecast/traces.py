"""The traces that a forecast is made of: of each phase of a configured run, made once, and kept for the next look."""

from __future__ import annotations

from typing import Final

import numpy as np

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.originals import Originals
from supertuner.models import loading
from supertuner.models.published import described
from supertuner.models.spec import Expert
from supertuner.plan.forecast.model import Room
from supertuner.plan.forecast.storage import Sizes
from supertuner.plan.trace import cached_traces as remembered
from supertuner.plan.trace.cpu_kernels import Cpu
from supertuner.plan.trace.cuda_kernels import Cuda
from supertuner.plan.trace.phases import SampleTrace
from supertuner.plan.trace.record import Trace
from supertuner.plan.trace.recorder import Device
from supertuner.plan.trace.shapes import BatchShape, Field, Shaper
from supertuner.plan.trace.trace_store import Kept, versions

FOLDER: Final = ".traces"
"""Below `run.output_dir`."""
MUCH: Final = 0.1
"""Of a module's parameters."""


class Traces:
    """Of one configuration on one kind of device. Experts that are alike are traced once."""

    def __init__(self, config: RunConfig, room: Room, sink: Sink, progress: Progress) -> None:
        self._config = config
        self.family, self.model, self.source = described(config.model)
        self._shaper = Shaper(config, self.family, self.model)
        self._device: Device = Cpu() if room.on_cpu else Cuda()
        self._kept = Kept(config.run.output_dir / FOLDER, versions(), sink, progress)

    def shape(self, bucket: Bucket) -> BatchShape:
        return self._shaper.batch(self._config.train.batch_size, bucket.shape, self._picture(bucket))

    def tokens(self, bucket: Bucket) -> int:
        """Of one sample."""
        return self.family.tokens(self.model, self._shaper.encoded(bucket.shape)["latents"].shape)

    def convolves(self, expert: Expert) -> bool:
        """Whether much of an expert is convolutions; one that makes patches of latents is little."""
        from torch import nn

        module = loading.skeleton(self.model, expert.part)
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        inside = sum(one.numel() for part in module.modules() if isinstance(part, kinds) for one in part.parameters())
        return inside > MUCH * sum(one.numel() for one in module.parameters())

    def training(self, expert: Expert, bucket: Bucket, checkpointing: bool, micro_batches: int = 1) -> Trace:
        """A step of an expert; of those that differ in their names and noise levels alone it is the same."""
        return remembered.training(
            self._kept,
            self._config,
            self.family,
            self.model,
            expert,
            self.shape(bucket),
            device=self._device,
            checkpointing=checkpointing,
            micro_batches=micro_batches,
            of=bucket.label,
        )

    def media(self, bucket: Bucket) -> Trace:
        """One sample through the media encoder."""
        return remembered.media(self._kept, self.family, self.model, bucket.shape, device=self._device, of=bucket.label)

    def text(self) -> Trace:
        """One caption through the text encoders."""
        return remembered.text(
            self._kept, self._config, self.family, self.model, device=self._device, picture=self._square()
        )

    def sampling(self, bucket: Bucket) -> SampleTrace:
        """One sample of a validation."""
        shape = self._shaper.batch(1, bucket.shape, self._picture(bucket))
        return remembered.sampling(
            self._kept, self._config, self.family, self.model, shape, device=self._device, of=bucket.label
        )

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
