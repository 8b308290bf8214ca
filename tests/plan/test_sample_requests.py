"""Prompts, seeds, first frames and size of validation samples, with and without settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from supertuner.config.settings.validation import ValidationSettings
from supertuner.core.errors import TrainError
from supertuner.core.events import DecisionEvent
from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan.sample_requests import (
    CaptionedSample,
    SampleSize,
    ValidationSamplePlan,
    largest_sample_size,
    plan_validation_samples,
)
from tests.train.validation.making import RecordingSink

DEFAULT = SampleSize(64, 48, 9)


def plan(
    held_out: list[CaptionedSample], data: list[CaptionedSample], **settings: Any
) -> tuple[ValidationSamplePlan, list[DecisionEvent]]:
    sink = RecordingSink()
    made = plan_validation_samples(
        ValidationSettings.model_validate(settings),
        default_size=DEFAULT,
        held_out=held_out,
        training_data=data,
        sink=sink,
    )
    return made, [event for event in sink.events if isinstance(event, DecisionEvent)]


def captioned(*captions: str) -> list[CaptionedSample]:
    return [CaptionedSample(caption, np.full((2, 2, 3), number, np.uint8)) for number, caption in enumerate(captions)]


def test_configured_prompts_are_used_with_every_seed() -> None:
    made, decided = plan([], captioned("a", "b"), prompts=["x", "y"], seeds=[1, 2, 3], width=32, height=32, frames=1)
    assert [(row, column, r.prompt, r.seed) for row, column, r in made.requests()] == [
        (0, 0, "x", 1), (0, 1, "x", 2), (0, 2, "x", 3), (1, 0, "y", 1), (1, 1, "y", 2), (1, 2, "y", 3),
    ]  # fmt: skip
    assert len(made) == 6 and decided == []


def test_without_prompts_captions_of_held_out_data_are_used_and_reported() -> None:
    made, decided = plan(captioned("a", "b", "a", " ", "c", "d", "e"), captioned("z"))
    assert made.prompts == ("a", "b", "c", "d")
    assert decided[0] == DecisionEvent(
        "validation.prompts", ["a", "b", "c", "d"], "validation.prompts is empty: the first captions of held-out data"
    )


def test_without_held_out_data_captions_of_the_training_data_are_used() -> None:
    made, decided = plan([], captioned("z", "z", "y"))
    assert made.prompts == ("z", "y")
    assert decided[0].reason == "validation.prompts is empty: the first captions of the training data"


def test_data_without_captions_gives_one_empty_prompt() -> None:
    made, decided = plan([], captioned("", " "))
    assert made.prompts == ("",) and decided[0].reason == "validation.prompts is empty, and the data has no captions"
    made, _ = plan([], [])
    assert made.prompts == ("",) and made.images == (None,)


def test_captions_keep_their_first_frames_and_configured_prompts_cycle_through_them() -> None:
    made, _ = plan([], captioned("a", "b"))
    assert [int(image.max()) for image in made.images if image is not None] == [0, 1]
    made, _ = plan(captioned("a", "b"), [], prompts=["x", "y", "z"])
    assert [int(image.max()) for image in made.images if image is not None] == [0, 1, 0]
    made, _ = plan([], [CaptionedSample("a")], prompts=["x"])
    assert made.images == (None,)


def test_only_as_much_of_the_data_is_read_as_needed() -> None:
    def endless() -> Any:
        for number in range(10**9):
            assert number < 1000, "far more than needed"
            yield CaptionedSample("always the same" if number > 2 else str(number))

    sink = RecordingSink()
    made = plan_validation_samples(
        ValidationSettings(), default_size=DEFAULT, held_out=endless(), training_data=[], sink=sink
    )
    assert made.prompts == ("0", "1", "2", "always the same")


def test_a_size_that_is_not_set_comes_from_the_largest_bucket_and_is_reported() -> None:
    made, decided = plan([], captioned("a"))
    assert made.size == DEFAULT
    assert decided[-1].what == "validation.size" and decided[-1].value == "64×48, 9 frames"
    made, _ = plan([], captioned("a"), width=32, height=16)
    assert made.size == SampleSize(32, 16, 9)
    made, _ = plan([], captioned("a"), frames=1)
    assert made.size == SampleSize(64, 48, 1)


def test_the_largest_bucket_is_the_one_with_the_most_pixels() -> None:
    image = Bucket(MediaKind.IMAGE, 100, 100, channels=3)
    clip = Bucket(MediaKind.VIDEO, 64, 48, 9, channels=3)
    sound = Bucket(MediaKind.AUDIO, samples=10**9, sample_rate=48000, channels=2)
    assert largest_sample_size([image, clip, sound]) == SampleSize(64, 48, 9)
    assert largest_sample_size([image]) == SampleSize(100, 100, 1)
    tall, wide = Bucket(MediaKind.IMAGE, 48, 64), Bucket(MediaKind.IMAGE, 64, 48)
    assert largest_sample_size([tall, wide]) == largest_sample_size([wide, tall])
    with pytest.raises(TrainError, match=r"validation\.width"):
        largest_sample_size([sound])
