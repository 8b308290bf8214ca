"""Samples of a trained adapter on its base model: pictures or videos, and a grid of all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.core.errors import OptionError
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON
from supertuner.sinks.console import ConsoleSink

if TYPE_CHECKING:
    from supertuner.train.validation.adapter_samples import SampledAdapter

GENERATED_FOLDER = "generated"
"""Below `samples` of a run: samples that were made with `sample`."""


@dataclass(frozen=True, slots=True)
class GeneratedSamples:
    """Samples of an adapter."""

    folder: Path
    """The files of the samples, and `samples.json` with their prompts, seeds and settings."""
    grid: Path
    """All samples in one picture."""
    video: Path | None
    """All samples in one video; None: they are pictures."""

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        return {
            "folder": str(self.folder),
            "grid": str(self.grid),
            "video": None if self.video is None else str(self.video),
        }


def sample(
    source: str | os.PathLike[str],
    prompts: str | Sequence[str] = (),
    *,
    seeds: Sequence[int] | None = None,
    strength: float = 1.0,
    width: int | None = None,
    height: int | None = None,
    frames: int | None = None,
    inference_steps: int | None = None,
    guidance_scale: float | None = None,
    negative_prompt: str | None = None,
    image: str | os.PathLike[str] | None = None,
    model: str | None = None,
    family: str | None = None,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
) -> GeneratedSamples:
    """Make samples with an adapter on its base model. Values that are not given are those of the run's validation.

    Args:
        source: A run folder (its newest step), `RUN@STEP`, the folder of a checkpoint or of an export, a .safetensors
            file, or a folder with one file per expert.
        prompts: A sample is made for each prompt and each seed.
        seeds: The random seeds. At strength 1, the seed of a run's validation gives its sample.
        strength: Factor of the adapter; 1 is as trained, 0 is the base model.
        width: In pixels; needed if `source` is a file.
        height: In pixels; needed if `source` is a file.
        frames: Frames per sample; 1 makes pictures.
        inference_steps: Denoising steps per sample.
        guidance_scale: Scale of classifier-free guidance.
        negative_prompt: Prompt that guidance steers away from.
        image: The first frame for an image-to-video model, or the image to edit for an editing model.
        model: The base model of a file: a folder, or a name on the hub. None: as its metadata says.
        family: The model family of a file, if the names of its layers fit several.
        device: Overrides `train.device`.
        out: The new folder. None: a new one below `samples/generated` of the run, or below `samples` here.
        show_progress: Show progress on the console.

    Raises:
        ModelError: The file is damaged or does not fit the model, or the run has no such step.
        OptionError: A value is missing or impossible, or `out` exists.
        RunFolderError: `source` is a folder without adapter files, and not that of a run.
    """
    if out is not None and Path(out).exists():
        raise OptionError(f"{out} exists; name a new folder with `out`")
    if seeds is not None and (not seeds or len(set(seeds)) != len(seeds) or not all(0 <= s < 1 << 63 for s in seeds)):
        raise OptionError(f"seeds are {list(seeds)}; they must be different numbers from 0 on")
    for name, value in (("width", width), ("height", height), ("frames", frames), ("inference_steps", inference_steps)):
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}; it must be at least 1")
    with ConsoleSink() if show_progress else nullcontext(NullSink()) as console:
        with console.phase("loading libraries"):
            from supertuner.arena.run_context import RunContext
            from supertuner.train.validation import adapter_samples
        options = adapter_samples.SampleOptions(
            prompts=(prompts,) if isinstance(prompts, str) else tuple(prompts),
            seeds=None if seeds is None else tuple(seeds),
            width=width,
            height=height,
            frames=frames,
            inference_steps=inference_steps,
            guidance_scale=guidance_scale,
            negative_prompt=negative_prompt,
            image=None if image is None else Path(image),
            strength=strength,
        )
        with adapter_samples.open_sampled_adapter(os.fspath(source), model, family, device) as adapter:
            target = Path(out) if out is not None else _new_folder(adapter)
            context = RunContext(target, console, console, HostFacts())
            grid, video = adapter_samples.make_adapter_samples(adapter, options, target, context)
    return GeneratedSamples(target, grid, video)


def _new_folder(adapter: SampledAdapter) -> Path:
    """A folder that does not exist yet."""
    parent = Path("samples") if adapter.run_dir is None else adapter.run_dir / "samples" / GENERATED_FOLDER
    name = adapter.name if adapter.run_dir is None else f"step-{adapter.step:08d}"
    candidates = (parent / (name if number == 1 else f"{name}-{number}") for number in range(1, 1_000_000))
    return next(folder for folder in candidates if not folder.exists())
