"""Models on the hub: only needed files are downloaded, the revision is pinned, and every error names the remedy."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
import torch

from supertuner.core.errors import ModelError
from supertuner.models.family_loader import load_family
from supertuner.models.spec import Expert, ModelSource
from tests.models.families.pipelines import CASES, WrittenPipeline
from tests.models.hub_server import COMMIT, GATED, FakeHub, serve_hub

WAN = "wan2.2"
SECRET = "hf_thisIsASecretThatNobodyMaySee"


@pytest.fixture
def hub(tiny_wan: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_of(Path(tiny_wan.path), tmp_path, monkeypatch) as hub:
        yield hub


@contextmanager
def hub_of(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub(folder) as hub:
        files = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", SECRET)
        yield hub


def read_error(source: ModelSource) -> str:
    with pytest.raises(ModelError) as caught:
        load_family(WAN).read_model(source)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_reading_a_model_downloads_its_configs_and_no_weights(hub: FakeHub) -> None:
    model = load_family(WAN).read_model(ModelSource("owner/model"))
    assert [expert.name for expert in model.experts] == ["high_noise", "low_noise"]
    assert not [asked for asked in hub.requests if asked.endswith(".safetensors")]


@pytest.mark.parametrize(
    "written",
    [case for case in CASES if case.name in ("qwen-image", "sd3.5", "sdxl")],
    ids=lambda case: case.name,
    indirect=True,
)
def test_components_of_all_families_from_the_hub_are_equal_to_the_bit(
    written: WrittenPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    with hub_of(written.folder, tmp_path, monkeypatch) as hub:
        model = written.family.read_model(ModelSource("owner/model"))
        assert not [asked for asked in hub.requests if asked.endswith(".safetensors")]
        there = written.family.build_text_encoder(model, cpu, torch.float32).encode(["a star"])[0]
        module = written.family.load_denoiser(model, model.experts[0], torch.float32)
    here = written.family.build_text_encoder(written.model, cpu, torch.float32).encode(["a star"])[0]
    other = written.family.load_denoiser(written.model, model.experts[0], torch.float32)
    assert all(torch.equal(there[name], here[name]) for name in here)
    assert all(torch.equal(one, other.get_parameter(name)) for name, one in module.named_parameters())


def test_a_model_is_pinned_to_the_commit_that_was_read(hub: FakeHub) -> None:
    model = load_family(WAN).read_model(ModelSource("owner/model", revision="v1"))
    assert model.source.revision == COMMIT


def test_a_component_is_downloaded_when_it_is_needed_and_only_once(hub: FakeHub) -> None:
    wan = load_family(WAN)
    model = wan.read_model(ModelSource("owner/model"))
    wan.build_media_encoder(model, torch.device("cpu"))
    fetched = [asked for asked in hub.requests if asked.startswith("GET") and asked.endswith(".safetensors")]
    assert fetched == [f"GET /owner/model/resolve/{COMMIT}/vae/diffusion_pytorch_model.safetensors"]
    hub.requests.clear()
    wan.build_media_encoder(model, torch.device("cpu"))
    assert not hub.requests


def test_sharded_weights_are_downloaded_by_their_index(hub: FakeHub, tmp_path: Path) -> None:
    wan = load_family(WAN)
    whole = wan.load_denoiser(
        wan.read_model(ModelSource(str(hub.folder))), Expert("high_noise", "transformer"), torch.float32
    )
    hub.folder = Path(shutil.copytree(hub.folder, tmp_path / "sharded"))
    shutil.rmtree(hub.folder / "transformer")
    whole.save_pretrained(hub.folder / "transformer", max_shard_size="40KB")  # type: ignore[operator]
    (hub.folder / "transformer" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"not asked for")
    model = wan.read_model(ModelSource("owner/model"))
    fetched = wan.load_denoiser(model, model.experts[0], torch.float32)
    names = [asked for asked in hub.requests if asked.startswith("GET") and asked.endswith(".safetensors")]
    assert len(names) > 1 and all("-of-" in name for name in names)
    assert all(torch.equal(one, fetched.state_dict()[name]) for name, one in whole.state_dict().items())


def test_a_downloaded_model_gives_the_same_bits_as_its_folder(hub: FakeHub, tiny_wan: ModelSource) -> None:
    wan = load_family(WAN)
    pixels = torch.arange(3 * 32 * 32, dtype=torch.uint8).reshape(1, 3, 32, 32)
    here, there = (
        wan.build_media_encoder(wan.read_model(source), torch.device("cpu")).encode(pixels)["latents"]
        for source in (tiny_wan, ModelSource("owner/model"))
    )
    assert torch.equal(here, there)


def test_offline_a_downloaded_model_is_loaded_without_a_request(hub: FakeHub) -> None:
    wan = load_family(WAN)
    wan.build_text_encoder(wan.read_model(ModelSource("owner/model")), torch.device("cpu"), torch.float32)
    hub.requests.clear()
    wan.build_text_encoder(wan.read_model(ModelSource("owner/model", offline=True)), torch.device("cpu"), torch.float32)
    assert not hub.requests


def test_offline_a_missing_component_raises_an_error_with_the_model(hub: FakeHub) -> None:
    wan = load_family(WAN)
    wan.read_model(ModelSource("owner/model"))
    model = wan.read_model(ModelSource("owner/model", offline=True))
    with pytest.raises(ModelError, match=r"owner/model .*not complete in the hub's cache, and model.offline is true"):
        wan.build_media_encoder(model, torch.device("cpu"))


def test_offline_a_model_that_is_not_in_the_cache_raises_an_error(hub: FakeHub) -> None:
    assert "model.offline is true" in read_error(ModelSource("owner/model", offline=True))
    assert not hub.requests


def test_the_error_of_a_gated_model_names_its_licence_and_the_token(hub: FakeHub) -> None:
    message = read_error(ModelSource(GATED))
    assert GATED in message and "licence" in message and "HF_TOKEN" in message


@pytest.mark.parametrize("name", ["missing/nothing", "owner/private"])
def test_the_error_of_an_unknown_model_mentions_folders_and_private_models(hub: FakeHub, name: str) -> None:
    message = read_error(ModelSource(name))
    assert name in message and "no such folder" in message and "private" in message


def test_the_error_of_an_unknown_revision_names_it(hub: FakeHub) -> None:
    assert "model.revision is 'v9'" in read_error(ModelSource("owner/model", revision="v9"))


def test_the_error_of_a_rejected_token_names_it(hub: FakeHub) -> None:
    assert "rejects the token in HF_TOKEN" in read_error(ModelSource("owner/token"))


def test_the_error_of_a_failing_server_has_its_status(hub: FakeHub) -> None:
    assert "with status 500" in read_error(ModelSource("owner/broken"))


def test_without_a_network_the_error_comes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    begin = time.monotonic()
    message = read_error(ModelSource("owner/model"))
    assert "cannot be reached" in message and "owner/model" in message
    assert time.monotonic() - begin < 10


def test_a_cache_that_cannot_be_written_raises_an_error_with_the_cause(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    assert "owner/model could not be downloaded into the hub's cache: Not a directory" in read_error(
        ModelSource("owner/model")
    )


@pytest.mark.parametrize("name", ["not a name", "-x/y", "x/y-"])
def test_a_path_that_is_no_folder_and_no_repository_raises_an_error_without_a_request(hub: FakeHub, name: str) -> None:
    message = read_error(ModelSource(name))
    assert name in message and "no such folder" in message
    assert not hub.requests
