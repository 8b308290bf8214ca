"""The row type of the tables of dialect keys: a key of another program, and its conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from supertuner.config.dialects.conversions import KeyConversion

SIMPLETUNER = "SimpleTuner"
AI_TOOLKIT = "ai-toolkit"


@dataclass(frozen=True, slots=True)
class DialectKey:
    """A key of a dialect."""

    dialect: str
    key: str
    """Its path, relative to the root or to a dataset."""
    convert: KeyConversion | None = None
    """None if the key has no effect."""
    ignored_reason: str = ""
    """Why it has no effect."""
    in_dialect_only: bool = False
    """The key has another meaning in our own settings, so the row applies only if the dialect is known."""


def converted_keys(dialect: str, conversions: Mapping[str, KeyConversion], block: str = "") -> Iterator[DialectKey]:
    return (DialectKey(dialect, f"{block}.{key}".lstrip("."), convert) for key, convert in conversions.items())


def ignored_keys(dialect: str, reason: str, names: str, block: str = "") -> Iterator[DialectKey]:
    return (DialectKey(dialect, f"{block}.{name}".lstrip("."), ignored_reason=reason) for name in names.split())
