"""Shrinks a configuration to a trial of seconds: a tiny model, few samples, small sizes, few steps. Pure.

What is trained, how, and on which kind of data stays as configured. Only sizes and numbers become smaller, and settings
that need the real model or its machine are replaced, each with a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from supertuner.config.families import expert_names
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import JSON

SAMPLES, STEPS, CHECKPOINT_EVERY = 6, 4, 2
SIDE, MIN_SIDE, SIDE_STEP, FRAMES = 64, 32, 16, 5
BATCH_SIZE, MICRO_BATCHES = 2, 2
PROMPTS, INFERENCE_STEPS, HELD_OUT_SAMPLES = 2, 4, 4
MAX_ASPECT_RATIO, VARIATIONS = 2.0, 2
TRIAL_SUFFIX = "-try"


def trial_name(run_name: str, output_dir: Path) -> str:
    """A name that no run has: `NAME-try`, `NAME-try-2` … Nothing is replaced."""
    name, number = f"{run_name}{TRIAL_SUFFIX}", 1
    while (output_dir / name).exists():
        number += 1
        name = f"{run_name}{TRIAL_SUFFIX}-{number}"
    return name


def trial_settings(config: RunConfig, name: str) -> dict[str, JSON]:
    """Path of a setting → its value in the trial, for every setting that changes."""
    folder = config.run.output_dir / name
    settings: dict[str, JSON] = {
        "run.name": name,
        "model.path": "tiny",
        "model.revision": None,
        "model.variant": None,
        **{f"model.{setting}": None for setting in config.model.single_files},
        # Arenas and caches of its own: the run finds its own as they were. Caches in memory end with the trial.
        "arena.disk_home": str(folder / "arenas"),
        "arena.keep": "run",
        "cache_config.cache_dir": str(folder / "cache"),
        "loader.drop_last": False,
        "checkpoints.resume": "latest",
        "forecast.before_training": "never",
        **_training(config),
        **_validation(config),
    }
    for index, dataset in enumerate(config.datasets):
        settings |= {f"datasets[{index}].{key}": value for key, value in _dataset(dataset).items()}
    return settings


def replaced_settings(config: RunConfig) -> Iterator[tuple[str, JSON, str]]:
    """(setting, its value in the trial, why) of settings that a tiny model cannot have, and that the user has set."""
    if config.model.compile:
        yield "model.compile", False, "compiling takes longer than the trial"
    if config.plan.explicit_choices or config.plan.act != "never":
        for name in config.plan.explicit_choices:
            yield f"plan.{name}", "auto", "a tiny model needs no plan"
        yield "plan.act", "never", "" if not config.plan.explicit_choices else "a tiny model needs no plan"
    if config.memory.overflow.enabled:
        yield "memory.overflow.enabled", False, "a tiny model does not fill the memory"
    if config.report.wandb is not None:
        yield "report.wandb", None, "a trial is not reported"
    if config.parallel.strategy == "fsdp":
        yield "parallel.strategy", "auto", "the trial is one process"
    for owner, values in (
        ("adapter", config.adapter),
        *((f"adapter.{one}", config.adapter.for_expert(one)) for one in expert_names()),
    ):
        for name in ("start_from", "frozen"):
            if getattr(values, name) is not None:
                yield f"{owner}.{name}", None, "the file is for the full-size model"


def _training(config: RunConfig) -> dict[str, JSON]:
    batch_size = min(config.train.batch_size, BATCH_SIZE)
    micro_batches = min(config.train.gradient_accumulation_steps, MICRO_BATCHES)
    settings: dict[str, JSON] = {
        "train.batch_size": batch_size,
        "train.gradient_accumulation_steps": micro_batches,
        "train.max_steps": min(config.train.max_steps or STEPS, STEPS),
        "train.num_epochs": None,
        "model.switch_boundary_every": 1,  # so that every expert is trained
        "checkpoints.every_steps": CHECKPOINT_EVERY,
    }
    if config.gh200_optimizations.enable_batch_size_rampup:
        ramp = {"initial_effective_batch_size": 1, "target_effective_batch_size": max(2, batch_size * micro_batches)}
        settings |= {f"gh200_optimizations.{name}": value for name, value in ramp.items()}
        settings["gh200_optimizations.batch_rampup_steps"] = STEPS
    return settings


def _validation(config: RunConfig) -> dict[str, JSON]:
    validation = config.validation
    settings: dict[str, JSON] = {
        "validation.prompts": list(validation.prompts[:PROMPTS]),
        "validation.seeds": [validation.seeds[0]],
        "validation.every_steps": None,
        "validation.at_end": True,
        "validation.inference_steps": min(validation.inference_steps, INFERENCE_STEPS),
        "validation.held_out_samples": min(validation.held_out_samples, HELD_OUT_SAMPLES),
    }
    if validation.width is not None and validation.height is not None:
        longest = max(validation.width, validation.height)
        settings["validation.width"] = _small_side(validation.width, longest)
        settings["validation.height"] = _small_side(validation.height, longest)
    if validation.frames is not None:
        settings["validation.frames"] = min(validation.frames, FRAMES)
    return settings


def _dataset(dataset: DatasetSettings) -> dict[str, JSON]:
    longest = max(dataset.resolution)
    sides: list[JSON] = [*dict.fromkeys(_small_side(side, longest) for side in dataset.resolution)]
    frames: list[JSON] = [*dict.fromkeys(min(count, FRAMES) for count in dataset.frames)]
    return {
        "type": "disk",
        "in_memory.memory_limit_gb": None,
        "limit": min(dataset.limit or SAMPLES, SAMPLES),
        "resolution": sides,
        "bucket_step": SIDE_STEP,
        "max_aspect_ratio": min(dataset.max_aspect_ratio, MAX_ASPECT_RATIO),
        "frames": frames,
        "variations": min(dataset.variations, VARIATIONS),
        "strict": False,  # broken files were reported before
        "max_broken_share": 1.0,
        **({"conditioning_resolution": SIDE} if dataset.conditioning_dir is not None else {}),
    }


def _small_side(side: int, longest: int) -> int:
    """A side in proportion to the longest, which becomes `SIDE`; a multiple of what every tiny model takes."""
    return max(MIN_SIDE, round(side * SIDE / longest / SIDE_STEP) * SIDE_STEP)
