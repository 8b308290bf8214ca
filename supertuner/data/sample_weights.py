"""What each sample of a dataset counts in the loss: the dataset's own weight times the one that a file gives it."""

from __future__ import annotations

import math
import os

import numpy as np
from numpy.typing import NDArray

from supertuner.config.settings.data import Captions
from supertuner.core.errors import SourceError
from supertuner.data.corpus import Part
from supertuner.data.sources import metadata

HIGHEST = 1_000_000
"""As of `loss_weight`: fp32 turns what is far beyond into infinity, and the loss with it."""


def weights_of(part: Part) -> NDArray[np.float32] | None:
    """One number for each sample; None where all count 1. A sample that the file leaves out counts 1 there."""
    settings = part.settings
    if settings.loss_weights_file is None:
        same = settings.loss_weight
        return None if same == 1 else np.full(len(part.samples), same, np.float32)
    file, place = settings.loss_weights_file, f"datasets[{settings.id}].loss_weights_file"
    columns = Captions(file_column=settings.captions.file_column, caption_column="weight")
    try:
        cells = metadata.rows(file, file.read_bytes(), columns).cells
    except OSError as error:
        raise SourceError(f"{place}: {file} cannot be read: {error.strerror}") from error
    except SourceError as error:
        needed = f"it is a .jsonl, .csv or .parquet file with the columns {columns.file_column!r} and 'weight'"
        raise SourceError(f"{place}: {str(error).partition('; set captions.')[0]}; {needed}") from error
    given = {os.path.splitext(name)[0]: _number(values, name, place) for name, values in cells.items()}
    weights = np.ones(len(part.samples), np.float32)
    found = 0
    for number in range(len(weights)):
        if (one := given.get(part.samples.key(number))) is not None:
            weights[number], found = one, found + 1
    if not found:
        raise SourceError(f"{place}: no row of {file} names a sample, such as {part.samples.key(0)!r}")
    return weights * np.float32(settings.loss_weight)


def _number(cells: list[object], name: str, place: str) -> float:
    try:
        value = float(str(cells[0]))
    except ValueError:
        value = math.nan
    if len(set(map(str, cells))) > 1 or not (0 <= value <= HIGHEST):
        said = ", ".join(repr(cell) for cell in cells)
        raise SourceError(f"{place}: the weight of {name!r} is {said}; it is one number from 0 to {HIGHEST:,}")
    return value
