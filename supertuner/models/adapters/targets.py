"""Presets of adapter targets that families share: what belongs to which preset, by endings of module names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

SELF_ATTENTION: Final = ("to_q", "to_k", "to_v", "to_out.0")
"""diffusers' attention."""
JOINT_ATTENTION: Final = (*SELF_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""diffusers' attention over pictures and text together."""


def target_presets(attention: Sequence[str], mlp: Sequence[str], other: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Each preset holds those before it. `rest` are the linear layers that are neither attention nor feed-forward."""
    return {
        "attention": tuple(attention),
        "attention_mlp": (*attention, *mlp),
        "all_linear": (*attention, *mlp, *other),
    }
