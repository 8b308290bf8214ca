"""What each sample of a dataset counts in the loss: the dataset's own weight times the one that a file gives it."""

from __future__ import annotations

import math
import os

import numpy as np
from numpy.typing import NDArray

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.errors import SourceError
from supertuner.data.corpus import CorpusDataset
from supertuner.data.sources import metadata

MAX_WEIGHT = 1_000_000
"""As of `loss_weight`: fp32 turns what is far beyond into infinity, and the loss with it."""


def load_sample_weights(dataset: CorpusDataset) -> NDArray[np.float32] | None:
    """One number for each sample; None where all count 1. A sample that the file leaves out counts 1 there."""
    settings = dataset.settings
    if settings.loss_weights_file is None:
        weight_of_all = settings.loss_weight
        return None if weight_of_all == 1 else np.full(len(dataset.samples), weight_of_all, np.float32)
    file, key_path = settings.loss_weights_file, f"datasets[{settings.id}].loss_weights_file"
    columns = CaptionSettings(file_column=settings.captions.file_column, caption_column="weight")
    try:
        cells = metadata.parse_metadata(file, file.read_bytes(), columns).cells
    except OSError as error:
        raise SourceError(f"{key_path}: {file} cannot be read: {error.strerror}") from error
    except SourceError as error:
        requirement = f"it is a .jsonl, .csv or .parquet file with the columns {columns.file_column!r} and 'weight'"
        raise SourceError(f"{key_path}: {str(error).partition('; set captions.')[0]}; {requirement}") from error
    weight_by_key = {os.path.splitext(name)[0]: _parse_weight(values, name, key_path) for name, values in cells.items()}
    weights = np.ones(len(dataset.samples), np.float32)
    matched_count = 0
    for sample in range(len(weights)):
        if (weight := weight_by_key.get(dataset.samples.key(sample))) is not None:
            weights[sample], matched_count = weight, matched_count + 1
    if not matched_count:
        raise SourceError(f"{key_path}: no row of {file} names a sample, such as {dataset.samples.key(0)!r}")
    return weights * np.float32(settings.loss_weight)


def _parse_weight(cells: list[object], name: str, key_path: str) -> float:
    try:
        value = float(str(cells[0]))
    except ValueError:
        value = math.nan
    if len(set(map(str, cells))) > 1 or not (0 <= value <= MAX_WEIGHT):
        values_text = ", ".join(repr(cell) for cell in cells)
        raise SourceError(
            f"{key_path}: the weight of {name!r} is {values_text}; it is one number from 0 to {MAX_WEIGHT:,}"
        )
    return value
