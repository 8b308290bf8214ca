"""Captions and chance: seeded by sample and turn, and by nothing else."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.settings.data import AugmentSettings, CaptionSettings
from supertuner.data.batching.augment import draw_augmentation
from supertuner.data.batching.captions import apply_trigger_word, draw_caption
from supertuner.data.batching.sample_rng import SampleRng


def chance(turn: int = 0, key: str = "a", seed: int = 1, dataset: str = "cats") -> SampleRng:
    return SampleRng(seed, dataset, key, turn)


def test_each_of_seed_dataset_sample_turn_and_name_changes_a_draw_and_nothing_else_does():
    base = chance().uniform("flip")
    others = [
        chance(seed=2).uniform("flip"),
        chance(dataset="dogs").uniform("flip"),
        chance(key="b").uniform("flip"),
        chance(turn=1).uniform("flip"),
        chance().uniform("hue"),
        chance().uniform("flip", 1),
    ]
    assert chance().uniform("flip") == base and len({base, *others}) == 7


def test_draws_are_the_same_in_every_release():
    assert chance().uniform("flip") == 0.9433747700721794


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_dropout_takes_its_share_of_captions_over_many_samples(share):
    rules = CaptionSettings(dropout=share, trigger_word="sks")
    count = 20_000
    empty = sum(draw_caption(("a cat",), rules, chance(key=str(n))) == "" for n in range(count))
    assert abs(empty - share * count) <= 4 * math.sqrt(count * share * (1 - share))


def test_one_of_several_captions_is_chosen_evenly_and_changes_with_the_turn():
    seen = Counter(draw_caption(("one", "two", "three"), CaptionSettings(), chance(turn=turn)) for turn in range(3000))
    assert set(seen) == {"one", "two", "three"} and min(seen.values()) > 900
    first = {draw_caption(("one", "two"), CaptionSettings(choose="first"), chance(turn=turn)) for turn in range(20)}
    assert first == {"one"}


@given(st.lists(st.text("abcxyz ", min_size=1).filter(str.strip), max_size=9), st.integers(0, 10), st.integers(0, 99))
def test_shuffled_tags_are_the_same_tags_with_the_first_ones_kept(tags, keep, turn):
    rules = CaptionSettings(shuffle_tags=True, keep_tags=keep)
    tags = [tag.strip() for tag in tags]
    got = draw_caption((",".join(tags),), rules, chance(turn))
    shuffled = got.split(", ") if got else []
    assert sorted(shuffled) == sorted(tags) and shuffled[:keep] == tags[:keep]


def test_every_order_of_three_tags_occurs():
    rules = CaptionSettings(shuffle_tags=True)
    seen = Counter(draw_caption(("a, b, c",), rules, chance(turn)) for turn in range(3000))
    assert len(seen) == 6 and min(seen.values()) > 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a cat", "sks, a cat"),
        ("", "sks"),
        ("a photo of [trigger] in a hat", "a photo of sks in a hat"),
        ("a sks cat", "a sks cat"),
    ],
)
def test_the_trigger_word_fills_its_mark_or_comes_first_unless_it_is_there(text, expected):
    assert draw_caption((text,), CaptionSettings(trigger_word="sks"), chance()) == expected


def test_a_sample_without_a_caption_has_an_empty_one():
    assert draw_caption((), CaptionSettings(), chance()) == ""


def test_without_augmentation_nothing_changes_and_the_crop_is_central():
    change = draw_augmentation(AugmentSettings(), False, chance())
    assert (change.flip, change.crop_x, change.crop_y, change.crop_time) == (False, 0.5, 0.5, 0.5)
    assert (change.brightness, change.contrast, change.saturation, change.hue) == (1.0, 1.0, 1.0, 0.0)


def test_augmentations_stay_in_their_ranges_and_use_them():
    augment = AugmentSettings(flip=0.3, crop_jitter=0.5, brightness=0.2, hue=0.1)
    changes = [draw_augmentation(augment, False, chance(turn)) for turn in range(2000)]
    assert 500 < sum(change.flip for change in changes) < 700
    for values, low, high in (
        ([c.crop_x for c in changes], 0.25, 0.75),
        ([c.brightness for c in changes], 0.8, 1.2),
        ([c.hue for c in changes], -0.1, 0.1),
    ):
        assert low <= min(values) < low + 0.02 * (high - low) and high - 0.02 * (high - low) < max(values) <= high
    assert {change.crop_time for change in changes} == {0.5}
    anywhere = [draw_augmentation(augment, True, chance(turn)) for turn in range(2000)]
    assert min(c.crop_x for c in anywhere) < 0.01 and max(c.crop_time for c in anywhere) > 0.99


def test_a_trigger_word_inside_another_word_does_not_count_as_there():
    assert apply_trigger_word("she asks", "sks", ",") == "sks, she asks"
    assert apply_trigger_word("a sks.", "sks", ",") == "a sks."
    assert apply_trigger_word("photo of <c++>", "<c++>", ",") == "photo of <c++>"
