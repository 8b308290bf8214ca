"""Compiled blocks have the outputs and gradients of plain ones; without a compiler there is an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.core.events import DecisionEvent
from supertuner.models.adapters.attach import (
    TrainableExpert,
    attach,
    load_trainable_state,
    temporary_weights,
    trainable_state,
)
from supertuner.models.block_compilation import compile_blocks, repeated_blocks
from supertuner.models.quantization import quantize_blocks
from tests.models.adapters.modules import flux, random_tensor, stable_audio, wan, wan_output

pytestmark = [  # torch's compiler uses functions that torch warns about
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


def with_trained_values(module: nn.Module, targets: tuple[str, ...]) -> TrainableExpert:
    trained = attach(module, AdapterSettings(rank=4), targets, seed=1, name="model")
    load_trainable_state(
        trained,
        {name: tensor + 0.05 * random_tensor(*tensor.shape) for name, tensor in trainable_state(trained).items()},
    )
    return trained


def compile_and_compare(trained: TrainableExpert, forward: Callable[[nn.Module], torch.Tensor]) -> DecisionEvent:
    def computed() -> tuple[torch.Tensor, ...]:
        output = forward(trained.module)
        return output.detach(), *torch.autograd.grad(output.square().mean(), list(trained.parameters.values()))

    plain = computed()
    decided = compile_blocks(trained.module, CPU)
    for found, wanted in zip(computed(), plain, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    return decided


class SmallBlockModel(nn.Module):
    """Two blocks in a module list, as in denoisers, that compile in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs


@needs_compiler
def test_compiled_blocks_have_the_outputs_and_gradients_of_plain_ones() -> None:
    trained = with_trained_values(SmallBlockModel(), ("0.0", "1.0"))
    names = [name for name, _ in trained.module.named_parameters()]
    decided = compile_and_compare(trained, lambda module: module(random_tensor(4, 16)))
    assert [name for name, _ in trained.module.named_parameters()] == names
    assert decided.value is True and "Sequential × 2" in decided.reason
    with torch.no_grad():
        now = trained.module(random_tensor(4, 16))
        with temporary_weights(
            trained, {name: torch.zeros_like(tensor) for name, tensor in trainable_state(trained).items()}
        ):
            bare = trained.module(random_tensor(4, 16))
        assert not torch.allclose(bare, now), "compiled code sees the values that are applied"
        assert torch.equal(trained.module(random_tensor(4, 16)), now)


@needs_compiler
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_compiled_blocks_include_adapters_of_lycoris(kind: str) -> None:
    settings = AdapterSettings(type=kind, rank=1)  # type: ignore[arg-type]
    trained = attach(SmallBlockModel(), settings, ("0.0", "1.0"), seed=1, name="model")
    load_trainable_state(
        trained,
        {name: tensor + 0.05 * random_tensor(*tensor.shape) for name, tensor in trainable_state(trained).items()},
    )
    compile_and_compare(trained, lambda module: module(random_tensor(4, 16)))


@needs_compiler
@pytest.mark.torture
@pytest.mark.parametrize("eight_bits", [False, True], ids=["as computed", "int8"])
def test_compiled_blocks_of_wan_have_the_outputs_and_gradients_of_plain_ones(eight_bits: bool) -> None:
    module = wan()
    if eight_bits:
        quantize_blocks(module, "int8", CPU)
    decided = compile_and_compare(with_trained_values(module, ("to_q", "to_v")), wan_output)
    assert "WanTransformerBlock × 2" in decided.reason


def test_without_a_compiler_the_error_names_what_to_install(tmp_path: Path) -> None:
    code = (
        "import torch, sys\n"
        "from supertuner.core.errors import ModelError\n"
        "from supertuner.models.block_compilation import check_compiler\n"
        "try:\n    check_compiler(torch.device('cpu'))\n"
        "except ModelError as error:\n    sys.exit(f'error: {error}')"
    )
    bare = {"PATH": str(tmp_path), "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **bare}, capture_output=True, text=True, check=False
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("error: model.compile is true, but torch.compile does not work on cpu here: "), ran.stderr
    assert "compiler" in last.split("here: ")[1].split(";")[0], "the reason is the compiler's own"
    assert "install a C++ compiler" in last and "set model.compile: false" in last


def test_the_blocks_are_those_that_the_class_names_or_those_in_its_lists() -> None:
    assert [type(block).__name__ for block in repeated_blocks(wan())] == ["WanTransformerBlock"] * 2
    assert {type(block).__name__ for block in repeated_blocks(flux())} == {
        "FluxTransformerBlock",
        "FluxSingleTransformerBlock",
    }
    assert {type(block).__name__ for block in repeated_blocks(stable_audio())} == {"StableAudioDiTBlock"}


def test_a_module_without_blocks_raises_an_error_with_a_remedy() -> None:
    with pytest.raises(ModelError, match=r"Linear has no repeated blocks; set model\.compile: false"):
        compile_blocks(nn.Linear(2, 2), CPU)
