"""What the samples of a batch count beside their noise level: their weights, their masks, and which keep the prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from supertuner.core.events import Sink
from supertuner.data.batching.masks import Masks, masks_of
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.windows import MicroBatch
from supertuner.data.sample_weights import weights_of
from supertuner.models.spec import Tensors


@dataclass(frozen=True, eq=False, slots=True)
class Counting:
    """By dataset, in the corpus's order."""

    corpus: Corpus
    weights: tuple[NDArray[np.float32] | None, ...]
    masks: tuple[Masks | None, ...]
    prior: tuple[bool, ...]
    in_step: bool = False
    """Every batch says which of its samples keep the prior, also where none does: it costs a pass through the model,
    and processes that share out the weights make each pass together."""

    def of(self, micro: MicroBatch, turns: Sequence[int], shape: tuple[int, ...]) -> Tensors:
        """The batch's `weight` [B], `mask` [B, 1, …, H, W] and `prior` [B], each only if some sample needs it.

        `turns` are those whose changes the latents show, `shape` is that of one sample's latents.
        """
        datasets = [self.corpus.order.groups[group].dataset for group in micro.draws.group.tolist()]
        samples = micro.draws.sample.tolist()
        found: Tensors = {}
        if any(self.weights[one] is not None for one in datasets):
            rows = zip(datasets, samples, strict=True)
            found["weight"] = torch.tensor([self._weight(one, sample) for one, sample in rows])
        if any(self.masks[one] is not None for one in datasets):
            drawn = [self._mask(*which, micro) for which in zip(datasets, samples, turns, strict=True)]
            found["mask"] = at_places(torch.stack(drawn), shape)
        if any(self.prior if self.in_step else (self.prior[one] for one in datasets)):
            found["prior"] = torch.tensor([self.prior[one] for one in datasets])
        return found

    def digests(self) -> dict[str, str]:
        """What decides how samples count and lies in files that may change: setting → what they are known by."""
        found = {}
        for part, weights, masks in zip(self.corpus.parts, self.weights, self.masks, strict=True):
            place = f"datasets[{part.settings.id}]"
            if part.settings.loss_weights_file is not None and weights is not None:
                found[f"{place}.loss_weights_file"] = xxhash.xxh3_128_hexdigest(weights.tobytes())
            if masks is not None:
                found[f"{place}.mask_dir"] = masks.digest
        return found

    def _weight(self, dataset: int, sample: int) -> float:
        weights = self.weights[dataset]
        return 1.0 if weights is None else float(weights[sample])

    def _mask(self, dataset: int, sample: int, turn: int, micro: MicroBatch) -> torch.Tensor:
        masks, bucket = self.masks[dataset], micro.bucket
        if masks is None:
            return torch.ones(bucket.height, bucket.width)
        return masks.draw(self.corpus.seed, self.corpus.parts[dataset], sample, turn, bucket)


def counting_of(corpus: Corpus, sink: Sink, *, in_step: bool = False) -> Counting | None:
    """What is counted apart in these data; None: nothing is. `in_step`: see `Counting`."""
    weights = tuple(weights_of(part) for part in corpus.parts)
    masks = tuple(masks_of(part, sink) for part in corpus.parts)
    prior = tuple(part.settings.prior and not part.settings.held_out for part in corpus.parts)
    nothing = not any(prior) and all(one is None for one in (*weights, *masks))
    return None if nothing else Counting(corpus, weights, masks, prior, in_step)


def at_places(masks_BHW: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Masks as large as latents of this shape (… H W): a place counts the mean of the pixels it stands for."""
    height, width = shape[-2:]
    pooled = torch.nn.functional.adaptive_avg_pool2d(masks_BHW.unsqueeze(1), (height, width))
    return pooled.reshape(len(masks_BHW), *(1 for _ in shape[:-2]), height, width)
