"""Loading an expert layer by layer: the same bits as loading it whole, in less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from supertuner.core.events import NullSink
from supertuner.models.adapters.existing_adapters import frozen_layer_merger, merge_frozen
from supertuner.models.families.wan22.family import FAMILY as WAN
from supertuner.models.loading import ON_HOST, load_denoiser
from supertuner.models.quantization import quantize_blocks, stored_bytes
from supertuner.models.spec import ModelDescription, ModelSource
from supertuner.plan.trace.recorder import inner_tensors
from supertuner.step.expert_setup import place_base_weights

Kind = Literal["as_computed", "int8", "fp8"]
CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", ["as_computed", "int8", "fp8"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    """A Wan transformer with 8 wide layers, 18 MB in bf16."""
    from diffusers import WanTransformer3DModel

    folder = tmp_path_factory.mktemp("wide") / "wan"
    WAN.write_tiny_pipeline(folder, 0)
    config = {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024, "num_layers": 8}
    torch.manual_seed(0)
    for part in ("transformer", "transformer_2"):
        own = dict(WanTransformer3DModel.load_config(str(folder), subfolder=part))
        WanTransformer3DModel.from_config({**own, **config}).bfloat16().save_pretrained(str(folder / part))
    return WAN.read_model(ModelSource(str(folder)))


def load(model: ModelDescription, place: Callable[[nn.Module], object]) -> nn.Module:
    return load_denoiser(model, model.experts[0], torch.bfloat16, place)


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        for number, inner in enumerate(inner_tensors(tensor)):
            yield f"{name} {number}", inner


def assert_same_bits(actual: nn.Module, expected: nn.Module) -> None:
    ours, theirs = dict(plain_tensors(actual)), dict(plain_tensors(expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and not tensor.requires_grad, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@KINDS
def test_layer_by_layer_gives_the_bits_of_quantizing_the_whole_module(model: ModelDescription, kind: Kind) -> None:
    layered = load(model, partial(place_base_weights, kind=kind, device=CPU, sink=NullSink()))
    whole = load(model, ON_HOST)
    if kind != "as_computed":
        quantize_blocks(whole, kind, CPU)
    assert_same_bits(layered, whole)
    assert not layered.training and all(tensor.data_ptr() % 64 == 0 for _, tensor in plain_tensors(layered))


@KINDS
def test_a_frozen_adapter_is_merged_before_its_layer_is_quantized(model: ModelDescription, kind: Kind) -> None:
    path, generator = Path("frozen.safetensors"), torch.Generator().manual_seed(0)
    down, up = torch.randn(4, 256, generator=generator), torch.randn(256, 4, generator=generator)
    tensors = {"lora_down.weight": down, "lora_up.weight": up}
    layers = {f"blocks.{number}.attn1.to_q": tensors for number in (0, 3, 7)}

    def place(module: nn.Module) -> None:
        merge = frozen_layer_merger(module, layers, path)
        place_base_weights(module, kind, CPU, NullSink(), change_layer=merge)

    whole = load(model, ON_HOST)
    unchanged = whole.get_submodule("blocks.3.attn1.to_q").weight.clone()  # type: ignore[operator]
    merge_frozen(whole, layers, path)
    assert not torch.equal(unchanged, whole.get_submodule("blocks.3.attn1.to_q").weight)  # type: ignore[arg-type]
    if kind != "as_computed":
        quantize_blocks(whole, kind, CPU)
    assert_same_bits(load(model, place), whole)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_16_bit_module_is_never_in_memory_as_a_whole(model: ModelDescription, kind: Kind) -> None:
    """Measured from the mapped file on, which the profiler would count as allocated."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def place(module: nn.Module) -> None:
        with profiler:
            place_base_weights(module, kind, CPU, NullSink())

    module = load(model, place)
    recorded = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    peak = max(accumulate(one.nbytes() for one in sorted(recorded, key=lambda one: one.start_ns())))
    largest_layer = 256 * 1024 * 2
    assert stored_bytes(module) <= peak < stored_bytes(module) + 6 * largest_layer
    assert peak < 0.8 * stored_bytes(load(model, ON_HOST))
