"""Settings of validation: samples and the held-out loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue
from supertuner.config.settings.data import SEVERAL, PixelSide, one_or_several

RandomSeed = Annotated[int, Field(ge=0, lt=1 << 63)]
NoiseLevel = Annotated[float, Field(gt=0, lt=1)]
PromptTexts = Annotated[tuple[str, ...], Field(max_length=256), one_or_several(str, str, int, float)]
RandomSeeds = Annotated[tuple[RandomSeed, ...], SEVERAL, one_or_several(RandomSeed, str, int, float)]
NoiseLevels = Annotated[tuple[NoiseLevel, ...], SEVERAL, one_or_several(NoiseLevel, str, int, float)]


class ValidationSettings(SettingsBlock):
    prompts: PromptTexts = ()
    """A sample is generated for each prompt and each seed. Empty: captions of the held-out data, else of the training
    data."""
    negative_prompt: str = ""
    """Prompt that classifier-free guidance steers away from."""
    seeds: RandomSeeds = (0,)
    """Random seeds of the samples; the same at every validation, so that images can be compared."""
    image: Path | None = None
    """The image that samples of an image-to-video model start from, or that those of an editing model edit. Unset:
    images of the data."""
    every_steps: Annotated[int | None, Field(ge=1)] = None
    """Optimizer steps between validations. Unset: only by `at_start` and `at_end`."""
    at_start: bool = False
    """Validate before the first step, for comparison."""
    at_end: bool = True
    """Validate after the last step."""
    width: PixelSide | None = None
    """Width of samples in pixels. Unset: that of the largest bucket."""
    height: PixelSide | None = None
    """Height of samples in pixels. Unset: that of the largest bucket."""
    frames: Annotated[int | None, Field(ge=1)] = None
    """Frames per sample; 1 generates images. Unset: those of the largest bucket."""
    fps: Annotated[float, Field(gt=0, le=1000)] = 16.0
    """Frames per second of sample videos."""
    inference_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    """Denoising steps per sample."""
    guidance_scale: Annotated[float, Field(ge=0)] = 5.0
    """Scale of classifier-free guidance; 1 or less turns it off."""
    held_out_samples: Annotated[int, Field(ge=1)] = 64
    """Largest number of held-out samples whose loss is measured."""
    held_out_levels: NoiseLevels = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Noise levels at which the held-out loss is measured; an expert is measured at those in its range."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if (self.width is None) != (self.height is None):
            missing = "width" if self.width is None else "height"
            yield SettingsIssue(missing, "is missing: set width and height, or neither", ("width", "height"))
        for name in ("seeds", "held_out_levels"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                yield SettingsIssue(name, f"{list(values)} contains a value twice")
