"""Settings of samples and of the held-out loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue
from supertuner.config.settings.data import PixelSide


def _one_or_several(value: Any) -> Any:
    """`"a cat"` means `["a cat"]`. A list becomes a tuple here because the strict reader of tuples wants one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str | int | float) and not isinstance(value, bool) else value


RandomSeed = Annotated[int, Field(ge=0, lt=1 << 63)]
NoiseLevel = Annotated[float, Field(gt=0, lt=1)]
PromptTexts = Annotated[
    tuple[str, ...],
    Field(max_length=256),
    BeforeValidator(_one_or_several, json_schema_input_type=str | tuple[str, ...]),
]
RandomSeeds = Annotated[
    tuple[RandomSeed, ...],
    Field(min_length=1, max_length=64),
    BeforeValidator(_one_or_several, json_schema_input_type=RandomSeed | tuple[RandomSeed, ...]),
]
NoiseLevels = Annotated[
    tuple[NoiseLevel, ...],
    Field(min_length=1, max_length=64),
    BeforeValidator(_one_or_several, json_schema_input_type=NoiseLevel | tuple[NoiseLevel, ...]),
]


class ValidationSettings(SettingsBlock):
    prompts: PromptTexts = ()
    """A sample is made of each prompt with each seed; none: captions of the held-out data, or of the data."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    seeds: RandomSeeds = (0,)
    """Seeds of the samples: the same at every validation, so that pictures can be compared."""
    every_steps: Annotated[int | None, Field(ge=1)] = None
    """Optimizer steps between validations; unset: only where `at_start` and `at_end` say."""
    at_start: bool = False
    """Validate before the first step, to compare with."""
    at_end: bool = True
    """Validate after the last step."""
    width: PixelSide | None = None
    """Width of samples; unset: that of the largest bucket."""
    height: PixelSide | None = None
    """Height of samples; unset: that of the largest bucket."""
    frames: Annotated[int | None, Field(ge=1)] = None
    """Frames of a sample; unset: those of the largest bucket. 1 makes pictures."""
    fps: Annotated[float, Field(gt=0, le=1000)] = 16.0
    """Frames per second of videos."""
    inference_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    """Steps of the sampler."""
    guidance_scale: Annotated[float, Field(ge=0)] = 5.0
    """Classifier-free guidance; 1 or less turns it off."""
    held_out_samples: Annotated[int, Field(ge=1)] = 64
    """Most samples of held-out datasets whose loss is measured."""
    held_out_levels: NoiseLevels = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Noise levels at which it is measured; of an expert, those in its range."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if (self.width is None) != (self.height is None):
            missing = "width" if self.width is None else "height"
            yield SettingsIssue(missing, "is missing: give width and height, or neither", ("width", "height"))
        for name in ("seeds", "held_out_levels"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                yield SettingsIssue(name, f"{list(values)} names one value twice")
