"""What a text encoder is told of a sample: its caption, and for models that edit the picture that it is about. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from supertuner.data.batching.render import caption_of
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.order import Draws
from supertuner.data.originals import Originals

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Told:
    """Equal ones are encoded once, whoever has them."""

    caption: str
    originals: Originals | None = None
    sample: int = 0
    """Whose picture; without originals always 0."""

    @classmethod
    def of(cls, caption: str, originals: Originals | None, sample: int) -> Told:
        return cls(caption) if originals is None else cls(caption, originals, sample)

    def content(self) -> bytes:
        """What decides the encoding, but for the encoder."""
        caption = self.caption.encode()
        return caption if self.originals is None else caption + b"\0" + self.originals.mark(self.sample)

    def picture(self) -> torch.Tensor | None:
        return None if self.originals is None else self.originals.picture(self.sample)


def told_of(corpus: Corpus, draws: Draws) -> list[Told]:
    """Of each draw, in its turn."""
    parts = [corpus.parts[corpus.order.groups[group].dataset] for group in draws.group.tolist()]
    rows = zip(parts, draws.sample.tolist(), draws.cycle.tolist(), strict=True)
    return [Told.of(caption_of(corpus.seed, part, sample, turn), part.originals, sample) for part, sample, turn in rows]
