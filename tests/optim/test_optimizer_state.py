"""What optimizers remember, through a real file: training goes on as if nothing had happened, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from supertuner.core.errors import CheckpointError
from supertuner.optim.optimizer_registry import ExpertOptimizer
from supertuner.optim.optimizer_state import pack_state, restore_state
from tests.optim.training import NAMES, build_named_optimizer, build_weights, same_bits, train_steps


def saved(made: ExpertOptimizer, folder: Path) -> None:
    tensors, meta = pack_state(made)
    save_file(tensors, folder / "optimizer.safetensors")
    save_file({name: p.detach().contiguous() for name, p in made.parameters.items()}, folder / "weights.safetensors")
    (folder / "optimizer.json").write_text(json.dumps(meta, allow_nan=False))


def resumed(name: str, folder: Path, **settings: object) -> ExpertOptimizer:
    parameters = build_weights(seed=9)  # other values: everything must come out of the files
    for key, stored in load_file(folder / "weights.safetensors").items():
        parameters[key].data.copy_(stored)
    made = build_named_optimizer(name, parameters, **settings)
    restore_state(
        made, load_file(folder / "optimizer.safetensors"), json.loads((folder / "optimizer.json").read_text())
    )
    return made


@pytest.mark.parametrize("begun", [0, 1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_from_a_file_to_the_bit(name: str, begun: int, tmp_path: Path) -> None:
    whole = build_named_optimizer(name, build_weights(), weight_decay=0.01)
    train_steps(whole, 0, begun + 8)
    first = build_named_optimizer(name, build_weights(), weight_decay=0.01)
    train_steps(first, 0, begun)
    saved(first, tmp_path)
    second = resumed(name, tmp_path, weight_decay=0.01)
    train_steps(second, begun, begun + 8)
    assert same_bits(whole.parameters, second.parameters)
    assert same_bits(pack_state(whole)[0], pack_state(second)[0])
    assert pack_state(whole)[1] == pack_state(second)[1]


@pytest.mark.parametrize("name", NAMES)
def test_packing_changes_no_bit_and_the_copies_stay_as_they_were(name: str) -> None:
    made, other = build_named_optimizer(name, build_weights()), build_named_optimizer(name, build_weights())
    train_steps(made, 0, 3)
    train_steps(other, 0, 3)
    tensors, _ = pack_state(made)
    kept = {key: tensor.clone() for key, tensor in tensors.items()}
    train_steps(made, 3, 6)
    train_steps(other, 3, 6)
    assert same_bits(tensors, kept)
    assert same_bits(made.parameters, other.parameters)


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from tests.optim.test_state import resumed, saved
from tests.optim.training import train
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    made = resumed(name, folder)
    train(made, 4, 9)
    saved(made, folder)
"""


def test_another_process_goes_on_to_the_bit(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        made = build_named_optimizer(name, build_weights())
        train_steps(made, 0, 4)
        saved(made, tmp_path / name)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path), *NAMES]
    subprocess.run(command, check=True, capture_output=True)
    for name in NAMES:
        whole = build_named_optimizer(name, build_weights())
        train_steps(whole, 0, 9)
        assert same_bits(load_file(tmp_path / name / "optimizer.safetensors"), pack_state(whole)[0]), name
        assert same_bits(
            load_file(tmp_path / name / "weights.safetensors"), {k: p.detach() for k, p in whole.parameters.items()}
        ), name


def test_rate_and_weight_decay_come_from_the_settings_of_the_resumed_run() -> None:
    made = build_named_optimizer("schedule_free", build_weights(), learning_rate=1e-3, weight_decay=0.1)
    train_steps(made, 0, 2)
    other = build_named_optimizer("schedule_free", build_weights(), learning_rate=2e-3, weight_decay=0.2)
    restore_state(other, *pack_state(made))
    group = other.torch_optimizer.param_groups[0]
    assert (other.base_learning_rate, group["lr"], group["weight_decay"], group["k"]) == (2e-3, 2e-3, 0.2, 2)


def test_a_parameter_without_a_gradient_has_no_state_and_needs_none() -> None:
    made = build_named_optimizer("adamw", build_weights())
    train_steps(made, 0, 1)
    assert not any(key.startswith("unused/") for key in pack_state(made)[0])


def broken(change: str) -> tuple[ExpertOptimizer, dict[str, torch.Tensor], dict[str, Any]]:
    made = build_named_optimizer("adamw", build_weights())
    train_steps(made, 0, 1)
    tensors, meta = pack_state(made)
    if change == "missing":
        del tensors["scale/exp_avg"]
    elif change == "extra":
        tensors["scale/momentum"] = torch.zeros(())
    elif change == "shape":
        tensors["blocks.0.bias/exp_avg"] = torch.zeros(36)
    elif change == "stranger":
        tensors["blocks.9.bias/exp_avg"] = torch.zeros(36)
    return build_named_optimizer("adamw", build_weights()), tensors, dict(meta)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "lacks scale/exp_avg"),
        ("extra", "has scale/momentum too many"),
        ("shape", r"blocks.0.bias/exp_avg has shape \[36\], and the parameter asks for \[37\]"),
        ("stranger", "has blocks.9.bias too many"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(change: str, words: str) -> None:
    made, tensors, meta = broken(change)
    with pytest.raises(CheckpointError, match=words):
        restore_state(made, tensors, meta)
    assert not made.torch_optimizer.state


def test_a_state_of_other_parameters_names_them() -> None:
    made = build_named_optimizer("adamw", build_weights())
    fewer = {key: p for key, p in build_weights().items() if key != "scale"}
    with pytest.raises(CheckpointError, match="has scale too many"):
        restore_state(build_named_optimizer("adamw", fewer), *pack_state(made))
    with pytest.raises(CheckpointError, match="lacks scale"):
        restore_state(made, *pack_state(build_named_optimizer("adamw", fewer)))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_finds_its_parameters_by_their_names_in_whatever_order_they_come(name: str) -> None:
    """All of one shape: a state that went by place would fit every one of them."""
    names = ("b", "a", "d", "c")
    drawn = torch.Generator().manual_seed(3)
    values = {one: torch.randn(24, 16, generator=drawn) for one in names}
    made = build_named_optimizer(name, {one: nn.Parameter(values[one].clone()) for one in names})
    train_steps(made, 0, 3)
    turned = build_named_optimizer(name, {one: nn.Parameter(values[one].clone()) for one in sorted(names)})
    restore_state(turned, *pack_state(made))
    assert same_bits(pack_state(turned)[0], pack_state(made)[0]) and len(pack_state(made)[0]) >= 2 * len(names)


def test_a_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match='"prodigy", and the configuration says "adamw"'):
        restore_state(
            build_named_optimizer("adamw", build_weights()),
            *pack_state(build_named_optimizer("prodigy", build_weights())),
        )


def test_half_an_eight_bit_entry_is_refused() -> None:
    made = build_named_optimizer("adamw8bit", build_weights())
    train_steps(made, 0, 1)
    tensors, meta = pack_state(made)
    del tensors["blocks.0.lora_A.weight/exp_avg.scale"]
    with pytest.raises(CheckpointError, match=r"lacks blocks.0.lora_A.weight/exp_avg.scale"):
        restore_state(build_named_optimizer("adamw8bit", build_weights()), tensors, meta)


def test_an_empty_state_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(CheckpointError, match="has no group, optimizer, parameters"):
        restore_state(build_named_optimizer("adamw", build_weights()), {}, {})
