"""What a LyCORIS file of SimpleTuner (`lycoris_config`) means here: algorithm, rank, alpha, factor, targets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from supertuner.config.dialects.conversions import No, Outcome, Put, Said
from supertuner.config.sources.values import shown
from supertuner.core.types import JSON

ALGORITHMS: Final = {"lora": "locon", "locon": "locon", "loha": "loha", "lokr": "lokr", "full": "diff"}
WHOLE: Final = 10_000
"""A `linear_dim` from here on is SimpleTuner's way to ask LoKr for whole matrices."""
CLASSES: Final = {
    frozenset({"Attention"}): "attention",
    frozenset({"Attention", "FeedForward"}): "attention_mlp",
}
_NO_EFFECT: Final = "has no effect: it is not an option here"
_SWITCHES: Final = {"full_matrix": "adapter.lokr_full_matrix", "rs_lora": "adapter.rslora"}


def read(tree: Mapping[str, JSON]) -> Iterator[tuple[str, Outcome]]:
    """Each key of the file with what becomes of it; where it says no rank or alpha, LyCORIS's own defaults count."""
    sizes: dict[str, JSON] = {"linear_dim": 4, "linear_alpha": 1}
    for name, value in {"algo": "lora", **sizes, **tree}.items():
        if name == "algo":
            yield name, _algorithm(value)
        elif name in sizes and tree.get("algo") == "full":
            continue  # whole weights have neither
        elif name == "linear_dim":
            whole = isinstance(value, int) and value >= WHOLE and tree.get("algo") == "lokr"
            yield name, Put("adapter.lokr_full_matrix", True) if whole else Put("adapter.rank", value)
        elif name == "linear_alpha":
            if value:
                yield name, Put("adapter.alpha", value)
        elif name == "factor" and tree.get("algo") == "lokr":
            yield name, Put("adapter.lokr_factor", value)
        elif name == "dropout":
            yield name, Put("adapter.dropout", value or 0.0)
        elif name in _SWITCHES:
            yield name, Put(_SWITCHES[name], value)
        elif name == "apply_preset" and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", outcome) for key, outcome in _preset(value))
        elif name == "multiplier":
            if value not in (1, 1.0):
                yield name, No(f"{shown(value)} is not available; an adapter is trained at its full strength, 1")
        elif name == "dora_wd" and value is True:
            yield name, No('is not available for LyCORIS; lora_type: "standard" can be trained with adapter.dora')
        else:
            yield name, Said(_NO_EFFECT)


def _algorithm(value: JSON) -> Outcome:
    if isinstance(value, str) and value in ALGORITHMS:
        return Put("adapter.type", ALGORITHMS[value])
    return No(f"{shown(value)} is not available; allowed: {', '.join(map(shown, ALGORITHMS))}")


def _preset(value: Mapping[str, JSON]) -> Iterator[tuple[str, Outcome]]:
    for name, inner in value.items():
        if name == "target_module" and isinstance(inner, list):
            preset = CLASSES.get(frozenset(map(str, inner)))
            yield name, Put("adapter.targets", preset or "attention_mlp", weak=True)
            if preset is None:
                yield (
                    name,
                    Said(f'{shown(inner)} are classes of modules; taken as "attention_mlp", see adapter.targets'),
                )
        else:
            yield name, Said("has no effect: layers are named by adapter.targets, and their ranks by adapter.modules")
