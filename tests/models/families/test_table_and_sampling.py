"""The table of families, and the precision of modules inside a pipeline."""

from __future__ import annotations

import logging
import re

import diffusers
import pytest
import torch
from torch import nn

from supertuner.config.families import FAMILIES, family_by_pipeline, target_presets_of
from supertuner.core.errors import ModelError
from supertuner.models.families.sampling_common import eval_with_autocast
from supertuner.models.family_loader import load_family

CPU = torch.device("cpu")


def test_every_family_of_the_table_exists_under_its_name() -> None:
    assert [load_family(name).name for name in FAMILIES] == list(FAMILIES)


def test_every_pipeline_of_the_table_exists_in_diffusers_and_has_a_family() -> None:
    assert all(hasattr(diffusers, name) for name in family_by_pipeline())
    assert set(family_by_pipeline().values()) == set(FAMILIES)


@pytest.mark.parametrize("name", ["wan", None])
def test_an_unknown_family_raises_an_error_with_the_known_ones(name: str | None) -> None:
    with pytest.raises(ModelError, match=re.escape("set it to one of " + ", ".join(FAMILIES))):
        load_family(name)


def test_loading_a_family_does_not_change_logging() -> None:
    before = logging.root.manager.disable
    load_family("flux")
    assert logging.root.manager.disable == before


class RecordingLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(value)
        self.seen.append((result.dtype, self.training))
        if value.isnan().any():
            raise ValueError("not a number")
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_given_modules_compute_under_autocast(dtype: torch.dtype) -> None:
    inside, outside = RecordingLinear(), RecordingLinear()
    with eval_with_autocast([inside], CPU, dtype):
        inside(torch.ones(1, 4))
        outside(torch.ones(1, 4))
    inside(torch.ones(1, 4))
    assert inside.seen == [(dtype, False), (torch.float32, True)]
    assert outside.seen == [(torch.float32, True)]


def test_autocast_ends_after_a_forward_pass_that_fails() -> None:
    module = RecordingLinear()
    with pytest.raises(ValueError, match="not a number"), eval_with_autocast([module], CPU, torch.bfloat16):
        module(torch.full((1, 4), float("nan")))
    assert not torch.is_autocast_enabled("cpu")
    assert module.training and not module._forward_hooks and not module._forward_pre_hooks


def test_the_table_lists_the_presets_of_each_family() -> None:
    for name in FAMILIES:
        assert set(load_family(name).target_presets) == set(target_presets_of(name)), name
