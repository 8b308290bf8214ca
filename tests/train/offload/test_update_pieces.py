"""Pieces of an update: none is larger than plans account for, except for a single larger parameter."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from supertuner.core.types import MIB
from supertuner.plan.placement.memory_needs import UPDATE_PIECE_BYTES
from supertuner.step.train_step import ExpertState
from supertuner.train.offload.apply import _split_into_pieces


class LargeExpertStub:
    """A stub of an expert state: parameters of full size, without memory."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = dict(module.named_parameters())


def test_a_large_block_is_split_and_small_blocks_are_not_joined() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(4096, 4096, bias=False) for _ in range(9)]  # 64 MiB each
        module = nn.ModuleList([nn.Sequential(*layers[:6]), nn.Sequential(*layers[6:8]), layers[8]])
    pieces = _split_into_pieces(cast(ExpertState, LargeExpertStub(module)), [module[0], module[1]])
    sizes = [sum(module.get_parameter(name).nbytes for name in names) for names in pieces]
    assert sizes == [64 * MIB, 256 * MIB, 128 * MIB, 128 * MIB]
    assert max(sizes) <= UPDATE_PIECE_BYTES
    assert pieces[0] == ["2.weight"]


def test_a_parameter_larger_than_a_piece_forms_a_piece() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(16384, 8192, bias=False), nn.Linear(8, 8, bias=False))
    assert _split_into_pieces(cast(ExpertState, LargeExpertStub(module)), [module]) == [["0.weight"], ["1.weight"]]
