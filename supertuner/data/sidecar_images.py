"""Pictures that lie in another folder under the samples' names: looked at before a run that reads them hours later."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from supertuner.core.errors import BrokenMedia, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.decode import broken_means
from supertuner.data.probe import probe
from supertuner.data.sources.walk import walk


def pictures_in(place: str, given: Path) -> tuple[str, dict[str, str]]:
    """The folder that the setting `place` names, and its pictures: by the name of their sample, their own."""
    folder = os.path.realpath(given)
    if not os.path.isdir(folder):
        raise SourceError(f"{place}: {given} is not a folder")
    return folder, {key: name for key, name, _, _ in walk(folder, MediaKind.IMAGE, ".txt").media}


def size_of(name: str, file: str) -> tuple[int, int]:
    """Width and height of a picture by its header and structure; a BrokenMedia, with `name`, of a file that is none."""
    try:
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as payload,
            broken_means(name),
        ):
            facts = probe(payload, MediaKind.IMAGE)
    except (OSError, ValueError) as error:  # a mapping of nothing is a ValueError
        raise BrokenMedia(f"{name}: cannot be read: {error}") from error
    return facts.width, facts.height
