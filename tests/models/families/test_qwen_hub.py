"""Qwen-Image and Qwen-Image-Edit from the hub: only needed files are downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch

from supertuner.core.errors import ModelError
from supertuner.models.families.qwen_image_edit.family import FAMILY
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelSource
from tests.models.hub_server import FakeHub, serve_hub

CPU = torch.device("cpu")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    FAMILY.write_tiny_pipeline(tmp_path / "pipeline", 0)
    with serve_hub(tmp_path / "pipeline") as hub:
        files = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def test_the_text_encoder_is_downloaded_with_its_tokenizer_and_processor(hub: FakeHub) -> None:
    edit = load_family("qwen-image-edit")
    model = edit.read_model(ModelSource("Qwen/Qwen-Image-Edit"))
    assert not [request for request in hub.requests if request.endswith(".safetensors")], "reading needs only configs"
    encoder = edit.build_text_encoder(model, CPU, torch.float32)
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    assert encoder.encode_with_images(["a"], [image])[0]["embeds"].shape[1] == 16  # type: ignore[attr-defined]
    downloaded = {request.split("/")[-2] for request in hub.requests if request.endswith(".safetensors")}
    assert downloaded == {"text_encoder"}
    names = {file.parent.name for file in edit.text_files(model)}
    assert names == {"text_encoder", "tokenizer", "processor"}


def test_the_error_names_the_other_qwen_family(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r'set model\.family to "qwen-image-edit"'):
        load_family("qwen-image").read_model(ModelSource("Qwen/Qwen-Image-Edit"))
