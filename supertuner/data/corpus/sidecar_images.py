"""Pictures that lie in another folder under the samples' names: looked at before a run that reads them hours later."""

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
    """The folder that the setting `place` names, and its pictures: by the name of their sample, their own."""
    folder = os.path.realpath(directory)
    if not os.path.isdir(folder):
        raise SourceError(f"{key_path}: {directory} is not a folder")
    return folder, {key: name for key, name, _, _ in walk_folder(folder, MediaKind.IMAGE, ".txt").media}


def read_image_size(label: str, file: str) -> tuple[int, int]:
    """Width and height of a picture by its header and structure; a BrokenMedia, with `name`, of a file that is none."""
    try:
        with (
            open(file, "rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as payload,
            raising_broken_media(label),
        ):
            info = probe(payload, MediaKind.IMAGE)
    except (OSError, ValueError) as error:  # a mapping of nothing is a ValueError
        raise BrokenMediaError(f"{label}: cannot be read: {error}") from error
    return info.width, info.height
