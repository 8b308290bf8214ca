"""Samples of a trained adapter on its base model: pictures or videos, and a grid of all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.core.errors import OptionError
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.core.interrupts import interrupts_win
from supertuner.core.types import JSON
from supertuner.sinks.console import ConsoleSink

if TYPE_CHECKING:
    from supertuner.train.adapter_samples import SampledAdapter

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


@interrupts_win()
def sample(
    source: str | os.PathLike[str],
    prompts: str | Sequence[str] = (),
    *,
    seeds: Sequence[int] = (),
    strength: float = 1.0,
    overrides: Mapping[str, JSON] | Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
) -> GeneratedSamples:
    """Make samples with an adapter on its base model: one for each prompt and each seed.

    Args:
        source: A run folder (its newest step), `RUN@STEP`, the folder of a checkpoint or of an export, a .safetensors
            file, or a folder with one file per expert.
        prompts: Empty: those of the run's validation.
        seeds: The random seeds. Empty: those of the run's validation. At strength 1, the same prompt and seed give the
            sample of the validation.
        strength: Factor of the adapter; 1 is as trained, 0 is the base model.
        overrides: Other settings than those of the run, as a mapping from path to value or as texts `path=value`:
            `validation.width`, `validation.image`, `train.device`; `model.path` is the base model of a file whose
            metadata does not name it.
        out: The new folder. None: a new one below `samples/generated` of the run, or below `samples` here.
        show_progress: Show progress on the console.

    Raises:
        ConfigError: A setting in `overrides` is not valid.
        ModelError: The file is damaged or does not fit the model, or the run has no such step.
        OptionError: A value is missing or impossible, or `out` exists.
        RunFolderError: `source` is a folder without adapter files, and not that of a run.
    """
    if out is not None and Path(out).exists():
        raise OptionError(f"{out} exists; name a new folder with `out`")
    with ConsoleSink() if show_progress else nullcontext(NullSink()) as console:
        with console.phase("loading libraries"):
            from supertuner.arena.run_context import RunContext
            from supertuner.train import adapter_samples
        texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
        options = adapter_samples.SampleOptions(texts, tuple(seeds), strength)
        with adapter_samples.open_sampled_adapter(os.fspath(source), overrides) as adapter:
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
