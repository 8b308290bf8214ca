"""The traces that a forecast is made of: of each phase of a configured run, made once, and kept for the next look."""

from __future__ import annotations

from typing import Final

import numpy as np

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.reference_images import ReferenceImages
from supertuner.models import loading
from supertuner.models.published_models import describe_model
from supertuner.models.spec import Expert
from supertuner.plan.forecast.results import MachineCapacity
from supertuner.plan.forecast.storage import EncodedSizes
from supertuner.plan.trace import cached_traces as remembered
from supertuner.plan.trace.cpu_kernels import CpuDevice
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.encoder_shapes import BatchShape, BatchTensorSpec, EncoderShapeProbe
from supertuner.plan.trace.execution_trace import ExecutionTrace
from supertuner.plan.trace.inference_phases import SampleTrace
from supertuner.plan.trace.recorder import TracedDevice
from supertuner.plan.trace.trace_store import TraceCache, program_versions

TRACE_FOLDER: Final = ".traces"
"""Below `run.output_dir`."""
CONVOLUTIONAL_SHARE: Final = 0.1
"""Of a module's parameters."""


class CachedTraceProvider:
    """Of one configuration on one kind of device. Experts that are alike are traced once."""

    def __init__(self, config: RunConfig, capacity: MachineCapacity, sink: Sink, progress: Progress) -> None:
        self._config = config
        self.family, self.model, self.source = describe_model(config.model)
        self._shape_probe = EncoderShapeProbe(config, self.family, self.model)
        self._device: TracedDevice = CpuDevice() if capacity.on_cpu else CudaDevice()
        self._cache = TraceCache(config.run.output_dir / TRACE_FOLDER, program_versions(), sink, progress)

    def batch_shape(self, bucket: Bucket) -> BatchShape:
        return self._shape_probe.batch_shape(self._config.train.batch_size, bucket.shape, self._reference_shape(bucket))

    def tokens_per_sample(self, bucket: Bucket) -> int:
        """Of one sample."""
        return self.family.token_count(self.model, self._shape_probe.encoded_specs(bucket.shape)["latents"].shape)

    def is_convolutional(self, expert: Expert) -> bool:
        """Whether much of an expert is convolutions; one that makes patches of latents is little."""
        from torch import nn

        module = loading.build_meta_module(self.model, expert.component)
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        convolution_parameters = sum(
            one.numel() for part in module.modules() if isinstance(part, kinds) for one in part.parameters()
        )
        return convolution_parameters > CONVOLUTIONAL_SHARE * sum(one.numel() for one in module.parameters())

    def training_trace(
        self, expert: Expert, bucket: Bucket, checkpointing: bool, micro_batches: int = 1
    ) -> ExecutionTrace:
        """A step of an expert; of those that differ in their names and noise levels alone it is the same."""
        return remembered.cached_training_trace(
            self._cache,
            self._config,
            self.family,
            self.model,
            expert,
            self.batch_shape(bucket),
            device=self._device,
            checkpointing=checkpointing,
            micro_batches=micro_batches,
            shape_label=bucket.label,
        )

    def media_trace(self, bucket: Bucket) -> ExecutionTrace:
        """One sample through the media encoder."""
        return remembered.cached_media_trace(
            self._cache, self.family, self.model, bucket.shape, device=self._device, shape_label=bucket.label
        )

    def text_trace(self) -> ExecutionTrace:
        """One caption through the text encoders."""
        return remembered.cached_text_trace(
            self._cache,
            self._config,
            self.family,
            self.model,
            device=self._device,
            reference_shape=self._square_reference_shape(),
        )

    def sampling_trace(self, bucket: Bucket) -> SampleTrace:
        """One sample of a validation."""
        shape = self._shape_probe.batch_shape(1, bucket.shape, self._reference_shape(bucket))
        return remembered.cached_sampling_trace(
            self._cache, self._config, self.family, self.model, shape, device=self._device, shape_label=bucket.label
        )

    def encoded_sizes(self) -> EncodedSizes:
        """Of what the caches keep: latents as stored, captions as long as they can be."""
        largest = self._shape_probe.text_specs(1, self._square_reference_shape())
        per_token = {one.nbytes // one.shape[0] for one in largest.values() if len(one.shape) == 2}
        tokens_only = len(largest) == 1 and len(per_token) == 1 and not self.model.edits_images
        return EncodedSizes(
            latent_bytes=lambda bucket: sum(one.nbytes for one in self._stored_specs(bucket).values()),
            token_bytes=per_token.pop() if tokens_only else None,
            longest_caption_bytes=sum(one.nbytes for one in largest.values()),
        )

    def _stored_specs(self, bucket: Bucket) -> dict[str, BatchTensorSpec]:
        specs = self._shape_probe.encoded_specs(bucket.shape)
        reference_shape = self._reference_shape(bucket)
        if self.model.edits_images and reference_shape is not None:
            specs["condition"] = self._shape_probe.encoded_specs(reference_shape)["latents"]
        return specs

    def _reference_shape(self, bucket: Bucket) -> tuple[int, ...] | None:
        """What a model that edits starts from: all datasets have theirs of one area."""
        if not self.model.edits_images:
            return None
        side = max((dataset.conditioning_resolution for dataset in self._config.datasets), default=1024)
        references = ReferenceImages((), side, "lanczos", (), np.zeros(0, np.int32))
        width, height = references.image_size(bucket)
        return (3, height, width)

    def _square_reference_shape(self) -> tuple[int, ...] | None:
        if not self.model.edits_images:
            return None
        side = max((dataset.conditioning_resolution for dataset in self._config.datasets), default=1024)
        return (3, side, side)
