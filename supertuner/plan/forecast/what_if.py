"""Forecasts of a run with other values of one setting, side by side: `train.batch_size=1,2,4`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import OptionError

if TYPE_CHECKING:
    from supertuner.plan.forecast.forecast import RunEstimate

WHAT_IF_PATTERN = re.compile(r"\s*(?P<key>[^=]+?)\s*=\s*(?P<values>.+)")


@dataclass(frozen=True, eq=False, slots=True)
class WhatIfResult:
    """The estimate with one value of the setting."""

    value: str
    estimate: RunEstimate
    current: bool
    """True: the configuration has this value."""


@dataclass(frozen=True, eq=False, slots=True)
class WhatIfComparison:
    """The estimates with each value of one setting."""

    key: str
    results: tuple[WhatIfResult, ...]


def compare_values(
    key: str, configs: Mapping[str, RunConfig], current: RunConfig, estimate: Callable[[RunConfig], RunEstimate]
) -> WhatIfComparison:
    """The estimates of `configs` (value of the setting → configuration with it), beside the configured one."""
    results = tuple(WhatIfResult(value, estimate(config), config == current) for value, config in configs.items())
    return WhatIfComparison(key, results)


def parse_what_if(text: str) -> tuple[str, list[str]]:
    """The setting and its values from `train.batch_size=1,2,4`. Commas inside brackets belong to a value.

    Raises OptionError if `text` has no `=` or an empty value.
    """
    match = WHAT_IF_PATTERN.fullmatch(text)
    if match is None:
        raise OptionError(f"--what-if {text}: write key=value,value, for example train.batch_size=1,2,4,8")
    values, depth = [""], 0
    for character in match["values"]:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    stripped = [value.strip() for value in values]
    if not all(stripped):
        raise OptionError(f"--what-if {text}: a value is missing between two commas")
    return match["key"], list(dict.fromkeys(stripped))
