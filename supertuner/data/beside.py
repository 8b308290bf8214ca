"""Pictures that lie in another folder under the samples' names: looked at before a run that reads them hours later."""

from __future__ import annotations

import mmap

from supertuner.core.errors import BrokenMedia
from supertuner.core.types import MediaKind
from supertuner.data.decode import broken_means
from supertuner.data.probe import probe


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
