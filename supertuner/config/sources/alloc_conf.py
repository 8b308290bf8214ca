"""The seeds' keys in torch's allocator variables: found among torch's own, given as settings, and taken out for torch.

A text is `key:value,key:value`, where a value may hold commas inside brackets. Stock torch refuses the seeds' keys when
CUDA starts; everything else in the text is torch's affair and stays exactly as it was written. Nothing here reads or
changes the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supertuner.config.sources.problems import closest_match

ALLOC_CONF_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name and the newer one; where both give a key, the newer one wins."""

SETTING_BY_KEY: Final[Mapping[str, str]] = {
    "use_uvm": "memory.overflow.enabled",
    "uvm_oversubscription_ratio": "memory.overflow.oversubscription_ratio",
    "uvm_access_pattern": "memory.overflow.access_pattern",
}
"""The seeds' keys, and the setting that each one gives."""

MEMORY_FRACTION_KEY: Final = "per_process_memory_fraction"


@dataclass(frozen=True, slots=True)
class AllocConfEntry:
    """One `key:value`; without a colon the value is None."""

    key: str
    value: str | None
    source_text: str

    @property
    def is_uvm_key(self) -> bool:
        """Meant for unified memory, known or not: torch has no such key."""
        return self.key.startswith(("uvm_", "use_uvm"))


def parse_entries(text: str) -> list[AllocConfEntry]:
    """The parts of a text, in order; a comma inside brackets does not part."""
    parsed, part, depth = [], "", 0
    for letter in f"{text},":
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            if part.strip():
                key, colon, value = part.partition(":")
                parsed.append(AllocConfEntry(key.strip(), value.strip() if colon else None, part))
            part = ""
        else:
            part += letter
    if part.strip(", "):  # a bracket that was never closed
        key, colon, value = part.removesuffix(",").partition(":")
        parsed.append(AllocConfEntry(key.strip(), value.strip() if colon else None, part.removesuffix(",")))
    return parsed


def strip_uvm_keys(text: str) -> str:
    """The text as stock torch may see it; unchanged where there is nothing of ours in it."""
    parts = parse_entries(text)
    return (
        text
        if not any(entry.is_uvm_key for entry in parts)
        else ",".join(one.source_text for one in parts if not one.is_uvm_key)
    )


def memory_fraction(text: str) -> str | None:
    """The share of GPU memory that torch is told to keep to, as it is written."""
    return next((entry.value for entry in reversed(parse_entries(text)) if entry.key == MEMORY_FRACTION_KEY), None)


def alloc_conf_problems(text: str) -> Sequence[str]:
    """What is wrong with our part of the text, each with its key."""
    problems = []
    for entry in parse_entries(text):
        if entry.is_uvm_key and entry.key not in SETTING_BY_KEY:
            suggestion = closest_match(entry.key, list(SETTING_BY_KEY))
            known = f"did you mean {suggestion}?" if suggestion else f"known here: {', '.join(SETTING_BY_KEY)}"
            problems.append(f"{entry.key}: not a setting; {known}")
        elif entry.is_uvm_key and not entry.value:
            problems.append(f"{entry.key}: has no value; written {entry.key}:value")
    fraction = memory_fraction(text)
    uvm_enabled = any(
        one.key == "use_uvm" and (one.value or "").lower() in ("true", "1") for one in parse_entries(text)
    )
    if uvm_enabled and fraction is not None:
        problems.append(
            f"{MEMORY_FRACTION_KEY}: {fraction} together with use_uvm: it counts spilled memory as well; keep one of them"
        )
    return problems
