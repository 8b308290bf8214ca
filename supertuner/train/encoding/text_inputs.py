"""What a text encoder is told of a sample: its caption, and for models that edit the picture that it is about. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from supertuner.data.batching.render import caption_for_sample
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.sample_order import SampleDraws
from supertuner.data.reference_images import ReferenceImages

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TextInput:
    """Equal ones are encoded once, whoever has them."""

    caption: str
    references: ReferenceImages | None = None
    sample_index: int = 0
    """Whose picture; without originals always 0."""

    @classmethod
    def for_sample(cls, caption: str, references: ReferenceImages | None, sample: int) -> TextInput:
        return cls(caption) if references is None else cls(caption, references, sample)

    def cache_key_bytes(self) -> bytes:
        """What decides the encoding, but for the encoder."""
        caption = self.caption.encode()
        return (
            caption if self.references is None else caption + b"\0" + self.references.cache_key_bytes(self.sample_index)
        )

    def load_reference(self) -> torch.Tensor | None:
        return None if self.references is None else self.references.load_image(self.sample_index)


def text_inputs_for(corpus: Corpus, draws: SampleDraws) -> list[TextInput]:
    """Of each draw, in its turn."""
    datasets = [corpus.datasets[corpus.order.groups[group].dataset_index] for group in draws.group.tolist()]
    rows = zip(datasets, draws.sample.tolist(), draws.cycle.tolist(), strict=True)
    return [
        TextInput.for_sample(caption_for_sample(corpus.seed, dataset, sample, cycle), dataset.references, sample)
        for dataset, sample, cycle in rows
    ]
