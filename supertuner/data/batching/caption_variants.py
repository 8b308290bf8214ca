"""Which captions a sample can have, listed without drawing any, and which of them a turn takes. Pure.

`caption_for` is the law; `possible_captions(…)[taken(…)]` is the same caption by another way, or, where tags are
shuffled, the same with the shuffle of another turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from supertuner.config.settings.data import Captions
from supertuner.data.batching.captions import shuffled_tags, triggered
from supertuner.data.batching.sample_rng import Chance

DROPPED = -1
"""In the place of a caption's number: the caption is empty in this turn."""


def possible_captions(captions: Sequence[str], rules: Captions, chance: Chance | None = None) -> tuple[str, ...]:
    """Every caption that a sample can have beside a dropped one. Shuffled tags need the `chance` of a turn."""
    usable = captions if rules.choose == "random" else captions[:1]
    texts = [text.strip() for text in usable] or [""]
    if rules.shuffle_tags:
        assert chance is not None, "shuffled tags depend on the turn"
        texts = [shuffled_tags(text, rules.tag_separator, rules.keep_tags, chance) for text in texts]
    return tuple(triggered(text, rules.trigger_word, rules.tag_separator) for text in texts)


def taken(count: int, rules: Captions, chance: Chance) -> int:
    """The number of the caption, among `count` possible ones, that a turn takes; or DROPPED."""
    if rules.dropout and chance.uniform("caption dropout") < rules.dropout:
        return DROPPED
    return chance.below(count, "caption choice") if count > 1 else 0
