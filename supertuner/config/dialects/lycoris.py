"""Converts SimpleTuner's LyCORIS file (`lycoris_config`): algorithm, rank, alpha, factor and targets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from supertuner.config.dialects.conversions import (
    ConversionNote,
    ConversionOutcome,
    InvalidValue,
    SettingValue,
    not_available,
)
from supertuner.config.settings.values import format_value
from supertuner.core.types import JSON

ALGORITHMS: Final = {"lora": "locon", "locon": "locon", "loha": "loha", "lokr": "lokr", "full": "diff"}
FULL_MATRIX_DIM: Final = 10_000
"""With LoKr, a `linear_dim` of at least this asks for full matrices."""
TARGET_PRESETS: Final = {("Attention",): "attention", ("Attention", "FeedForward"): "attention_mlp"}
"""Classes of modules, sorted → preset."""
_NO_EFFECT: Final = "has no effect: there is no such option"
_NO_PRESET: Final = "has no effect: use adapter.targets for layers and adapter.modules for their ranks"
_FULL_STRENGTH: Final = "an adapter is trained at full strength, 1"
_SWITCHES: Final = {"full_matrix": "adapter.lokr_full_matrix", "rs_lora": "adapter.rslora"}


def convert_lycoris_config(tree: Mapping[str, JSON]) -> Iterator[tuple[str, ConversionOutcome]]:
    """The outcome for each key of the file. A missing rank or alpha gets LyCORIS's default."""
    sizes: dict[str, JSON] = {"linear_dim": 4, "linear_alpha": 1}
    for name, value in {"algo": "lora", **sizes, **tree}.items():
        if name == "algo":
            yield name, _convert_algorithm(value)
        elif name in sizes and tree.get("algo") == "full":
            continue  # full weights have neither
        elif name == "linear_dim":
            full_matrix = isinstance(value, int) and value >= FULL_MATRIX_DIM and tree.get("algo") == "lokr"
            setting, size = ("lokr_full_matrix", True) if full_matrix else ("rank", value)
            yield name, SettingValue(f"adapter.{setting}", size)
        elif name == "linear_alpha":
            if value:
                yield name, SettingValue("adapter.alpha", value)
        elif name == "factor" and tree.get("algo") == "lokr":
            yield name, SettingValue("adapter.lokr_factor", value)
        elif name == "dropout":
            yield name, SettingValue("adapter.dropout", value or 0.0)
        elif name in _SWITCHES:
            yield name, SettingValue(_SWITCHES[name], value)
        elif name == "apply_preset" and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", outcome) for key, outcome in _convert_preset(value))
        elif name == "multiplier":
            if value not in (1, 1.0):
                yield name, InvalidValue(f"{format_value(value)} is not available; {_FULL_STRENGTH}")
        elif name == "dora_wd" and value is True:
            remedy = 'use lora_type: "standard" and adapter.dora: true'
            yield name, InvalidValue(f"is not available for LyCORIS; {remedy}")
        else:
            yield name, ConversionNote(_NO_EFFECT)


def _convert_algorithm(value: JSON) -> ConversionOutcome:
    if isinstance(value, str) and value in ALGORITHMS:
        return SettingValue("adapter.type", ALGORITHMS[value])
    return not_available(value, ALGORITHMS)


def _convert_preset(value: Mapping[str, JSON]) -> Iterator[tuple[str, ConversionOutcome]]:
    for name, inner in value.items():
        if name == "target_module" and isinstance(inner, list):
            preset = TARGET_PRESETS.get(tuple(sorted(set(map(str, inner)))))
            yield name, SettingValue("adapter.targets", preset or "attention_mlp", is_implied=True)
            if preset is None:
                classes = f"{format_value(inner)} are classes of modules"
                yield name, ConversionNote(f'{classes}; sets adapter.targets: "attention_mlp" instead')
        else:
            yield name, ConversionNote(_NO_PRESET)
