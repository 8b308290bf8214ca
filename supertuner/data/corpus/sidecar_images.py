"""Masks and reference images: files in another folder with the samples' names, checked before the run needs them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.decode import raising_broken_media
from supertuner.data.probe import probe
from supertuner.data.sources.walk import walk_folder


def list_sidecar_images(key_path: str, directory: Path) -> tuple[str, dict[str, str]]:
    """The real path of the folder that the setting `key_path` names, and its images: sample's name → file name."""
    folder = os.path.realpath(directory)
    if not os.path.isdir(folder):
        raise SourceError(f"{key_path}: {directory} is not a folder")
    return folder, {key: name for key, name, _, _ in walk_folder(folder, MediaKind.IMAGE, ".txt").media}


def read_image_size(label: str, file: str) -> tuple[int, int]:
    """Width and height of an image, from its header. Raises BrokenMediaError, with `label`, if it is not an image."""
    try:
        with (
            open(file, "rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as payload,
            raising_broken_media(label),
        ):
            info = probe(payload, MediaKind.IMAGE)
    except (OSError, ValueError) as error:  # mapping an empty file raises ValueError
        raise BrokenMediaError(f"{label}: cannot be read: {error}") from error
    return info.width, info.height
