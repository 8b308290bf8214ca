"""Where samples come from; `open_source` looks at a dataset's folder and says what it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from supertuner.config.settings.data import Captions, Dataset
from supertuner.core.errors import SourceError
from supertuner.core.types import MediaKind
from supertuner.data.probe.sniff import EXTENSIONS
from supertuner.data.sources.folder import FolderSource
from supertuner.data.sources.huggingface import HuggingFaceSource, is_saved_dataset
from supertuner.data.sources.listing import Source
from supertuner.data.sources.webdataset import WebDatasetSource

Format = Literal["folder", "webdataset", "huggingface"]


def open_source(dataset: Dataset) -> Source:
    """The source that a dataset's settings describe. Nothing is listed yet."""
    root = dataset.instance_data_dir
    if root is None:
        raise SourceError(f"datasets[{dataset.id}].instance_data_dir is not set; name the dataset's folder")
    if not root.exists():
        raise SourceError(f"datasets[{dataset.id}].instance_data_dir: {str(root)!r} does not exist")
    format = format_of(root) if dataset.format == "auto" else dataset.format
    if format == "folder" and not root.is_dir():
        raise SourceError(f"datasets[{dataset.id}].instance_data_dir: {str(root)!r} is neither a folder nor a .tar")
    makers: Mapping[str, Callable[[Path, MediaKind, Captions, int | None], Source]] = {
        "folder": FolderSource,
        "webdataset": WebDatasetSource,
        "huggingface": HuggingFaceSource,
    }
    return makers[format](root, dataset.dataset_type, dataset.captions, dataset.limit)


def format_of(root: Path) -> Format:
    """What a folder or file is: a saved dataset by its JSON, shards by being .tar without media beside them."""
    if root.is_file():
        return "webdataset" if root.suffix == ".tar" else "folder"
    if is_saved_dataset(root):
        return "huggingface"
    names = os.listdir(root)
    if not any(name.endswith(".tar") for name in names):
        return "folder"
    endings = {os.path.splitext(name)[1].lower() for name in names}
    return "folder" if endings & EXTENSIONS.keys() else "webdataset"
