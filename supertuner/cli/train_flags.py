"""The seeds' way to start training, `--config FILE --max_train_steps 10`, in the words of `supertuner train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

CONFIG_FLAG = "--config"
VALUE_FLAGS = ("--set", "--resume", "--limit")
"""Options of `supertuner train` that take a value; they are passed on as they are."""
SWITCH_FLAGS = ("--anyway", "--help")
VALUELESS_SETTINGS = ("enable_manual_validation",)
"""Flags that never take a value: what follows is not theirs."""


def translate_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `supertuner` that mean the same. A flag that is none of ours is a setting, in our words or
    SimpleTuner's: `--max_train_steps 10` is `--set max_train_steps=10`, and is refused as that would be."""
    return ["train", *_translate(list(arguments))]


def _translate(remaining: list[str]) -> Iterator[str]:
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not name.startswith("--") or name in SWITCH_FLAGS:
            yield name + equals + value
            continue
        setting = name.removeprefix("--").replace("-", "_")
        if not equals and setting not in VALUELESS_SETTINGS and remaining and not _is_flag(remaining[0]):
            equals, value = "=", remaining.pop(0)
        if name == CONFIG_FLAG:
            yield from [value] if equals else []  # without a file, `supertuner train` says what is missing
        elif name in VALUE_FLAGS:
            yield from (name, value) if equals else (name,)
        else:
            yield from ("--set", f"{setting}={value if equals else 'true'}")


def _is_flag(text: str) -> bool:
    """`-1` is a value."""
    return text.startswith("-") and not text[1:].replace(".", "", 1).isdecimal()
