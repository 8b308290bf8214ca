"""Results from memory are those of real operators, also as views; traces with and without them are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelSource
from supertuner.plan.trace.execution_trace import ExecutionTrace
from supertuner.plan.trace.fake_results import FakeResultCache, FakeResultMode
from supertuner.plan.trace.inference_phases import trace_sampling
from tests.plan.trace.test_trace import configured, shaped, traced

OPERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a product": lambda x: x @ x.t(),
    "by an integer": lambda x: x.to(torch.int32) * 2,
    "by a float": lambda x: x.to(torch.int32) * 2.0,
    "another type": lambda x: x.to(torch.bfloat16),
    "several results": lambda x: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "a view": lambda x: x.view(3, 8),
    "rows": lambda x: x.unbind(),
    "a part with an offset": lambda x: x[2:, 1:],
    "a part of a part": lambda x: x[1:][1:, 2],
    "expanded": lambda x: x[:, None].expand(4, 5, 6),
}


def described(base: torch.Tensor, result: Any) -> list[tuple[Any, ...]]:
    """Layout of each tensor of a result, and whether it is a view of `base`."""
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    storage = base.untyped_storage()._cdata
    return [(t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage()._cdata == storage) for t in tensors]


def results_of_all_operators(base: torch.Tensor) -> list[Any]:
    """Each operator on the first part of `base`, then on the second, which has another storage offset."""
    return [described(base, operator(part)) for part in base.unbind() for operator in OPERATORS.values()]


def test_results_from_memory_have_the_layout_and_storage_of_real_ones() -> None:
    real = results_of_all_operators(torch.zeros(3, 4, 6))
    cache = FakeResultCache()
    with FakeTensorMode(), FakeResultMode(cache):
        fake = results_of_all_operators(torch.zeros(3, 4, 6))
    assert fake == real
    assert any(known is not None for known in cache._results.values())


def test_an_operator_that_changes_its_input_is_not_remembered() -> None:
    with FakeTensorMode(), FakeResultMode(FakeResultCache()):
        one, other = torch.zeros(4), torch.zeros(4)
        assert one.add_(1) is one and other.add_(1) is other


def same_but_for_the_order_of_releases(one: ExecutionTrace, other: ExecutionTrace) -> bool:
    """Tensors that are released together are so in any order, also in two traces without memory."""
    columns = [
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("nbytes", "birth", "kind", "block")
    ]
    releases = np.array_equal(np.sort(one.death), np.sort(other.death))
    return all(columns) and releases and one.spans == other.spans and one.peak()[0] == other.peak()[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": {"type": "lokr", "rank": 4}, "optimizer": {"name": "automagic"}},
        {"adapter": {"type": "lora", "rank": 4}, "model": {"base_weights": "int8"}},
        {"adapter": {"type": "full"}, "optimizer": {"name": "adamw8bit"}},
    ],
    ids=str,
)
def test_a_trace_is_the_same_without_memory(
    tiny_wan: ModelSource, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config = load_family("wan2.2"), configured(**settings)
    model, media = family.read_model(tiny_wan), (3, 5, 32, 48)
    shape = shaped(config, family, model, media)

    def traces() -> list[ExecutionTrace]:
        training = [traced(config, family, model, media, checkpointing=on) for on in (False, True)]
        return [*training, trace_sampling(config, family, model, shape)]

    remembered = traces()
    monkeypatch.setattr(FakeResultCache, "call", lambda self, func, args, kwargs, inputs: func(*args, **kwargs))
    for one, other in zip(remembered, traces(), strict=True):
        assert same_but_for_the_order_of_releases(one, other), one.phase
