"""Draws a sample's caption for a cycle: choice among several, dropout, tag shuffling, then the trigger word. Pure.

`draw_caption` draws directly. The cache lists all captions that can occur (`possible_captions`), encodes each once, and
later picks one by index (`choose_caption_index`): `possible_captions(...)[choose_caption_index(...)]` is the caption
that `draw_caption` draws, except that cached shuffled tags repeat the order of an earlier cycle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from supertuner.config.settings.data import CaptionSettings
from supertuner.data.batching.sample_rng import SampleRng

TRIGGER_PLACEHOLDER = "[trigger]"
DROPPED_CAPTION = -1
"""Returned by `choose_caption_index` if the caption is empty in this cycle."""


def draw_caption(
    captions: Sequence[str], rules: CaptionSettings, rng: SampleRng, tag_rng: SampleRng | None = None
) -> str:
    """One of a sample's captions; empty if it is dropped, or if there is neither a caption nor a trigger word.

    `tag_rng` shuffles the tags; None: `rng`. A dropped caption is completely empty, without the trigger word, so that
    the model also trains unconditionally.
    """
    if rng.uniform("caption dropout") < rules.dropout:
        return ""
    number = rng.integer_below(len(captions), "caption choice") if captions and rules.choose == "random" else 0
    text = captions[number].strip() if captions else ""
    if rules.shuffle_tags:
        text = shuffle_tags(text, rules.tag_separator, rules.keep_tags, tag_rng or rng)
    return apply_trigger_word(text, rules.trigger_word, rules.tag_separator)


def possible_captions(captions: Sequence[str], rules: CaptionSettings, rng: SampleRng | None = None) -> tuple[str, ...]:
    """Every caption that a sample can have, except the dropped one. Shuffled tags need the `rng` of a cycle."""
    usable = captions if rules.choose == "random" else captions[:1]
    texts = [text.strip() for text in usable] or [""]
    if rules.shuffle_tags:
        assert rng is not None, "the order of shuffled tags depends on the cycle"
        texts = [shuffle_tags(text, rules.tag_separator, rules.keep_tags, rng) for text in texts]
    return tuple(apply_trigger_word(text, rules.trigger_word, rules.tag_separator) for text in texts)


def choose_caption_index(count: int, rules: CaptionSettings, rng: SampleRng) -> int:
    """Index, among `count` possible captions, of the one that a cycle uses, or DROPPED_CAPTION."""
    if rules.dropout and rng.uniform("caption dropout") < rules.dropout:
        return DROPPED_CAPTION
    return rng.integer_below(count, "caption choice") if count > 1 else 0


def shuffle_tags(text: str, separator: str, keep: int, rng: SampleRng) -> str:
    """Shuffle the tags (Fisher-Yates), except the first `keep`. Empty tags are removed."""
    tags = [stripped for tag in text.split(separator) if (stripped := tag.strip())]
    for last in range(len(tags) - 1, keep, -1):
        other = keep + rng.integer_below(last - keep + 1, "tag order", last)
        tags[last], tags[other] = tags[other], tags[last]
    return join_tags(tags, separator)


def apply_trigger_word(text: str, trigger: str | None, separator: str) -> str:
    """Replace `[trigger]` by the trigger word, or put the word in front unless the caption contains it."""
    if not trigger:
        return text
    if TRIGGER_PLACEHOLDER in text:
        return text.replace(TRIGGER_PLACEHOLDER, trigger)
    whole_word = rf"(?<!\w){re.escape(trigger)}(?!\w)"  # "she asks" does not contain the word "sks"
    return text if re.search(whole_word, text) else join_tags([trigger, text] if text else [trigger], separator)


def join_tags(tags: Sequence[str], separator: str) -> str:
    """Join tags as people write them: `a, b`, but `a|b` and `a b`."""
    return (f"{separator} " if separator in (",", ";") else separator).join(tags)
