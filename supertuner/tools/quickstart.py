"""The quickstart: trains a tiny two-expert Wan2.2 on drawn shapes, from image files to exported adapters, in minutes.

The base model ships with the package and can draw shapes in a few dull colours ("chalks"). The training pictures have
bright colours ("inks") that the base model does not know. Some pairs of ink and shape are in no training picture; their
held-out loss before and after training is the result.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from supertuner.api.session import RunSession, arena_lifetime, load_command_config, open_session
from supertuner.api.training import TrainingResult, train_in_session
from supertuner.arena.run_context import RunContext
from supertuner.core.durable import write_bytes
from supertuner.core.errors import SuperTunerError
from supertuner.core.events import NullSink
from supertuner.data.corpus_loader import open_corpus
from supertuner.runs.loss_files import HELD_OUT_FILE, read_held_out_losses
from supertuner.tools import shapes
from supertuner.tools.preview import write_preview
from supertuner.tools.staging import stage_all_datasets

DATA_FOLDER: Final = "shapes"
CONTACT_SHEET_FILE: Final = "contact_sheet.png"
COMPARISON_FILE: Final = "before_and_after.png"
RUN_NAME: Final = "quickstart"
PROMPTS: Final = tuple(shapes.caption(*pair) for pair in shapes.HELD_OUT_PAIRS)
"""Prompts of the samples: the held-out pairs."""

TRAINING_SETTINGS: Final[dict[str, Any]] = {
    "adapter": {"rank": 16, "targets": "attention_mlp"},
    "train": {"batch_size": 16, "max_steps": 500, "mixed_precision": "fp32", "max_grad_norm": 1.0},
    "gh200_optimizations": {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 4,
        "target_effective_batch_size": 16,
        "batch_rampup_steps": 120,
    },
    "optimizer": {"learning_rate": 0.006, "lr_scheduler": "cosine", "lr_warmup_steps": 20},
    "checkpoints": {"every_steps": 100, "keep": 2},
}
"""Small enough for about a minute on two cores."""


@dataclass(frozen=True, slots=True)
class QuickstartResult:
    """The files that the quickstart produced, and its result."""

    config: Path
    contact_sheet: Path
    comparison: Path
    training: TrainingResult
    loss_before: float
    """Held-out loss of the base model."""
    loss_after: float
    """Held-out loss after training."""
    seconds: float


def run_quickstart(folder: Path, sets: Sequence[str] = ()) -> QuickstartResult:
    """Draw the data below `folder` unless they exist, train, and draw the samples before and after side by side.

    `sets` are overrides as `--set` takes them. A second call resumes the run of the first.
    """
    started = time.perf_counter()
    config = prepare_data(folder)
    with open_session(load_command_config(config, sets)) as run_session:
        stage_all_datasets(run_session)
        _write_contact_sheet(run_session, folder / CONTACT_SHEET_FILE)
        trained = train_in_session(run_session)
    before, after = _first_and_last_held_out_loss(trained.run_dir / HELD_OUT_FILE)
    _write_comparison(trained, folder / COMPARISON_FILE)
    return QuickstartResult(
        config,
        folder / CONTACT_SHEET_FILE,
        folder / COMPARISON_FILE,
        trained,
        before,
        after,
        time.perf_counter() - started,
    )


def quickstart_settings() -> dict[str, Any]:
    """The configuration of the quickstart; its paths are relative to the data folder, where it is written."""
    common = {"resolution": shapes.SIDE_PIXELS, "bucket_step": 16}
    return {
        "run": {"name": RUN_NAME, "output_dir": "../runs"},
        "model": {"family": "wan2.2", "path": str(shapes.BASE_MODEL)},
        "datasets": [
            {"id": "shapes", "instance_data_dir": "train", **common},
            {"id": "held-out-pairs", "instance_data_dir": "held_out", "held_out": True, **common},
        ],
        "cache_config": {"persistent_cache": True, "cache_dir": "../cache"},
        **TRAINING_SETTINGS,
        "validation": {
            "prompts": list(PROMPTS),
            "seeds": [0, 1, 2, 3],
            "at_start": True,
            "inference_steps": 16,
            "guidance_scale": 2.0,
        },
    }


def prepare_data(folder: Path) -> Path:
    """Draw the data below `folder` unless they exist, and write the configuration beside them. Returns its path."""
    data = folder / DATA_FOLDER
    config = data / "config.json"
    if config.is_file():
        return config
    if data.exists() and any(data.iterdir()):
        raise SuperTunerError(f"{data} contains other files; choose another folder with --dir, or move them")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".making-", dir=folder) as temporary:  # an interruption leaves no partial data
        new_data = Path(temporary) / DATA_FOLDER
        shapes.write_shapes(new_data)
        (new_data / "config.json").write_text(json.dumps(quickstart_settings(), indent=2) + "\n")
        os.replace(new_data, data)
    return config


def _write_contact_sheet(run_session: RunSession, out: Path) -> None:
    quiet = NullSink()  # staging has reported everything already
    context = RunContext(run_session.run_dir, quiet, quiet, run_session.host)
    with open_corpus(run_session.config, context, life=arena_lifetime(run_session.config)) as corpus:
        write_preview(corpus, out, threads=run_session.host.cpus())


def _first_and_last_held_out_loss(log: Path) -> tuple[float, float]:
    """The mean held-out loss of the first and of the last validation."""
    losses = [record.loss for record in read_held_out_losses(log) if record.expert is None and record.loss is not None]
    return losses[0], losses[-1]


def _write_comparison(training: TrainingResult, out: Path) -> None:
    """Write one picture with the samples of the base model and those of the trained model side by side."""
    from PIL import Image

    from supertuner.sinks.drawing import png_bytes

    folders = sorted(path for path in (training.run_dir / "samples").iterdir() if path.name.startswith("step-"))
    grids = [Image.open(folder / "grid.png").convert("RGB") for folder in (folders[0], folders[-1])]
    width, height = sum(grid.width for grid in grids), max(grid.height for grid in grids)
    comparison = Image.new("RGB", (width, height), grids[0].getpixel((0, 0)))
    comparison.paste(grids[0], (0, 0))
    comparison.paste(grids[1], (grids[0].width, 0))
    write_bytes(out, png_bytes(comparison))
