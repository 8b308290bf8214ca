"""The tables of foreign names by what is looked up in them: a root's keys, a dataset's, and whose dataset it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from supertuner.config.dialects.dataset import DATASET, FOR_ALL_DATASETS
from supertuner.config.dialects.rows import AI_TOOLKIT, SIMPLETUNER, Row
from supertuner.config.dialects.run import RUN

__all__ = ["AI_TOOLKIT", "DATASET", "RUN", "SIMPLETUNER", "Row", "dataset_rows", "dialect_of", "inherited", "run_rows"]


@cache
def run_rows() -> Mapping[str, Row]:
    """Rows of the root by their written path."""
    return {row.written: row for row in RUN}


@cache
def dataset_rows(dialect: str) -> Mapping[str, Row]:
    """Rows of a dataset entry that is read as `dialect` ("" where none is certain)."""
    table = {row.written: row for row in DATASET if not row.in_dialect_only}
    return table | {row.written: row for row in DATASET if row.in_dialect_only and row.dialect == dialect}


def inherited() -> Mapping[str, tuple[str, str]]:
    """Root keys that datasets inherit → (dialect, the name in the dataset)."""
    return {name: (dialect, inner) for dialect, table in FOR_ALL_DATASETS.items() for name, inner in table.items()}


def dialect_of(entry: Mapping[str, object]) -> str:
    """Whose dataset entry this is, by the first key that only one dialect has; "" if there is none."""
    shared = {"type", "crop", "audio"}
    rows = dataset_rows("")
    for name in entry:
        if name not in shared:
            for written, row in rows.items():
                if written == name or written.startswith(f"{name}."):
                    return row.dialect
    return ""
