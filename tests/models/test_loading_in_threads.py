"""Threads that load and build modules at the same time do not disturb each other, nor the rest of the process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models import loading
from supertuner.models.adapters.attach import attach
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelDescription, ModelSource, SampleRequest

ROUNDS = 40
CPU = torch.device("cpu")
IMAGE = SampleRequest("a red square", "", 0, 32, 32, frames=1, inference_steps=1, guidance_scale=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    folder = tmp_path_factory.mktemp("tiny") / "wan"
    family = load_family("wan2.2")
    family.write_tiny_pipeline(folder, 0)
    return family.read_model(ModelSource(str(folder)))


def hammer(model: ModelDescription, rounds: int) -> list[str]:
    """Load, build, attach, encode and sample in several threads at once; what came out without values or changed."""
    family = load_family("wan2.2")
    patched = nn.Module.register_parameter, nn.init.kaiming_uniform_, nn.init.normal_
    stop = threading.Event()

    def load(component: str) -> list[str]:
        empty = []
        while not stop.is_set():
            module = loading.load_module(model, component, torch.float32)
            empty += [f"{component}: {name}" for name, tensor in module.named_parameters() if tensor.is_meta]
            loading.build_meta_module(model, "transformer")
        return empty

    def build() -> list[str]:
        empty, expected = [], None
        for _ in range(rounds):
            base = loading.load_module(model, "transformer", torch.float32)
            trained = attach(base, AdapterSettings(rank=2), ("to_q", "to_k"), seed=1, name="high_noise").parameters
            values = {name: tensor.detach().clone() for name, tensor in trained.items() if not tensor.is_meta}
            empty += [f"adapter: {name}" for name in trained if name not in values]
            expected = expected or values
            empty += [f"adapter: {name} differs" for name in values if not torch.equal(values[name], expected[name])]
        return empty

    def encode() -> list[str]:
        """As the thread that encodes the next epoch."""
        pixels, found = torch.full((1, 3, 32, 32), 100, dtype=torch.uint8), set()
        while not stop.is_set():
            latents = family.build_media_encoder(model, CPU).encode(pixels)["latents"]
            (text,) = family.build_text_encoder(model, CPU, torch.float32).encode(["a red square"])
            found.add((latents.numpy().tobytes(), text["embeds"].numpy().tobytes()))
        return ["encoded samples differ"] * (len(found) > 1)

    def validate() -> list[str]:
        """As a validation, which loads what the run does not hold."""
        parts = {part: loading.load_module(model, part, torch.float32) for part in ("transformer", "transformer_2")}
        found = set()
        while not stop.is_set():
            found.add(family.build_sampler(model, parts, CPU, torch.float32).sample(IMAGE).tobytes())
        return ["generated samples differ"] * (len(found) > 1)

    with ThreadPoolExecutor(5) as pool:
        loads = [pool.submit(load, component) for component in ("vae", "text_encoder")]
        loads += [pool.submit(encode), pool.submit(validate)]
        try:
            built = pool.submit(build).result()
        finally:
            stop.set()
        found = [*built, *(line for one in loads for line in one.result())]
    now = nn.Module.register_parameter, nn.init.kaiming_uniform_, nn.init.normal_
    return [*found, *(["functions of torch stay replaced"] if now != patched else [])]


def test_modules_built_beside_loads_have_their_values(model: ModelDescription) -> None:
    assert hammer(model, ROUNDS) == []


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_thousands_of_modules_built_beside_loads_have_their_values(model: ModelDescription) -> None:
    assert hammer(model, 3000) == []


def test_a_load_beside_training_does_not_change_the_random_state(model: ModelDescription) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loading.load_module, model, "vae", torch.float32).result()
        assert torch.equal(torch.get_rng_state(), before)
        loading.load_module(model, "text_encoder", torch.float32)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_module_without_values_is_never_used(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"transformer was not loaded completely: 1\.weight has no values"):
        loading.require_values(module, "transformer")
