"""A tiny Qwen-Image-Edit pipeline: the tiny Qwen-Image with what its text encoder needs to see pictures."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import Qwen2VLImageProcessorPil

from supertuner.models.families.qwen_image.tiny import TinyQwen, build_pipeline
from supertuner.models.library_logging import quiet_libraries
from supertuner.models.pipeline_files import INDEX_NAME


def write_pipeline(folder: Path, sizes: TinyQwen, seed: int) -> None:
    """A folder like those on the hub. Its index is written by hand: the processor's class wants torchvision."""
    pipeline = build_pipeline(sizes, seed)
    with quiet_libraries():
        pipeline.save_pretrained(folder)
        pipeline.tokenizer.save_pretrained(folder / "processor")
        Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 1280).save_pretrained(folder / "processor")
    index = json.loads((folder / INDEX_NAME).read_bytes())
    index |= {"_class_name": "QwenImageEditPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_tiny_pipeline(folder: Path, seed: int) -> None:
    write_pipeline(folder, TinyQwen(), seed)
