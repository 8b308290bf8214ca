"""Ctrl-C inside a load comes out as an interrupt, whatever libraries make of it; a damaged file is still an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelSource
from tests.ctrl_c import READS_TENSOR, call_of, ctrl_c_at

WAN = load_family("wan2.2")
COMPONENTS = {"transformer": 138, "vae": 292}
"""Component of the tiny pipeline → its tensors. (transformers reads those of a text encoder in threads of its own.)"""


@pytest.mark.parametrize("component", COMPONENTS)
def test_ctrl_c_while_a_tensor_is_read_is_not_taken_for_a_damaged_file(component: str, tiny_wan: ModelSource) -> None:
    model = WAN.read_model(tiny_wan)
    count = COMPONENTS[component]
    for number in (1, 2, 3, count // 3, count // 2, count - 1):
        with ctrl_c_at(call_of(READS_TENSOR), number) as ctrl_c, pytest.raises(KeyboardInterrupt):
            loading.load_module(model, component, torch.float32)
        assert ctrl_c.sent


def test_a_load_after_an_interrupted_one_is_complete(tiny_wan: ModelSource) -> None:
    model = WAN.read_model(tiny_wan)
    expected = loading.load_module(model, "transformer", torch.float32).state_dict()
    with ctrl_c_at(call_of(READS_TENSOR), 20), pytest.raises(KeyboardInterrupt):
        loading.load_module(model, "transformer", torch.float32)
    found = loading.load_module(model, "transformer", torch.float32).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()) and len(found) == len(expected)


def test_a_damaged_file_is_an_error_of_the_model_after_an_interrupted_load(
    tiny_wan: ModelSource, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_wan.path, tmp_path / "pipeline"))
    model = WAN.read_model(ModelSource(str(folder)))
    with ctrl_c_at(call_of(READS_TENSOR), 20), pytest.raises(KeyboardInterrupt):
        loading.load_module(model, "transformer", torch.float32)
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged"):
        loading.load_module(model, "transformer", torch.float32)
