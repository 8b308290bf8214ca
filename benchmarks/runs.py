"""Small training runs for benchmarks: pictures, a configuration, and a run of a model that computes almost nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from supertuner.api.session import RunSession, open_session
from supertuner.api.training import open_report_sinks
from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.models.spec import Tensors
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.step.train_step import ExpertState
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.setup import open_run

SIDE = 256
PICTURES = 32


def write_config(folder: Path, **blocks: Any) -> Path:
    """Write pictures and a configuration that trains a tiny Wan2.2 on them, with `blocks` merged into it."""
    from PIL import Image

    data = folder / "data"
    if not data.exists():
        data.mkdir()
        colours = np.random.default_rng(0).integers(0, 256, (PICTURES, 8, 8, 3), np.uint8)
        for number, colour in enumerate(colours):
            Image.fromarray(colour).resize((SIDE, SIDE)).save(data / f"{number:03d}.png")
            (data / f"{number:03d}.txt").write_text(f"picture number {number}")
    tree: dict[str, Any] = {
        "run": {"name": "bench", "output_dir": str(folder / "runs")},
        "model": {"family": "wan2.2", "path": "tiny"},
        "arena": {"home": str(folder / "arenas")},
        "datasets": [{"instance_data_dir": str(data), "resolution": SIDE, "bucket_step": 16}],
        "cache_config": {"persistent_cache": True, "cache_dir": str(folder / "cache")},
        "checkpoints": {"every_steps": 0},
        "validation": {"at_end": False},
    }
    for name, values in blocks.items():
        tree[name] = {**tree.get(name, {}), **values}
    config = folder / "config.json"
    config.write_text(json.dumps(tree))
    return config


class SingleScaleModel(nn.Module):
    """A model with one parameter, so that a step measures everything except the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        return noisy * self.scale


def denoise_with_scale(
    module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    predicted: torch.Tensor = module(noisy)
    return predicted


@contextmanager
def opened(config: Path) -> Iterator[tuple[RunSession, TrainingRun]]:
    """The run of a configuration, ready to train, with the default reports."""
    from contextlib import ExitStack

    with open_session(load_config(config)) as work, ExitStack() as reports:
        context = RunContext(work.run_dir, open_report_sinks(work, reports), work.console, work.host)
        with open_run(work.config, context) as run:
            yield work, run


def lighten(run: TrainingRun, denoise: Any = denoise_with_scale) -> None:
    """Replace the run's model by `SingleScaleModel`; data, caches, logs and reports stay as they are."""
    run.step_options = replace(run.step_options, denoise=denoise)
    run.expert_states = tuple(_light(run, expert_state) for expert_state in run.expert_states)


def _light(run: TrainingRun, expert_state: ExpertState) -> ExpertState:
    module = SingleScaleModel()
    parameters = dict(module.named_parameters())
    optimizer = build_optimizer(run.config.optimizer, parameters, expert_state.expert.name)
    return ExpertState(expert_state.expert, module, parameters, optimizer)


def rewind(run: TrainingRun) -> None:
    """Set the run back to its first step."""
    run.step = 0
    run.loss_log.reset()
