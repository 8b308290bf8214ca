"""How samples count in the loss, apart from their noise level: weights, masks, and samples for prior preservation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from supertuner.core.events import Sink
from supertuner.data.batching.loss_weighting import LossMasks, find_loss_masks, load_sample_weights
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.micro_batches import MicroBatch
from supertuner.models.spec import Tensors


@dataclass(frozen=True, eq=False, slots=True)
class SampleLossWeights:
    """Tuples have one item per dataset of the corpus."""

    corpus: Corpus
    weights: tuple[NDArray[np.float32] | None, ...]
    masks: tuple[LossMasks | None, ...]
    keeps_prior: tuple[bool, ...]
    forward_is_collective: bool = False
    """Whether every batch has a `prior` tensor as soon as any dataset keeps the prior, even if none of its own samples
    does: prior preservation takes an extra forward pass, and ranks that shard weights must run each pass together."""

    def tensors_for(self, micro_batch: MicroBatch, cycles: Sequence[int], shape: tuple[int, ...]) -> Tensors:
        """The batch's `weight` [B], `mask` [B, 1, …, H, W] and `prior` [B], each only if some sample needs it.

        `cycles`: for each sample the cycle whose augmentations its latents show. `shape`: one sample's latents.
        """
        datasets = [self.corpus.order.groups[group].dataset_index for group in micro_batch.draws.group.tolist()]
        samples = micro_batch.draws.sample.tolist()
        tensors: Tensors = {}
        if any(self.weights[dataset] is not None for dataset in datasets):
            rows = zip(datasets, samples, strict=True)
            tensors["weight"] = torch.tensor([self._weight(dataset, sample) for dataset, sample in rows])
        if any(self.masks[dataset] is not None for dataset in datasets):
            masks = [self._mask(*which, micro_batch) for which in zip(datasets, samples, cycles, strict=True)]
            tensors["mask"] = masks_at_latent_size(torch.stack(masks), shape)
        if any(self.keeps_prior if self.forward_is_collective else (self.keeps_prior[dataset] for dataset in datasets)):
            tensors["prior"] = torch.tensor([self.keeps_prior[dataset] for dataset in datasets])
        return tensors

    def digests(self) -> dict[str, str]:
        """Setting → digest of the weight and mask files, which may change between start and resume."""
        digests = {}
        for part, weights, masks in zip(self.corpus.datasets, self.weights, self.masks, strict=True):
            setting = f"datasets[{part.settings.id}]"
            if part.settings.loss_weights_file is not None and weights is not None:
                digests[f"{setting}.loss_weights_file"] = xxhash.xxh3_128_hexdigest(weights.tobytes())
            if masks is not None:
                digests[f"{setting}.mask_dir"] = masks.digest
        return digests

    def _weight(self, dataset: int, sample: int) -> float:
        weights = self.weights[dataset]
        return 1.0 if weights is None else float(weights[sample])

    def _mask(self, dataset: int, sample: int, cycle: int, micro_batch: MicroBatch) -> torch.Tensor:
        masks, bucket = self.masks[dataset], micro_batch.bucket
        if masks is None:
            return torch.ones(bucket.height, bucket.width)
        return masks.load_mask(self.corpus.seed, self.corpus.datasets[dataset], sample, cycle, bucket)


def build_loss_weights(corpus: Corpus, sink: Sink, forward_is_collective: bool = False) -> SampleLossWeights | None:
    """The loss weights of a corpus; None if all its samples count the same."""
    weights = tuple(load_sample_weights(part) for part in corpus.datasets)
    masks = tuple(find_loss_masks(part, sink) for part in corpus.datasets)
    keeps_prior = tuple(part.settings.prior and not part.settings.held_out for part in corpus.datasets)
    all_equal = not any(keeps_prior) and all(item is None for item in (*weights, *masks))
    return None if all_equal else SampleLossWeights(corpus, weights, masks, keeps_prior, forward_is_collective)


def masks_at_latent_size(masks_BHW: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Masks resized to latents of this shape (… H W): each latent position gets the mean of its pixels."""
    height, width = shape[-2:]
    pooled = torch.nn.functional.adaptive_avg_pool2d(masks_BHW.unsqueeze(1), (height, width))
    return pooled.reshape(len(masks_BHW), *(1 for _ in shape[:-2]), height, width)
