"""Draws a few captioned pictures, and configures a tiny model to train on them; the other programs use both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "orange")


def draw_pictures(folder: Path, count: int = 12) -> Path:
    """Pictures of coloured squares, each with its caption in a text file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colour = COLOURS[number % len(COLOURS)]
        picture = Image.new("RGB", (48, 48), "white")
        ImageDraw.Draw(picture).rectangle((8, 8, 20 + number, 20 + number), fill=colour)
        picture.save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a {colour} square")
    return folder


def tiny_settings(work: Path) -> dict[str, Any]:
    """Settings as a configuration file has them. The model has random weights and needs no download."""
    pictures = draw_pictures(work / "pictures")
    return {
        "run": {"name": "example", "output_dir": str(work / "runs")},
        "model": {"family": "wan2.2", "path": "tiny"},
        "datasets": [{"id": "squares", "instance_data_dir": str(pictures), "resolution": 32, "bucket_step": 16}],
        "arena": {"home": str(work / "arenas")},
        "train": {"batch_size": 2, "max_steps": 40, "mixed_precision": "fp32"},
        "adapter": {"rank": 2},
        "validation": {"at_start": False, "at_end": False},
    }
