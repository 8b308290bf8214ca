"""Encoding and sampling take what was forecast too: published models at full size, parts of no value on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.overrides import _get_current_function_mode_stack

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Silence
from supertuner.models import loading
from supertuner.models.published import described
from supertuner.models.spec import Family, Model
from supertuner.plan.trace.caching_allocator import reserved
from supertuner.plan.trace.cuda_kernels import Cuda
from supertuner.plan.trace.phases import trace_media, trace_sampling, trace_text
from supertuner.plan.trace.record import Trace
from supertuner.plan.trace.shapes import Shaper, hollowed
from supertuner.step.precision import Precision
from supertuner.step.trainee import experts_of, rules_of, trained_of, trainee_of, weight_format

NAMES = {
    "wan2.2": "wan-ai/wan2.2-t2v-a14b-diffusers",
    "flux": "black-forest-labs/flux.1-dev",
    "qwen-image": "qwen/qwen-image",
    "sd3.5": "stabilityai/stable-diffusion-3.5-medium",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
}
GPU = torch.device("cuda")


def on_the_gpu(module: nn.Module) -> nn.Module:
    """A module of the meta device with its weights on the GPU; those that are shared stay so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, own in part._parameters.items():
            if own is not None:
                if own not in made:
                    made[own] = nn.Parameter(torch.empty_like(own, device=GPU), requires_grad=False)
                part._parameters[name] = made[own]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=GPU)
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                vars(part)[name] = torch.zeros_like(value, device="cpu")
    return module


@pytest.fixture(autouse=True)
def parts_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of traces, hollow parts are on the GPU."""
    hollow = loading.module

    def module(model: Model, part: str, dtype: torch.dtype) -> nn.Module:
        made = hollow(model, part, dtype)
        return made if _tracing() else on_the_gpu(made)

    monkeypatch.setattr(loading, "module", module)


def _tracing() -> bool:
    return detect_fake_mode() is not None or bool(_get_current_function_mode_stack())


def known(family: str) -> tuple[RunConfig, Family, Model]:
    config = RunConfig.model_validate({"model": {"family": family, "path": NAMES[family]}})
    found, model, _ = described(config.model)
    return config, found, hollowed(model)


def close(trace: Trace, allowed: float = 0.03) -> None:
    assert reserved(trace).allocated_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=allowed)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_a_caption_takes_what_was_forecast(name: str) -> None:
    config, family, model = known(name)
    trace = trace_text(config, family, model, device=Cuda())
    family.text_encoder(model, GPU, torch.bfloat16).encode(["a"])
    close(trace)


@pytest.mark.parametrize(("name", "media"), [("wan2.2", (3, 9, 480, 832)), ("sdxl", (3, 1024, 1024))])
def test_encoding_media_takes_what_was_forecast(name: str, media: tuple[int, ...]) -> None:
    """As far as the phantom knows: its cuDNN has no workspaces."""
    _, family, model = known(name)
    trace = trace_media(family, model, media, device=Cuda())
    family.media_encoder(model, GPU).encode(torch.zeros(1, *media, dtype=torch.uint8))
    close(trace)


def test_a_sample_in_the_middle_of_training_takes_what_was_forecast() -> None:
    config, family, model = known("sd3.5")
    shape = Shaper(config, family, model).batch(1, (3, 1024, 1024))
    trace = trace_sampling(config, family, model, shape, device=Cuda()).trace
    precision, expert = Precision("bf16", GPU), experts_of(config, model)[0]
    module = family.denoiser(model, expert, weight_format(config, precision))
    trained = trained_of(config, family, expert, module, precision, Silence())
    trainee = trainee_of(config, expert, trained, precision)
    for parameter in trainee.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    vae, encoder = loading.module(model, "vae", torch.float32), family.text_encoder(model, GPU, torch.bfloat16)
    rules = rules_of(config, family, model, precision, Silence())
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        module.eval()
        encoder.encode(["a", "b"])
        both = {name: torch.zeros(2, *one.shape, dtype=one.dtype, device=GPU) for name, one in shape.text.items()}
        latents = torch.zeros(2, *shape.latents, device=GPU)
        with precision.autocast():
            rules.denoise(module, latents, torch.zeros(2, device=GPU), both, {})
        vae.decode(latents[:1], return_dict=False)
    close(trace, 0.05)  # a VAE decides it: fake tensors of a single picture do not always lie in torch's order
