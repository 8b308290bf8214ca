"""The lines of losses.jsonl (one per optimizer step) and validation.jsonl (held-out losses): their format and readers.

Both files can be read while the run appends to them: a last line without its newline is not returned. They are read
line by line, so that a log of any length takes little memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from supertuner.core.errors import RunFolderError
from supertuner.core.types import JSON
from supertuner.sinks.training_events import StepRecord

LOSSES_FILE = "losses.jsonl"
HELD_OUT_FILE = "validation.jsonl"
FLOAT_FIELDS = ("loss", "grad_norm", "rate")
"""Fields of a `StepRecord` that may be NaN or infinite. JSON has no such numbers, so the line holds null for them, and
`not_finite` holds their values as text."""

_MAX_LINE_BYTES = 1 << 20
"""A longer line is invalid, and is not read as a whole."""

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class HeldOutRecord:
    """One line of validation.jsonl."""

    step: int
    expert: str | None
    """None: the mean over all experts."""
    sigma: float | None
    """None: the mean over the noise levels."""
    loss: float | None
    """None if it was not finite."""


def encode_step(record: StepRecord) -> bytes:
    """A line of losses.jsonl. Numbers are written as Python's repr, which reads back to the same bits."""
    fields: dict[str, JSON] = {name: getattr(record, name) for name in record.__slots__}
    not_finite = {name: str(value) for name in FLOAT_FIELDS if not _is_finite(value := fields[name])}
    for name in not_finite:
        fields[name] = None
    if not_finite:
        fields["not_finite"] = not_finite
    return (json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n").encode()


def iterate_losses(path: Path) -> Iterator[StepRecord]:
    """The complete lines of a losses.jsonl, one after the other; none if there is no file. Raises RunFolderError at an
    invalid line."""
    return _read_lines(path, _parse_step)


def read_losses(path: Path) -> list[StepRecord]:
    """All of `iterate_losses`."""
    return list(iterate_losses(path))


def read_held_out_losses(path: Path) -> list[HeldOutRecord]:
    """The complete lines of a validation.jsonl; none if there is no file. Raises RunFolderError at an invalid line."""
    return list(_read_lines(path, _parse_held_out))


def _read_lines(path: Path, parse: Callable[[bytes], _Record]) -> Iterator[_Record]:
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number in count(1):
            line = lines.readline(_MAX_LINE_BYTES)
            if len(line) < _MAX_LINE_BYTES and not line.endswith(b"\n"):
                return  # the end, or a line that is still being written
            try:
                yield parse(line)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                problem = f"{path}, line {number} is not a line of a loss log ({error})"
                raise RunFolderError(f"{problem}; remove that line") from error


def _parse_step(line: bytes) -> StepRecord:
    fields = json.loads(line)
    fields.update({name: float(text) for name, text in fields.pop("not_finite", {}).items()})
    _require_types(fields, _STEP_TYPES)
    return StepRecord(**fields)


def _parse_held_out(line: bytes) -> HeldOutRecord:
    fields = json.loads(line)
    _require_types(fields, _HELD_OUT_TYPES)
    return HeldOutRecord(fields["step"], fields["expert"], fields["level"], fields["loss"])


_Types = Mapping[str, type | UnionType]
_STEP_TYPES: _Types = {
    "step": int, "samples": int, "window": int, "expert": str,
    "loss": int | float, "grad_norm": int | float | None, "rate": int | float,
}  # fmt: skip
_HELD_OUT_TYPES: _Types = {"step": int, "expert": str | None, "level": int | float | None, "loss": int | float | None}


def _require_types(fields: Mapping[str, Any], types: _Types) -> None:
    for name, allowed_types in types.items():
        value = fields[name]
        if not isinstance(value, allowed_types) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}")


def _is_finite(value: JSON) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
