"""The traces that a forecast is derived from: of each phase of a configured run, traced once and kept for later
forecasts."""

from __future__ import annotations

from typing import Final

import numpy as np

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import Progress, Sink
from supertuner.data.corpus.reference_images import ReferenceImages
from supertuner.data.ordering.buckets import Bucket
from supertuner.models import loading
from supertuner.models.published_models import describe_model
from supertuner.models.spec import Expert
from supertuner.plan.forecast.results import MachineCapacity
from supertuner.plan.forecast.storage import EncodedSizes
from supertuner.plan.trace.cached_traces import CachedTraces
from supertuner.plan.trace.cpu_kernels import CpuDevice
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.encoder_shapes import BatchShape, BatchTensorSpec, EncoderShapeProbe
from supertuner.plan.trace.execution_trace import ExecutionTrace
from supertuner.plan.trace.trace_store import TRACE_FOLDER, TraceCache, program_versions

CONVOLUTIONAL_SHARE: Final = 0.1
"""Share of an expert's parameters; above it, the expert counts as convolutional."""


class CachedTraceProvider:
    """Traces of one configuration on one kind of device, by bucket. Raises ModelError for a model that is unknown
    here."""

    def __init__(self, config: RunConfig, capacity: MachineCapacity, sink: Sink, progress: Progress) -> None:
        self._config = config
        self.family, self.model, self.source = describe_model(config.model)
        self._shape_probe = EncoderShapeProbe(config, self.family, self.model)
        cache = TraceCache(config.run.output_dir / TRACE_FOLDER, program_versions(), sink, progress)
        device = CpuDevice() if capacity.on_cpu else CudaDevice()
        self._traces = CachedTraces(cache, config, self.family, self.model, device)

    def tokens_per_sample(self, bucket: Bucket) -> int:
        return self.family.token_count(self.model, self._shape_probe.encoded_specs(bucket.shape)["latents"].shape)

    def is_convolutional(self, expert: Expert) -> bool:
        """Whether a large share of the expert's parameters are convolutions; the patch embedding of latents is
        small."""
        from torch import nn

        module = loading.build_meta_module(self.model, expert.component)
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        parts = [part for part in module.modules() if isinstance(part, convolutions)]
        convolution_parameters = sum(one.numel() for part in parts for one in part.parameters())
        return convolution_parameters > CONVOLUTIONAL_SHARE * sum(one.numel() for one in module.parameters())

    def training_trace(
        self, expert: Expert, bucket: Bucket, checkpointing: bool, micro_batches: int = 1
    ) -> ExecutionTrace:
        """One optimizer step. Experts that differ only in their names and noise levels share a trace."""
        shape = self._batch_shape(self._config.train.batch_size, bucket)
        return self._traces.training(expert, shape, checkpointing, micro_batches, bucket.label)

    def loading_trace(self, expert: Expert) -> ExecutionTrace:
        """Loading the expert's weights."""
        return self._traces.loading(expert)

    def media_trace(self, bucket: Bucket) -> ExecutionTrace:
        """One sample through the media encoder."""
        return self._traces.media(bucket.shape, bucket.label)

    def text_trace(self) -> ExecutionTrace:
        """One caption through the text encoders."""
        return self._traces.text(self._square_reference_shape())

    def sampling_trace(self, bucket: Bucket) -> ExecutionTrace:
        """One sample of a validation, with everything that is on the GPU at that time."""
        return self._traces.sampling(self._batch_shape(1, bucket), bucket.label)

    def _batch_shape(self, samples: int, bucket: Bucket) -> BatchShape:
        return self._shape_probe.batch_shape(samples, bucket.shape, self._reference_shape(bucket))

    def encoded_sizes(self) -> EncodedSizes:
        """Sizes of cache entries: latents as stored, captions at their greatest length."""
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
        if reference_shape is not None:
            specs["condition"] = self._shape_probe.encoded_specs(reference_shape)["latents"]
        return specs

    def _reference_shape(self, bucket: Bucket) -> tuple[int, ...] | None:
        """CHW of the reference image of an editing model for samples of this bucket; None: the model edits nothing."""
        if not self.model.edits_images:
            return None
        references = ReferenceImages((), self._reference_side(), "lanczos", (), np.zeros(0, np.int32))
        width, height = references.image_size(bucket)
        return (3, height, width)

    def _square_reference_shape(self) -> tuple[int, ...] | None:
        return (3, self._reference_side(), self._reference_side()) if self.model.edits_images else None

    def _reference_side(self) -> int:
        """Side of a square with the area that reference images are resized to: the largest over all datasets."""
        return max((dataset.conditioning_resolution for dataset in self._config.datasets), default=1024)
