"""Small training runs for benchmarks: pictures, a configuration, and a run on a model that computes next to nothing."""

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

from supertuner.config.sources.load import load
from supertuner.models.spec import Tensors
from supertuner.optim.table import build
from supertuner.step.window import Trainee
from supertuner.tools.session import Session, session
from supertuner.tools.training import with_reports
from supertuner.train.run import Run
from supertuner.train.setup import Outside, open_run

SIDE = 256
PICTURES = 32


def write_config(folder: Path, **blocks: Any) -> Path:
    """Pictures and a configuration that trains a tiny Wan2.2 on them, all else as it is by default."""
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


class NearlyNothing(nn.Module):
    """One number: what a step costs beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        return noisy * self.scale


def nearly_nothing(
    module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    predicted: torch.Tensor = module(noisy)
    return predicted


@contextmanager
def opened(config: Path) -> Iterator[tuple[Session, Run]]:
    """The run of a configuration, ready to train, with every report that a user gets by default."""
    from contextlib import ExitStack

    with session(load(config)) as work, ExitStack() as reports:
        outside = Outside(with_reports(work, reports), work.console, work.host)
        with open_run(work.config, "bench", work.path, outside) as run:
            yield work, run


def lighten(run: Run, denoise: Any = nearly_nothing) -> None:
    """Let the run train `NearlyNothing` instead of its model; data, caches, logs and reports stay as they are."""
    run.rules = replace(run.rules, denoise=denoise)
    run.trainees = tuple(_light(run, trainee) for trainee in run.trainees)


def _light(run: Run, trainee: Trainee) -> Trainee:
    module = NearlyNothing()
    parameters = dict(module.named_parameters())
    optimizer = build(run.config.optimizer, parameters, trainee.expert.name)
    return Trainee(trainee.expert, module, parameters, optimizer)


def rewind(run: Run) -> None:
    """To the first step again."""
    run.step = 0
    run.losses.begin()
