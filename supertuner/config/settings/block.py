"""The base class of settings blocks: frozen, without unknown keys, checked for contradictions when created."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, create_model, model_validator
from pydantic_core import PydanticCustomError

CONTRADICTION: Final = "contradiction"
"""The type of the pydantic error that carries contradictions; the error's context holds them as `remarks`."""


def name_or_folder(*words: str) -> dict[str, Any]:
    """JSON Schema annotations of a text that is one of `words`, or the path of a folder, or another name."""
    return {"format": "name-or-folder", "words": list(words)}


@dataclass(frozen=True, slots=True)
class SettingsIssue:
    """A contradiction between settings that are valid individually, or a warning."""

    field: str
    """The setting to change, relative to its block; "" for the block as a whole."""
    message: str
    related_fields: tuple[str, ...] = ()
    """Other settings, relative to the block, that the issue depends on."""


class SettingsBlock(BaseModel):
    """A block of settings. The docstring below a field is its description in the JSON Schema and the docs."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False, allow_inf_nan=False
    )

    def contradictions(self) -> Iterator[SettingsIssue]:
        """Combinations of settings that cannot work; they make the configuration invalid."""
        yield from ()

    def warnings(self) -> Iterator[SettingsIssue]:
        """Settings that are valid, but unwise or without effect."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        contradictions = list(self.contradictions())
        if contradictions:
            text = "; ".join(f"{issue.field} {issue.message}" for issue in contradictions)
            raise PydanticCustomError(CONTRADICTION, "{text}", {"text": text, "remarks": contradictions})
        return self


Block = TypeVar("Block", bound=SettingsBlock)


def with_fields(fields: Mapping[str, tuple[Any, Any]]) -> Callable[[type[Block]], type[Block]]:
    """A decorator that adds fields (name → type and `Field`) at the end of a block, for settings that a table lists."""

    def extend(block: type[Block]) -> type[Block]:
        given: dict[str, Any] = {"__module__": block.__module__, "__doc__": block.__doc__, **fields}
        return create_model(block.__name__, __base__=block, **given)

    return extend
