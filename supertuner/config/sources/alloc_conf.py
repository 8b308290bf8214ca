"""The seeds' keys in torch's allocator variables: found among torch's own, given as settings, and taken out for torch.

A text is `key:value,key:value`, where a value may hold commas inside brackets. Stock torch refuses the seeds' keys when
CUDA starts; everything else in the text is torch's affair and stays exactly as it was written. Nothing here reads or
changes the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supertuner.config.problems import nearest

VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name and the newer one; where both give a key, the newer one wins."""

SETTINGS: Final[Mapping[str, str]] = {
    "use_uvm": "memory.overflow.enabled",
    "uvm_oversubscription_ratio": "memory.overflow.oversubscription_ratio",
    "uvm_access_pattern": "memory.overflow.access_pattern",
}
"""The seeds' keys, and the setting that each one gives."""

FRACTION: Final = "per_process_memory_fraction"


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key:value`; without a colon the value is None."""

    key: str
    value: str | None
    written: str

    @property
    def ours(self) -> bool:
        """Meant for unified memory, known or not: torch has no such key."""
        return self.key.startswith(("uvm_", "use_uvm"))


def entries(text: str) -> list[Entry]:
    """The parts of a text, in order; a comma inside brackets does not part."""
    found, part, depth = [], "", 0
    for letter in f"{text},":
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            if part.strip():
                key, colon, value = part.partition(":")
                found.append(Entry(key.strip(), value.strip() if colon else None, part))
            part = ""
        else:
            part += letter
    if part.strip(", "):  # a bracket that was never closed
        key, colon, value = part.removesuffix(",").partition(":")
        found.append(Entry(key.strip(), value.strip() if colon else None, part.removesuffix(",")))
    return found


def without_ours(text: str) -> str:
    """The text as stock torch may see it; unchanged where there is nothing of ours in it."""
    parts = entries(text)
    return text if not any(one.ours for one in parts) else ",".join(one.written for one in parts if not one.ours)


def memory_fraction(text: str) -> str | None:
    """The share of GPU memory that torch is told to keep to, as it is written."""
    return next((one.value for one in reversed(entries(text)) if one.key == FRACTION), None)


def wrong(text: str) -> Sequence[str]:
    """What is wrong with our part of the text, each with its key."""
    found = []
    for one in entries(text):
        if one.ours and one.key not in SETTINGS:
            guess = nearest(one.key, list(SETTINGS))
            known = f"did you mean {guess}?" if guess else f"known here: {', '.join(SETTINGS)}"
            found.append(f"{one.key}: not a setting; {known}")
        elif one.ours and not one.value:
            found.append(f"{one.key}: has no value; written {one.key}:value")
    fraction = memory_fraction(text)
    spills = any(one.key == "use_uvm" and (one.value or "").lower() in ("true", "1") for one in entries(text))
    if spills and fraction is not None:
        found.append(
            f"{FRACTION}: {fraction} together with use_uvm: it counts spilled memory as well; keep one of them"
        )
    return found
