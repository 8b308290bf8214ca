"""`supertuner checkpoint verify` loads the adapters of a checkpoint and checks their keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.config.settings.model import AdapterSettings
from supertuner.core.host import HostFacts
from supertuner.models.adapters.attach import attach, trainable_state
from tests.models.adapters.modules import random_tensor, wan
from tests.train.checkpoints import save_parts


def saved(folder: Path, **parts: dict[str, torch.Tensor]) -> Path:
    named = {name.replace("__", "."): tensors for name, tensors in parts.items()}
    return save_parts(folder, 4, named, {}, keep=1, host=HostFacts())


def verify(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(folder)])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("settings", "summary"),
    [
        (AdapterSettings(rank=2), "32 of 32 keys matched, 16 layers of wan2.2"),
        (AdapterSettings(rank=2, dora=True), "48 of 48 keys matched"),
        (AdapterSettings(type="lokr", rank=2), "keys matched, 16 layers of wan2.2"),
        (AdapterSettings(type="loha", rank=2), "64 of 64 keys matched"),
        (AdapterSettings(type="full"), " weights"),
    ],
    ids=["lora", "dora", "lokr", "loha", "full"],
)
def test_every_kind_of_adapter_is_loaded_and_counted(settings: AdapterSettings, summary: str, tmp_path: Path) -> None:
    targets = ("to_q", "to_k", "to_v", "to_out.0")
    trained = attach(wan(), settings, targets, seed=1, name="low_noise")
    checkpoint = saved(tmp_path, adapter__low_noise=trainable_state(trained), random={"x": torch.zeros(1)})
    code, output = verify(checkpoint)
    assert code == 0 and "intact, step 4" in output
    assert "adapter.low_noise: " in output and summary in output


def test_unknown_keys_and_non_finite_values_fail(tmp_path: Path) -> None:
    good = {
        "blocks.0.attn1.to_q.lora_A.weight": random_tensor(2, 4),
        "blocks.0.attn1.to_q.lora_B.weight": random_tensor(4, 2),
    }
    code, output = verify(
        saved(tmp_path / "a", adapter__model=good | {"blocks.0.attn9.lora_A.weight": random_tensor(2)})
    )
    assert code == 1 and "2 of 3 keys matched" in output and "attn9" in output
    code, output = verify(
        saved(tmp_path / "b", adapter__model=good | {"blocks.0.attn1.to_q.lora_A.weight": random_tensor(2, 4) / 0})
    )
    assert code == 1 and "not finite" in output
    code, output = verify(saved(tmp_path / "c", adapter__model={"nonsense": random_tensor(2)}))
    assert code == 1 and "none of 1 keys" in output
