"""The GH200 forks' keys in torch's allocator variables: they become settings, and are removed from the text for torch.

A text is `key:value,key:value`, where a value may hold commas inside brackets. Stock torch refuses the forks' keys when
CUDA is initialized; torch's own keys stay exactly as written. Pure: the environment is neither read nor changed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supertuner.config.sources.problems import closest_match

ALLOC_CONF_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older and the newer name; if both hold a key, the newer one wins."""

SETTING_BY_KEY: Final[Mapping[str, str]] = {
    "use_uvm": "memory.overflow.enabled",
    "uvm_oversubscription_ratio": "memory.overflow.oversubscription_ratio",
    "uvm_access_pattern": "memory.overflow.access_pattern",
}
"""The forks' keys, and their settings."""

MEMORY_FRACTION_KEY: Final = "per_process_memory_fraction"


@dataclass(frozen=True, slots=True)
class AllocConfEntry:
    """One `key:value`; the value is None if there is no colon."""

    key: str
    value: str | None
    source_text: str

    @property
    def is_uvm_key(self) -> bool:
        """Whether it is a key of the forks, known or not; torch has no keys with these prefixes."""
        return self.key.startswith(("uvm_", "use_uvm"))


def parse_entries(text: str) -> list[AllocConfEntry]:
    """The entries of a text, in order. A comma inside brackets does not separate entries."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    entries = []
    for part in parts:
        key, colon, value = part.partition(":")
        if part.strip():
            entries.append(AllocConfEntry(key.strip(), value.strip() if colon else None, part))
    return entries


def strip_uvm_keys(text: str) -> str:
    """The text without the forks' keys, for stock torch; unchanged if it has none."""
    entries = parse_entries(text)
    kept = [entry.source_text for entry in entries if not entry.is_uvm_key]
    return text if len(kept) == len(entries) else ",".join(kept)


def memory_fraction(text: str) -> str | None:
    """The value of torch's per_process_memory_fraction, as text; None if it is not set."""
    return next((entry.value for entry in reversed(parse_entries(text)) if entry.key == MEMORY_FRACTION_KEY), None)


def alloc_conf_problems(text: str) -> Sequence[str]:
    """The problems of the forks' keys in the text, each starting with the key."""
    problems = []
    for entry in parse_entries(text):
        if entry.is_uvm_key and entry.key not in SETTING_BY_KEY:
            suggestion = closest_match(entry.key, list(SETTING_BY_KEY))
            known = f"did you mean {suggestion}?" if suggestion else f"known here: {', '.join(SETTING_BY_KEY)}"
            problems.append(f"{entry.key}: not a setting; {known}")
        elif entry.is_uvm_key and not entry.value:
            problems.append(f"{entry.key}: has no value; write {entry.key}:value")
    fraction = memory_fraction(text)
    uvm_values = [(entry.value or "").lower() for entry in parse_entries(text) if entry.key == "use_uvm"]
    if fraction is not None and {"true", "1"} & set(uvm_values):
        problems.append(
            f"{MEMORY_FRACTION_KEY}: {fraction} cannot be used with use_uvm, because it also counts spilled memory; "
            "keep one of the two"
        )
    return problems
