"""The caption of a sample in one turn: pure and seeded; choice, dropout, tag shuffling, then the trigger word."""

from __future__ import annotations

import re
from collections.abc import Sequence

from supertuner.config.settings.data import CaptionSettings
from supertuner.data.batching.sample_rng import SampleRng

TRIGGER_PLACEHOLDER = "[trigger]"


def draw_caption(captions: Sequence[str], rules: CaptionSettings, rng: SampleRng) -> str:
    """One caption out of a sample's; empty if it has none and there is no trigger word, or if it is dropped.

    A dropped caption is empty altogether, trigger word included: the model learns what it does without any prompt.
    """
    if rng.uniform("caption dropout") < rules.dropout:
        return ""
    text = choose_caption(captions, rules, rng)
    if rules.shuffle_tags:
        text = shuffle_tags(text, rules.tag_separator, rules.keep_tags, rng)
    return apply_trigger_word(text, rules.trigger_word, rules.tag_separator)


def choose_caption(captions: Sequence[str], rules: CaptionSettings, rng: SampleRng) -> str:
    if not captions:
        return ""
    number = rng.integer_below(len(captions), "caption choice") if rules.choose == "random" else 0
    return captions[number].strip()


def shuffle_tags(text: str, separator: str, keep: int, rng: SampleRng) -> str:
    """The tags in a new order (Fisher and Yates), the first `keep` in their places. Empty tags disappear."""
    tags = [tag.strip() for tag in text.split(separator)]
    tags = [tag for tag in tags if tag]
    for last in range(len(tags) - 1, keep, -1):
        other = keep + rng.integer_below(last - keep + 1, "tag order", last)
        tags[last], tags[other] = tags[other], tags[last]
    return join_tags(tags, separator)


def apply_trigger_word(text: str, trigger: str | None, separator: str) -> str:
    """The trigger word in the place of `[trigger]`, or in front unless the caption has it already."""
    if not trigger:
        return text
    if TRIGGER_PLACEHOLDER in text:
        return text.replace(TRIGGER_PLACEHOLDER, trigger)
    whole_word = rf"(?<!\w){re.escape(trigger)}(?!\w)"  # whole: "sks" is not in "she asks"
    return text if re.search(whole_word, text) else join_tags([trigger, text] if text else [trigger], separator)


def join_tags(tags: Sequence[str], separator: str) -> str:
    """Tags as people write them: `a, b`, but `a|b` and `a b`."""
    return (f"{separator} " if separator in (",", ";") else separator).join(tags)
