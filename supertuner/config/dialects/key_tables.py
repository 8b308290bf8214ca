"""Lookups in the tables of dialect keys: keys of a run, keys of a dataset, and the dialect of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from supertuner.config.dialects.dataset_keys import DATASET_KEYS, INHERITED_ROOT_KEYS
from supertuner.config.dialects.dialect_keys import DialectKey
from supertuner.config.dialects.run_keys import RUN_KEYS


@cache
def run_keys() -> Mapping[str, DialectKey]:
    """The rows for keys outside datasets, by path."""
    return {row.key: row for row in RUN_KEYS}


@cache
def dataset_keys(dialect: str) -> Mapping[str, DialectKey]:
    """The rows for a dataset of `dialect` ("" if the dialect is unknown), by path."""
    table = {row.key: row for row in DATASET_KEYS if not row.in_dialect_only}
    return table | {row.key: row for row in DATASET_KEYS if row.in_dialect_only and row.dialect == dialect}


def inherited_keys() -> Mapping[str, tuple[str, str]]:
    """Root keys that datasets inherit → (dialect, key in the dataset)."""
    return {name: (dialect, inner) for dialect, table in INHERITED_ROOT_KEYS.items() for name, inner in table.items()}


def detect_dialect(entry: Mapping[str, object]) -> str:
    """The dialect of a dataset entry, by its first key that only one dialect has; "" if there is none."""
    names = [name for name in entry if name not in ("type", "crop", "audio")]
    rows = (row for name in names for key, row in dataset_keys("").items() if key == name or key.startswith(f"{name}."))
    return next((row.dialect for row in rows), "")
