"""What the tables of foreign names are made of: one row per key, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from supertuner.config.dialects.conversions import KeyConversion

SIMPLETUNER = "SimpleTuner"
AI_TOOLKIT = "ai-toolkit"


@dataclass(frozen=True, slots=True)
class DialectKey:
    """One foreign key, its path relative to the root or to a dataset."""

    dialect: str
    key: str
    convert: KeyConversion | None = None
    ignored_reason: str = ""
    """Why it has no effect here, for a key that has none."""
    in_dialect_only: bool = False
    """The key means something else in our own tree: the row counts only where the dialect is certain."""


def converted_keys(dialect: str, conversions: Mapping[str, KeyConversion], block: str = "") -> Iterator[DialectKey]:
    return (DialectKey(dialect, f"{block}.{key}".lstrip("."), convert) for key, convert in conversions.items())


def ignored_keys(dialect: str, reason: str, names: str, block: str = "") -> Iterator[DialectKey]:
    return (DialectKey(dialect, f"{block}.{name}".lstrip("."), ignored_reason=reason) for name in names.split())
