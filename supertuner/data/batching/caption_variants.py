"""Which captions a sample can have, listed without drawing any, and which of them a turn takes. Pure.

`caption_for` is the law; `possible_captions(…)[taken(…)]` is the same caption by another way, or, where tags are
shuffled, the same with the shuffle of another turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from supertuner.config.settings.data import CaptionSettings
from supertuner.data.batching.captions import apply_trigger_word, shuffle_tags
from supertuner.data.batching.sample_rng import SampleRng

DROPPED_CAPTION = -1
"""In the place of a caption's number: the caption is empty in this turn."""


def possible_captions(captions: Sequence[str], rules: CaptionSettings, rng: SampleRng | None = None) -> tuple[str, ...]:
    """Every caption that a sample can have beside a dropped one. Shuffled tags need the `chance` of a turn."""
    usable = captions if rules.choose == "random" else captions[:1]
    texts = [text.strip() for text in usable] or [""]
    if rules.shuffle_tags:
        assert rng is not None, "shuffled tags depend on the turn"
        texts = [shuffle_tags(text, rules.tag_separator, rules.keep_tags, rng) for text in texts]
    return tuple(apply_trigger_word(text, rules.trigger_word, rules.tag_separator) for text in texts)


def choose_caption_index(count: int, rules: CaptionSettings, rng: SampleRng) -> int:
    """The number of the caption, among `count` possible ones, that a turn takes; or DROPPED."""
    if rules.dropout and rng.uniform("caption dropout") < rules.dropout:
        return DROPPED_CAPTION
    return rng.integer_below(count, "caption choice") if count > 1 else 0
