"""SampleRng, captions and augmentation depend on seed, dataset, sample and cycle only."""

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


def rng(cycle: int = 0, key: str = "a", seed: int = 1, dataset: str = "cats") -> SampleRng:
    return SampleRng(seed, dataset, key, cycle)


def test_seed_dataset_sample_cycle_name_and_index_each_change_a_draw():
    base = rng().uniform("flip")
    others = [
        rng(seed=2).uniform("flip"),
        rng(dataset="dogs").uniform("flip"),
        rng(key="b").uniform("flip"),
        rng(cycle=1).uniform("flip"),
        rng().uniform("hue"),
        rng().uniform("flip", 1),
    ]
    assert rng().uniform("flip") == base and len({base, *others}) == 7


def test_draws_are_the_same_in_every_release():
    assert rng().uniform("flip") == 0.9433747700721794


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_dropout_drops_its_share_of_captions(share):
    rules = CaptionSettings(dropout=share, trigger_word="sks")
    count = 20_000
    empty = sum(draw_caption(("a cat",), rules, rng(key=str(n))) == "" for n in range(count))
    assert abs(empty - share * count) <= 4 * math.sqrt(count * share * (1 - share))


def test_one_of_several_captions_is_chosen_uniformly_in_each_cycle():
    seen = Counter(draw_caption(("one", "two", "three"), CaptionSettings(), rng(cycle=cycle)) for cycle in range(3000))
    assert set(seen) == {"one", "two", "three"} and min(seen.values()) > 900
    first = {draw_caption(("one", "two"), CaptionSettings(choose="first"), rng(cycle=cycle)) for cycle in range(20)}
    assert first == {"one"}


@given(st.lists(st.text("abcxyz ", min_size=1).filter(str.strip), max_size=9), st.integers(0, 10), st.integers(0, 99))
def test_shuffling_keeps_all_tags_and_the_order_of_the_first_ones(tags, keep, cycle):
    rules = CaptionSettings(shuffle_tags=True, keep_tags=keep)
    tags = [tag.strip() for tag in tags]
    caption = draw_caption((",".join(tags),), rules, rng(cycle))
    shuffled = caption.split(", ") if caption else []
    assert sorted(shuffled) == sorted(tags) and shuffled[:keep] == tags[:keep]


def test_every_order_of_three_tags_occurs():
    rules = CaptionSettings(shuffle_tags=True)
    seen = Counter(draw_caption(("a, b, c",), rules, rng(cycle)) for cycle in range(3000))
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
def test_the_trigger_word_replaces_its_placeholder_or_is_prepended_unless_present(text, expected):
    assert draw_caption((text,), CaptionSettings(trigger_word="sks"), rng()) == expected


def test_a_sample_without_a_caption_has_an_empty_one():
    assert draw_caption((), CaptionSettings(), rng()) == ""


def test_without_augmentation_the_crop_is_central_and_nothing_changes():
    params = draw_augmentation(AugmentSettings(), False, rng())
    assert (params.flip, params.crop_x, params.crop_y, params.crop_time) == (False, 0.5, 0.5, 0.5)
    assert (params.brightness, params.contrast, params.saturation, params.hue) == (1.0, 1.0, 1.0, 0.0)


def test_augmentations_cover_exactly_their_ranges():
    augment = AugmentSettings(flip=0.3, crop_jitter=0.5, brightness=0.2, hue=0.1)
    drawn = [draw_augmentation(augment, False, rng(cycle)) for cycle in range(2000)]
    assert 500 < sum(params.flip for params in drawn) < 700
    for values, low, high in (
        ([c.crop_x for c in drawn], 0.25, 0.75),
        ([c.brightness for c in drawn], 0.8, 1.2),
        ([c.hue for c in drawn], -0.1, 0.1),
    ):
        assert low <= min(values) < low + 0.02 * (high - low) and high - 0.02 * (high - low) < max(values) <= high
    assert {params.crop_time for params in drawn} == {0.5}
    random_crops = [draw_augmentation(augment, True, rng(cycle)) for cycle in range(2000)]
    assert min(c.crop_x for c in random_crops) < 0.01 and max(c.crop_time for c in random_crops) > 0.99


def test_a_trigger_word_inside_another_word_does_not_count_as_present():
    assert apply_trigger_word("she asks", "sks", ",") == "sks, she asks"
    assert apply_trigger_word("a sks.", "sks", ",") == "a sks."
    assert apply_trigger_word("photo of <c++>", "<c++>", ",") == "photo of <c++>"
