"""The row type of the tables of dialect keys: a key of another program, and its answer here.

There are three answers: the key acts; it acts approximately, with a note that says how; it has no meaning here, with
the reason. A key of the third kind passes silently if its value asks for nothing (`ramtorch: false`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from supertuner.config.dialects.conversions import KeyConversion
from supertuner.core.types import JSON

SIMPLETUNER = "SimpleTuner"
AI_TOOLKIT = "ai-toolkit"
OFF_VALUES: Final[tuple[JSON, ...]] = (None, False, 0, "", "none", "None", [], {})
"""Values with which a key of another program asks for nothing."""


class KeyAnswer(StrEnum):
    ACTS = "acts"
    APPROXIMATE = "acts approximately"
    REASON = "has no meaning here"


@dataclass(frozen=True, slots=True)
class DialectKey:
    """A key of a dialect."""

    dialect: str
    key: str
    """Its path, relative to the root or to a dataset."""
    convert: KeyConversion | None = None
    """None if the key has no meaning here, whatever its value."""
    reason: str = ""
    """Why it has no meaning here."""
    approximation: str = ""
    """How its meaning here differs from that in the other program."""
    off_values: tuple[JSON, ...] = OFF_VALUES
    """Without a conversion: values that ask for nothing, and so need no note."""
    is_refused: bool = False
    """Without a conversion: other values are refused, because training would not do what the file is for."""
    in_dialect_only: bool = False
    """The key has another meaning in our own settings, so the row applies only if the dialect is known."""

    @property
    def answer(self) -> KeyAnswer:
        if self.reason:
            return KeyAnswer.REASON
        return KeyAnswer.APPROXIMATE if self.approximation else KeyAnswer.ACTS

    def is_off(self, value: JSON) -> bool:
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off_values)


def converted_keys(dialect: str, conversions: Mapping[str, KeyConversion], block: str = "") -> Iterator[DialectKey]:
    return (DialectKey(dialect, f"{block}.{key}".lstrip("."), convert) for key, convert in conversions.items())


def approximated_keys(
    dialect: str, approximation: str, conversions: Mapping[str, KeyConversion], block: str = ""
) -> Iterator[DialectKey]:
    """Keys that act approximately. The note is added whenever a conversion sets something."""
    return (
        DialectKey(dialect, f"{block}.{key}".lstrip("."), convert, approximation=approximation)
        for key, convert in conversions.items()
    )


def sometimes_ignored_keys(
    dialect: str, reason: str, conversions: Mapping[str, KeyConversion], block: str = ""
) -> Iterator[DialectKey]:
    """Keys that set nothing. The conversion decides, also by other keys, whether a value gets a note or is refused."""
    return (DialectKey(dialect, f"{block}.{key}".lstrip("."), convert, reason) for key, convert in conversions.items())


def ignored_keys(
    dialect: str, reason: str, names: str, block: str = "", off: tuple[JSON, ...] = OFF_VALUES
) -> Iterator[DialectKey]:
    """Keys that have no meaning here; they get a note, except with a value of `off`."""
    return (DialectKey(dialect, f"{block}.{name}".lstrip("."), reason=reason, off_values=off) for name in names.split())


def refused_keys(
    dialect: str, reason: str, names: str, block: str = "", off: tuple[JSON, ...] = OFF_VALUES
) -> Iterator[DialectKey]:
    """Keys that are refused, except with a value of `off`."""
    return (
        DialectKey(dialect, f"{block}.{name}".lstrip("."), reason=reason, off_values=off, is_refused=True)
        for name in names.split()
    )
