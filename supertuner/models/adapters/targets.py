"""Presets of adapter targets that families share, as endings of module names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

SELF_ATTENTION: Final = ("to_q", "to_k", "to_v", "to_out.0")
"""Attention layers of diffusers."""
JOINT_ATTENTION: Final = (*SELF_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Joint attention layers of diffusers, over image and text tokens."""


def target_presets(attention: Sequence[str], mlp: Sequence[str], other: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """The usual presets; each contains the one before it. `other`: linear layers outside attention and feed-forward."""
    attention_mlp = (*attention, *mlp)
    return {"attention": tuple(attention), "attention_mlp": attention_mlp, "all_linear": (*attention_mlp, *other)}
