"""Optimizer state in a file: a resumed training is equal to an uninterrupted one to the bit."""

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
from tests.optim.optimizer_builders import NAMES, build_named_optimizer, build_weights, same_bits, train_steps


def save_optimizer(optimizer: ExpertOptimizer, folder: Path) -> None:
    tensors, meta = pack_state(optimizer)
    save_file(tensors, folder / "optimizer.safetensors")
    save_file(
        {name: p.detach().contiguous() for name, p in optimizer.parameters.items()}, folder / "weights.safetensors"
    )
    (folder / "optimizer.json").write_text(json.dumps(meta, allow_nan=False))


def load_optimizer(name: str, folder: Path, **settings: object) -> ExpertOptimizer:
    parameters = build_weights(seed=9)  # other values, so that everything must come from the files
    for key, stored in load_file(folder / "weights.safetensors").items():
        parameters[key].data.copy_(stored)
    optimizer = build_named_optimizer(name, parameters, **settings)
    restore_state(
        optimizer, load_file(folder / "optimizer.safetensors"), json.loads((folder / "optimizer.json").read_text())
    )
    return optimizer


@pytest.mark.parametrize("steps_before", [0, 1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_training_continues_from_a_file_to_the_bit(name: str, steps_before: int, tmp_path: Path) -> None:
    uninterrupted = build_named_optimizer(name, build_weights(), weight_decay=0.01)
    train_steps(uninterrupted, 0, steps_before + 8)
    first = build_named_optimizer(name, build_weights(), weight_decay=0.01)
    train_steps(first, 0, steps_before)
    save_optimizer(first, tmp_path)
    second = load_optimizer(name, tmp_path, weight_decay=0.01)
    train_steps(second, steps_before, steps_before + 8)
    assert same_bits(uninterrupted.parameters, second.parameters)
    assert same_bits(pack_state(uninterrupted)[0], pack_state(second)[0])
    assert pack_state(uninterrupted)[1] == pack_state(second)[1]


@pytest.mark.parametrize("name", NAMES)
def test_packing_changes_no_bit_and_later_steps_do_not_change_the_copies(name: str) -> None:
    optimizer, other = build_named_optimizer(name, build_weights()), build_named_optimizer(name, build_weights())
    train_steps(optimizer, 0, 3)
    train_steps(other, 0, 3)
    tensors, _ = pack_state(optimizer)
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    train_steps(optimizer, 3, 6)
    train_steps(other, 3, 6)
    assert same_bits(tensors, copies)
    assert same_bits(optimizer.parameters, other.parameters)


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from tests.optim.test_optimizer_state import load_optimizer, save_optimizer
from tests.optim.optimizer_builders import train_steps
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    optimizer = load_optimizer(name, folder)
    train_steps(optimizer, 4, 9)
    save_optimizer(optimizer, folder)
"""


def test_another_process_continues_to_the_bit(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        optimizer = build_named_optimizer(name, build_weights())
        train_steps(optimizer, 0, 4)
        save_optimizer(optimizer, tmp_path / name)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path), *NAMES]
    subprocess.run(command, check=True, capture_output=True)
    for name in NAMES:
        uninterrupted = build_named_optimizer(name, build_weights())
        train_steps(uninterrupted, 0, 9)
        assert same_bits(load_file(tmp_path / name / "optimizer.safetensors"), pack_state(uninterrupted)[0]), name
        assert same_bits(
            load_file(tmp_path / name / "weights.safetensors"),
            {k: p.detach() for k, p in uninterrupted.parameters.items()},
        ), name


def test_learning_rate_and_weight_decay_come_from_the_settings_of_the_resumed_run() -> None:
    optimizer = build_named_optimizer("schedule_free", build_weights(), learning_rate=1e-3, weight_decay=0.1)
    train_steps(optimizer, 0, 2)
    other = build_named_optimizer("schedule_free", build_weights(), learning_rate=2e-3, weight_decay=0.2)
    restore_state(other, *pack_state(optimizer))
    group = other.torch_optimizer.param_groups[0]
    assert (other.base_learning_rate, group["lr"], group["weight_decay"], group["k"]) == (2e-3, 2e-3, 0.2, 2)


def test_a_parameter_without_a_gradient_has_no_state() -> None:
    optimizer = build_named_optimizer("adamw", build_weights())
    train_steps(optimizer, 0, 1)
    assert not any(key.startswith("unused/") for key in pack_state(optimizer)[0])


def corrupted_state(change: str) -> tuple[ExpertOptimizer, dict[str, torch.Tensor], dict[str, Any]]:
    optimizer = build_named_optimizer("adamw", build_weights())
    train_steps(optimizer, 0, 1)
    tensors, meta = pack_state(optimizer)
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
    ("change", "message"),
    [
        ("missing", "lacks scale/exp_avg"),
        ("extra", "also has scale/momentum"),
        (
            "shape",
            r"blocks.0.bias/exp_avg in the saved optimizer state has shape \[36\], and its parameter needs \[37\]",
        ),
        ("stranger", "also has blocks.9.bias"),
    ],
)
def test_a_state_that_does_not_match_raises_an_error_with_the_name_and_changes_nothing(
    change: str, message: str
) -> None:
    optimizer, tensors, meta = corrupted_state(change)
    with pytest.raises(CheckpointError, match=message):
        restore_state(optimizer, tensors, meta)
    assert not optimizer.torch_optimizer.state


def test_a_state_of_other_parameters_raises_an_error_with_their_names() -> None:
    optimizer = build_named_optimizer("adamw", build_weights())
    fewer = {key: p for key, p in build_weights().items() if key != "scale"}
    with pytest.raises(CheckpointError, match="also has scale"):
        restore_state(build_named_optimizer("adamw", fewer), *pack_state(optimizer))
    with pytest.raises(CheckpointError, match="lacks scale"):
        restore_state(optimizer, *pack_state(build_named_optimizer("adamw", fewer)))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_matched_to_parameters_by_name_in_any_order(name: str) -> None:
    """All parameters have one shape, so that a state matched by index would go unnoticed."""
    names = ("b", "a", "d", "c")
    generator = torch.Generator().manual_seed(3)
    values = {key: torch.randn(24, 16, generator=generator) for key in names}
    optimizer = build_named_optimizer(name, {key: nn.Parameter(values[key].clone()) for key in names})
    train_steps(optimizer, 0, 3)
    reordered = build_named_optimizer(name, {key: nn.Parameter(values[key].clone()) for key in sorted(names)})
    restore_state(reordered, *pack_state(optimizer))
    assert same_bits(pack_state(reordered)[0], pack_state(optimizer)[0])
    assert {key.partition("/")[0] for key in pack_state(optimizer)[0]} == set(names)


def test_a_state_of_another_optimizer_raises_an_error() -> None:
    with pytest.raises(CheckpointError, match='"prodigy", but the configuration has "adamw"'):
        restore_state(
            build_named_optimizer("adamw", build_weights()),
            *pack_state(build_named_optimizer("prodigy", build_weights())),
        )


def test_an_8_bit_entry_without_its_scale_raises_an_error() -> None:
    optimizer = build_named_optimizer("adamw8bit", build_weights())
    train_steps(optimizer, 0, 1)
    tensors, meta = pack_state(optimizer)
    del tensors["blocks.0.lora_A.weight/exp_avg.scale"]
    with pytest.raises(CheckpointError, match=r"lacks blocks.0.lora_A.weight/exp_avg.scale"):
        restore_state(build_named_optimizer("adamw8bit", build_weights()), tensors, meta)


def test_an_empty_state_raises_an_error_with_the_missing_keys() -> None:
    with pytest.raises(CheckpointError, match="lacks group, optimizer, parameters"):
        restore_state(build_named_optimizer("adamw", build_weights()), {}, {})
