"""Defaults of SimpleTuner and ai-toolkit that change the training and differ from ours.

A key that a file leaves out gets our default, as it always has; a note lists the differences, so that they can be set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supertuner.config.dialects.dialect_keys import AI_TOOLKIT, SIMPLETUNER
from supertuner.config.families import FAMILIES
from supertuner.core.types import JSON

HOST_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    SIMPLETUNER: {
        "optimizer.learning_rate": "4e-7",
        "train.batch_size": "4",
        "train.gradient_checkpointing": "true",
        "train.max_grad_value": "2.0",
        "adapter.dropout": "0.1",
        "objective.shift": "3.0",
    },
    AI_TOOLKIT: {
        "optimizer.learning_rate": "1e-6",
        "train.gradient_checkpointing": "true",
        "train.max_grad_norm": "1.0",
        "objective.shift": "1.0",
    },
}
"""Our settings, with the values that the program uses if its file does not set them."""
EQUIVALENTS: Final = {"train.max_grad_value": "train.max_grad_norm"}
"""Settings that another one replaces."""


def differing_defaults(dialect: str, settings: Mapping[str, JSON]) -> str:
    """The message about the defaults of a program that a file with these settings leaves out; "" if there are none."""
    family = FAMILIES.get(str(settings.get("model.family")))
    unused = set() if family is None or family.has_flow_matching else {"objective.shift"}
    if settings.get("adapter.type", "lora") != "lora":
        unused.add("adapter.dropout")
    missing = [
        f"{name} {value}"
        for name, value in HOST_DEFAULTS[dialect].items()
        if name not in {*settings, *unused} and EQUIVALENTS.get(name) not in settings
    ]
    if not missing:
        return ""
    return f"this file leaves them to {dialect}, and they differ here; to train as there, set {', '.join(missing)}"
