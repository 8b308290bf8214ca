"""The first minutes with SuperTuner: a tiny two-expert Wan2.2 learns bright colours, from files to exported adapters.

The base model comes with the package and can draw shapes in chalk. The pictures that are drawn here have inks that it
has never seen. Some pairs of ink and shape are held out: whether they can be drawn afterwards is what is measured.
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

from supertuner.core.durable import write_bytes
from supertuner.core.errors import SuperTunerError
from supertuner.core.events import Silence
from supertuner.data.opened import open_corpus
from supertuner.tools import shapes
from supertuner.tools.preview import write_preview
from supertuner.tools.session import Session, life_of, load_narrowed, session
from supertuner.tools.staging import stage_all
from supertuner.tools.training import Trained, train_in

DATA: Final = "shapes"
SHEET: Final = "contact_sheet.png"
BOTH: Final = "before_and_after.png"
NAME: Final = "quickstart"
PROMPTS: Final = tuple(shapes.caption(*pair) for pair in shapes.HELD_OUT)
"""What the samples are of: pairs that no training picture has."""

TRAINING: Final[dict[str, Any]] = {
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
"""How it is trained; small enough for two cores and a minute."""


@dataclass(frozen=True, slots=True)
class Quickstart:
    """What was made, and where it is."""

    config: Path
    sheet: Path
    both: Path
    trained: Trained
    before: float
    """Held-out loss of the base."""
    after: float
    """Held-out loss after training."""
    seconds: float


def quickstart(folder: Path, sets: Sequence[str] = ()) -> Quickstart:
    """Draw the data below `folder` unless they are there from last time, train, and put before beside after.

    `sets` are settings as `--set` takes them. Started again, it goes on where it was.
    """
    begun = time.perf_counter()
    config = drawn_data(folder)
    with session(load_narrowed(config, sets)) as work:
        stage_all(work)
        _contact_sheet(work, folder / SHEET)
        trained = train_in(work)
    before, after = _held_out(trained.run / "validation.jsonl")
    _beside(trained, folder / BOTH)
    return Quickstart(config, folder / SHEET, folder / BOTH, trained, before, after, time.perf_counter() - begun)


def settings() -> dict[str, Any]:
    """The configuration of the quickstart; paths are relative to the data's folder, where it lies."""
    common = {"resolution": shapes.SIDE, "bucket_step": 16}
    return {
        "run": {"name": NAME, "output_dir": "../runs"},
        "model": {"family": "wan2.2", "path": str(shapes.BASE)},
        "datasets": [
            {"id": "shapes", "instance_data_dir": "train", **common},
            {"id": "held-out-pairs", "instance_data_dir": "held_out", "held_out": True, **common},
        ],
        "cache_config": {"persistent_cache": True, "cache_dir": "../cache"},
        **TRAINING,
        "validation": {
            "prompts": list(PROMPTS),
            "seeds": [0, 1, 2, 3],
            "at_start": True,
            "inference_steps": 16,
            "guidance_scale": 2.0,
        },
    }


def drawn_data(folder: Path) -> Path:
    """The configuration beside its data below `folder`, drawn unless they are there from last time."""
    data = folder / DATA
    config = data / "config.json"
    if config.is_file():
        return config
    if data.exists() and any(data.iterdir()):
        raise SuperTunerError(f"{data} holds files of yours; give another folder with --dir, or move them away")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".making-", dir=folder) as making:  # whole or not there, if this is interrupted
        made = Path(making) / DATA
        shapes.write_shapes(made)
        (made / "config.json").write_text(json.dumps(settings(), indent=2) + "\n")
        os.replace(made, data)
    return config


def _contact_sheet(work: Session, out: Path) -> None:
    quiet = Silence()  # all that there is to tell was told when it was staged
    with open_corpus(work.config, host=work.host, sink=quiet, progress=quiet, life=life_of(work.config)) as corpus:
        write_preview(corpus, out, threads=work.host.cpus())


def _held_out(log: Path) -> tuple[float, float]:
    """Held-out loss at the first and at the last validation."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["expert"] is None]
    return losses[0], losses[-1]


def _beside(trained: Trained, out: Path) -> None:
    """The samples of the base and those of the trained model in one picture."""
    from PIL import Image

    from supertuner.sinks.drawing import png_bytes

    folders = sorted(path for path in (trained.run / "samples").iterdir() if path.name.startswith("step-"))
    grids = [Image.open(folder / "grid.png").convert("RGB") for folder in (folders[0], folders[-1])]
    width, height = sum(grid.width for grid in grids), max(grid.height for grid in grids)
    both = Image.new("RGB", (width, height), grids[0].getpixel((0, 0)))
    both.paste(grids[0], (0, 0))
    both.paste(grids[1], (grids[0].width, 0))
    write_bytes(out, png_bytes(both))
