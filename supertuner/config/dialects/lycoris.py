"""Converts SimpleTuner's LyCORIS file (`lycoris_config`): algorithm, rank, alpha, factor and targets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
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
OTHER_KEYS: Final = {
    **dict.fromkeys(("bypass_mode",), "has no effect: the result is the same with and without it"),
    **dict.fromkeys(
        ("rank_dropout", "module_dropout"), "has no effect: adapter.dropout is the only dropout of an adapter"
    ),
    **dict.fromkeys(
        ("conv_dim", "conv_alpha", "use_tucker", "use_cp"),
        'has no effect: only SDXL has convolutions; adapter.targets: "all_layers" trains them with the same rank',
    ),
    **dict.fromkeys(
        ("decompose_both", "unbalanced_factorization", "use_scalar", "wd_on_output", "weight_decompose"),
        "has no effect: adapters of LyCORIS are built with its default",
    ),
    **dict.fromkeys(("block_size", "constraint", "rescaled"), "has no effect: OFT and BOFT are not available"),
    "train_norm": "has no effect: only linear layers and convolutions are trained",
    "preset": "has no effect: adapter.targets lists the layers that get an adapter",
}
"""Keys of LyCORIS that have no meaning here, with the reasons."""
_PRESET_KEYS: Final = {
    "module_algo_map": "has no effect: all layers share the type and factor; adapter.modules sets their ranks",
    "name_algo_map": "has no effect: all layers share the type and factor; adapter.modules sets their ranks",
    **dict.fromkeys(
        ("target_name", "use_fnmatch", "exclude_name", "unet_target_module", "unet_target_name", "enable_conv"),
        "has no effect: adapter.targets lists the layers that get an adapter",
    ),
    **dict.fromkeys(
        ("text_encoder_target_module", "text_encoder_target_name", "lora_prefix"),
        "has no effect: text encoders are not trained, and exports have diffusers' names",
    ),
}
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
        elif name in OTHER_KEYS or name in ("factor", "dora_wd"):
            if value:
                yield name, ConversionNote(OTHER_KEYS.get(name, "has no effect with this algo"))
        else:
            yield name, _unknown_key(name, [*sizes, "algo", "factor", "dropout", *_SWITCHES, *OTHER_KEYS])


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
        elif name in _PRESET_KEYS:
            yield name, ConversionNote(_PRESET_KEYS[name])
        else:
            yield name, _unknown_key(name, ["target_module", *_PRESET_KEYS])


def _unknown_key(name: str, known: Sequence[str]) -> InvalidValue:
    closest = get_close_matches(name, known, n=1)
    suggestion = f"did you mean {closest[0]}?" if closest else f"known here: {', '.join(known)}"
    return InvalidValue(f"not a key of LyCORIS; {suggestion}")
