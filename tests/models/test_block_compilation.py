"""Compiled blocks compute and learn what plain ones do; a machine without a compiler says so."""

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

pytestmark = [  # torch's compiler does what torch warns of
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


def learnt(module: nn.Module, targets: tuple[str, ...]) -> TrainableExpert:
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
    """Two blocks in a list, as denoisers have them, that compile in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            given = given + block(given)
        return given


@needs_compiler
def test_compiled_blocks_give_the_output_and_the_gradients_of_plain_ones() -> None:
    trained = learnt(SmallBlockModel(), ("0.0", "1.0"))
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
def test_compiled_blocks_take_the_adapters_of_lycoris_along(kind: str) -> None:
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
def test_compiled_blocks_of_wan_give_the_output_and_the_gradients_of_plain_ones(eight_bits: bool) -> None:
    module = wan()
    if eight_bits:
        quantize_blocks(module, "int8", CPU)
    decided = compile_and_compare(learnt(module, ("to_q", "to_v")), wan_output)
    assert "WanTransformerBlock × 2" in decided.reason


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import torch, sys\n"
        "from supertuner.core.errors import ModelError\n"
        "from supertuner.models.block_compilation import check_compiler\n"
        "try:\n    check_compiler(torch.device('cpu'))\n"
        "except ModelError as error:\n    sys.exit(f'said: {error}')"
    )
    bare = {"PATH": str(tmp_path), "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **bare}, capture_output=True, text=True, check=False
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("said: model.compile is true, and torch.compile does not work on cpu here: "), ran.stderr
    assert "compiler" in last.split("here: ")[1].split(";")[0], "the reason is the compiler's own"
    assert "install a C++ compiler" in last and "set model.compile: false" in last


def test_the_blocks_are_those_the_class_names_or_those_in_its_lists() -> None:
    assert [type(block).__name__ for block in repeated_blocks(wan())] == ["WanTransformerBlock"] * 2
    assert {type(block).__name__ for block in repeated_blocks(flux())} == {
        "FluxTransformerBlock",
        "FluxSingleTransformerBlock",
    }
    assert {type(block).__name__ for block in repeated_blocks(stable_audio())} == {"StableAudioDiTBlock"}


def test_a_module_without_blocks_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ModelError, match="Linear has no repeated blocks; set it to false"):
        compile_blocks(nn.Linear(2, 2), CPU)
