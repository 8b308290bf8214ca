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

from supertuner.data.batching.caption_variants import DROPPED, possible_captions, taken
from supertuner.data.batching.render import chance_of
from supertuner.data.cache_policy import How, Treatment
from supertuner.data.corpus import Corpus, Part
from supertuner.train.encoding.media import drawn_before
from supertuner.train.encoding.text_inputs import Told


class Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[Told, int] = {}

    def number(self, text: Told) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[Told]:
        return list(self._numbers)


@dataclass(frozen=True, eq=False, slots=True)
class CaptionTable:
    """The texts that each sample of a dataset can have."""

    part: Part
    first: NDArray[np.int64]
    """Where each sample's texts begin in `numbers`, and at the end their count."""
    numbers: NDArray[np.int32]
    """Numbers of texts: for each sample its captions, each in every turn that is kept."""
    turns: int
    empty: NDArray[np.int32]
    """For each sample the number of its text without a caption; used where captions are dropped."""

    def text(self, seed: int, sample: int, turn: int) -> int | None:
        """The number of the text that a sample has in a turn; None if the sample was not to be used."""
        begin, rules = int(self.first[sample]), self.part.settings.captions
        count = (int(self.first[sample + 1]) - begin) // self.turns
        if not count:
            return None
        which = 0
        if count > 1 or rules.dropout:
            which = taken(count, rules, chance_of(seed, self.part, sample, turn))
        return (
            int(self.empty[sample])
            if which == DROPPED
            else int(self.numbers[begin + which * self.turns + turn % self.turns])
        )


@dataclass(frozen=True, eq=False, slots=True)
class TextPlan:
    texts: Sequence[Told]
    tables: tuple[CaptionTable | None, ...]
    """For each dataset; None if its captions are not cached once."""


def text_plan(corpus: Corpus, treatments: Sequence[Treatment], until: int | None) -> TextPlan:
    """All texts that draws can need; with `until`, only those of samples drawn before that position."""
    texts, drawn = Texts(), drawn_before(corpus, until)
    tables: list[CaptionTable | None] = []
    for number, (part, treated) in enumerate(zip(corpus.parts, treatments, strict=True)):
        if treated.text is not How.CACHED:
            tables.append(None)
            continue
        used = np.unique(part.members.samples)
        if drawn is not None:
            groups = [g for g, group in enumerate(corpus.order.groups) if group.dataset == number]
            used = np.unique(np.concatenate([np.zeros(0, np.int64), *(drawn[g] for g in groups)]))
        tables.append(_table(corpus.seed, part, used, treated.text_turns, texts))
    return TextPlan(tuple(texts.all()), tuple(tables))


def _table(seed: int, part: Part, used: NDArray[np.integer[Any]], turns: int, texts: Texts) -> CaptionTable:
    rules = part.settings.captions
    counts, numbers, empty = np.zeros(len(part.samples), np.int64), [], np.zeros(len(part.samples), np.int32)
    for sample in used.tolist():
        if rules.dropout:
            empty[sample] = texts.number(Told.of("", part.originals, sample))
        captions = part.samples.captions(sample)
        if rules.shuffle_tags:
            by_turn = [possible_captions(captions, rules, chance_of(seed, part, sample, turn)) for turn in range(turns)]
        else:
            by_turn = [possible_captions(captions, rules)] * turns
        rows = [
            texts.number(Told.of(text, part.originals, sample)) for one in zip(*by_turn, strict=True) for text in one
        ]
        counts[sample] = len(rows)
        numbers += rows
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return CaptionTable(part, first, np.array(numbers, np.int32), turns, empty)
