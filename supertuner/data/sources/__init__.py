"""Sources of samples: folders, WebDataset shards, Hugging Face datasets; `open_source` detects the format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from supertuner.config.settings.data import CaptionSettings, DatasetSettings
from supertuner.core.errors import SourceError
from supertuner.core.types import MediaKind
from supertuner.data.probe.sniff import KIND_BY_EXTENSION
from supertuner.data.sources.folder import FolderSource
from supertuner.data.sources.huggingface import HuggingFaceSource, is_saved_dataset, parquet_files
from supertuner.data.sources.listing import DataSource
from supertuner.data.sources.webdataset import WebDatasetSource

SourceFormat = Literal["folder", "webdataset", "huggingface"]


def open_source(dataset: DatasetSettings) -> DataSource:
    """The source that a dataset's settings describe. Does not list it. Raises SourceError if the folder is missing."""
    root = dataset.instance_data_dir
    if root is None:
        raise SourceError(f"datasets[{dataset.id}].instance_data_dir is not set; set it to the dataset's folder")
    if not root.exists():
        raise SourceError(f"datasets[{dataset.id}].instance_data_dir: {str(root)!r} does not exist")
    format = detect_source_format(root) if dataset.format == "auto" else dataset.format
    if format == "folder" and not root.is_dir():
        raise SourceError(f"datasets[{dataset.id}].instance_data_dir: {str(root)!r} is neither a folder nor a .tar")
    source_types: Mapping[str, Callable[[Path, MediaKind, CaptionSettings, int | None], DataSource]] = {
        "folder": FolderSource,
        "webdataset": WebDatasetSource,
        "huggingface": HuggingFaceSource,
    }
    return source_types[format](root, dataset.dataset_type, dataset.captions, dataset.limit)


def _has_media(root: Path) -> bool:
    """Whether a folder, or one below it, has a file with the extension of an image, video or sound."""
    return any(path.suffix.lower() in KIND_BY_EXTENSION for path in root.rglob("*"))


def detect_source_format(root: Path) -> SourceFormat:
    """The format of a folder or file: Hugging Face by its JSON files, WebDataset if it has .tar files and no media."""
    if root.is_file():
        return "webdataset" if root.suffix == ".tar" else "folder"
    if is_saved_dataset(root):
        return "huggingface"
    names = os.listdir(root)
    if not any(name.endswith(".tar") for name in names):
        return "huggingface" if parquet_files(root) and not _has_media(root) else "folder"
    endings = {os.path.splitext(name)[1].lower() for name in names}
    return "folder" if endings & KIND_BY_EXTENSION.keys() else "webdataset"
