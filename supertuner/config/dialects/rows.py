"""What the tables of foreign names are made of: one row per key, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from supertuner.config.dialects.conversions import Convert

SIMPLETUNER = "SimpleTuner"
AI_TOOLKIT = "ai-toolkit"


@dataclass(frozen=True, slots=True)
class Row:
    """One foreign key, its path relative to the root or to a dataset."""

    dialect: str
    written: str
    convert: Convert | None = None
    why: str = ""
    """Why it has no effect here, for a key that has none."""
    in_dialect_only: bool = False
    """The key means something else in our own tree: the row counts only where the dialect is certain."""


def rows(dialect: str, table: Mapping[str, Convert], block: str = "") -> Iterator[Row]:
    return (Row(dialect, f"{block}.{written}".lstrip("."), convert) for written, convert in table.items())


def without_effect(dialect: str, why: str, names: str, block: str = "") -> Iterator[Row]:
    return (Row(dialect, f"{block}.{name}".lstrip("."), why=why) for name in names.split())
