"""The caption of a sample in one turn: pure and seeded; choice, dropout, tag shuffling, then the trigger word."""

from __future__ import annotations

import re
from collections.abc import Sequence

from supertuner.config.settings.data import Captions
from supertuner.data.batching.sample_rng import Chance

TRIGGER_MARK = "[trigger]"


def caption_for(captions: Sequence[str], rules: Captions, chance: Chance) -> str:
    """One caption out of a sample's; empty if it has none and there is no trigger word, or if it is dropped.

    A dropped caption is empty altogether, trigger word included: the model learns what it does without any prompt.
    """
    if chance.uniform("caption dropout") < rules.dropout:
        return ""
    text = chosen(captions, rules, chance)
    if rules.shuffle_tags:
        text = shuffled_tags(text, rules.tag_separator, rules.keep_tags, chance)
    return triggered(text, rules.trigger_word, rules.tag_separator)


def chosen(captions: Sequence[str], rules: Captions, chance: Chance) -> str:
    if not captions:
        return ""
    number = chance.below(len(captions), "caption choice") if rules.choose == "random" else 0
    return captions[number].strip()


def shuffled_tags(text: str, separator: str, keep: int, chance: Chance) -> str:
    """The tags in a new order (Fisher and Yates), the first `keep` in their places. Empty tags disappear."""
    tags = [tag.strip() for tag in text.split(separator)]
    tags = [tag for tag in tags if tag]
    for last in range(len(tags) - 1, keep, -1):
        other = keep + chance.below(last - keep + 1, "tag order", last)
        tags[last], tags[other] = tags[other], tags[last]
    return joined(tags, separator)


def triggered(text: str, trigger: str | None, separator: str) -> str:
    """The trigger word in the place of `[trigger]`, or in front unless the caption has it already."""
    if not trigger:
        return text
    if TRIGGER_MARK in text:
        return text.replace(TRIGGER_MARK, trigger)
    word = rf"(?<!\w){re.escape(trigger)}(?!\w)"  # whole: "sks" is not in "she asks"
    return text if re.search(word, text) else joined([trigger, text] if text else [trigger], separator)


def joined(tags: Sequence[str], separator: str) -> str:
    """Tags as people write them: `a, b`, but `a|b` and `a b`."""
    return (f"{separator} " if separator in (",", ";") else separator).join(tags)
