"""Which encoded captions a corpus needs, and which of them a draw uses. Pure but for the corpus it reads.

Captions are listed from the samples, not from draws: a choice among several, an empty one where captions are dropped,
and with the trigger word in them. Each text is encoded once, whoever has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from supertuner.data.batching.caption_variants import DROPPED_CAPTION, choose_caption_index, possible_captions
from supertuner.data.batching.render import rng_for_sample
from supertuner.data.cache_policy import CacheMode, DatasetCachePolicy
from supertuner.data.corpus import Corpus, CorpusDataset
from supertuner.train.encoding.media import samples_drawn_before
from supertuner.train.encoding.text_inputs import TextInput


class TextInputIndex:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[TextInput, int] = {}

    def index_of(self, text: TextInput) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def inputs(self) -> list[TextInput]:
        return list(self._numbers)


@dataclass(frozen=True, eq=False, slots=True)
class CaptionTable:
    """The texts that each sample of a dataset can have."""

    dataset: CorpusDataset
    first: NDArray[np.int64]
    """Where each sample's texts begin in `numbers`, and at the end their count."""
    numbers: NDArray[np.int32]
    """Numbers of texts: for each sample its captions, each in every turn that is kept."""
    variations: int
    empty: NDArray[np.int32]
    """For each sample the number of its text without a caption; used where captions are dropped."""

    def text_index(self, seed: int, sample: int, cycle: int) -> int | None:
        """The number of the text that a sample has in a turn; None if the sample was not to be used."""
        begin, rules = int(self.first[sample]), self.dataset.settings.captions
        count = (int(self.first[sample + 1]) - begin) // self.variations
        if not count:
            return None
        caption_index = 0
        if count > 1 or rules.dropout:
            caption_index = choose_caption_index(count, rules, rng_for_sample(seed, self.dataset, sample, cycle))
        return (
            int(self.empty[sample])
            if caption_index == DROPPED_CAPTION
            else int(self.numbers[begin + caption_index * self.variations + cycle % self.variations])
        )


@dataclass(frozen=True, eq=False, slots=True)
class TextPlan:
    texts: Sequence[TextInput]
    tables: tuple[CaptionTable | None, ...]
    """For each dataset; None if its captions are not cached once."""


def build_text_plan(corpus: Corpus, policies: Sequence[DatasetCachePolicy], until: int | None) -> TextPlan:
    """All texts that draws can need; with `until`, only those of samples drawn before that position."""
    texts, drawn = TextInputIndex(), samples_drawn_before(corpus, until)
    tables: list[CaptionTable | None] = []
    for dataset_index, (dataset, policy) in enumerate(zip(corpus.datasets, policies, strict=True)):
        if policy.text_mode is not CacheMode.CACHED:
            tables.append(None)
            continue
        used = np.unique(dataset.members.samples)
        if drawn is not None:
            groups = [g for g, group in enumerate(corpus.order.groups) if group.dataset_index == dataset_index]
            used = np.unique(np.concatenate([np.zeros(0, np.int64), *(drawn[g] for g in groups)]))
        tables.append(_build_caption_table(corpus.seed, dataset, used, policy.text_variations, texts))
    return TextPlan(tuple(texts.inputs()), tuple(tables))


def _build_caption_table(
    seed: int, dataset: CorpusDataset, used: NDArray[np.integer[Any]], variations: int, texts: TextInputIndex
) -> CaptionTable:
    rules = dataset.settings.captions
    counts, numbers, empty = np.zeros(len(dataset.samples), np.int64), [], np.zeros(len(dataset.samples), np.int32)
    for sample in used.tolist():
        if rules.dropout:
            empty[sample] = texts.index_of(TextInput.for_sample("", dataset.references, sample))
        captions = dataset.samples.captions(sample)
        if rules.shuffle_tags:
            by_variation = [
                possible_captions(captions, rules, rng_for_sample(seed, dataset, sample, variation))
                for variation in range(variations)
            ]
        else:
            by_variation = [possible_captions(captions, rules)] * variations
        text_indices = [
            texts.index_of(TextInput.for_sample(text, dataset.references, sample))
            for texts_of_caption in zip(*by_variation, strict=True)
            for text in texts_of_caption
        ]
        counts[sample] = len(text_indices)
        numbers += text_indices
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return CaptionTable(dataset, first, np.array(numbers, np.int32), variations, empty)
