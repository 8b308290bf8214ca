"""What every block of settings is: frozen, closed to unknown keys, and checked for contradictions at birth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

CONTRADICTION: Final = "contradiction"
"""The error type under which contradictions travel through pydantic; their list is in the error's context."""


def name_or_folder(*words: str) -> dict[str, Any]:
    """Marks a text that is one of `words`, or a folder, found like every path, or else some other name."""
    return {"format": "name-or-folder", "words": list(words)}


@dataclass(frozen=True, slots=True)
class SettingsIssue:
    """Something about settings that are fine one by one: a contradiction, or something unwise."""

    field: str
    """The key to change, relative to its block; empty for the block as a whole."""
    message: str
    related_fields: tuple[str, ...] = ()
    """Other keys of the block that the remark rests on."""


class SettingsBlock(BaseModel):
    """A block of settings. Fields are documented under themselves; the text goes into the JSON Schema."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False, allow_inf_nan=False
    )

    def contradictions(self) -> Iterator[SettingsIssue]:
        """What cannot work: refused."""
        yield from ()

    def warnings(self) -> Iterator[SettingsIssue]:
        """What works and is unwise: warned about."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        contradictions = list(self.contradictions())
        if contradictions:
            text = "; ".join(f"{issue.field} {issue.message}" for issue in contradictions)
            raise PydanticCustomError(CONTRADICTION, "{text}", {"text": text, "remarks": contradictions})
        return self
