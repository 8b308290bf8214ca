"""Encoding and sampling take what was forecast too: published models at full size, parts of no value on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.overrides import _get_current_function_mode_stack

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import NullSink
from supertuner.models import loading
from supertuner.models.published_models import describe_model
from supertuner.models.spec import Family, ModelDescription
from supertuner.plan.trace.caching_allocator import simulate_allocator
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.encoder_shapes import EncoderShapeProbe, without_weights
from supertuner.plan.trace.execution_trace import ExecutionTrace
from supertuner.plan.trace.inference_phases import trace_media_encoding, trace_sampling, trace_text_encoding
from supertuner.step.expert_setup import (
    build_expert_state,
    build_step_options,
    build_trainable_expert,
    selected_experts,
    weight_dtype,
)
from supertuner.step.precision import ComputePrecision

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
    hollow = loading.load_module

    def module(model: ModelDescription, part: str, dtype: torch.dtype) -> nn.Module:
        made = hollow(model, part, dtype)
        return made if _tracing() else on_the_gpu(made)

    monkeypatch.setattr(loading, "module", module)


def _tracing() -> bool:
    return detect_fake_mode() is not None or bool(_get_current_function_mode_stack())


def known(family: str) -> tuple[RunConfig, Family, ModelDescription]:
    config = RunConfig.model_validate({"model": {"family": family, "path": NAMES[family]}})
    found, model, _ = describe_model(config.model)
    return config, found, without_weights(model)


def close(trace: ExecutionTrace, allowed: float = 0.03) -> None:
    assert simulate_allocator(trace).allocated_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=allowed)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_a_caption_takes_what_was_forecast(name: str) -> None:
    config, family, model = known(name)
    trace = trace_text_encoding(config, family, model, device=CudaDevice())
    family.build_text_encoder(model, GPU, torch.bfloat16).encode(["a"])
    close(trace)


@pytest.mark.parametrize(("name", "media"), [("wan2.2", (3, 9, 480, 832)), ("sdxl", (3, 1024, 1024))])
def test_encoding_media_takes_what_was_forecast(name: str, media: tuple[int, ...]) -> None:
    """As far as the phantom knows: its cuDNN has no workspaces."""
    _, family, model = known(name)
    trace = trace_media_encoding(family, model, media, device=CudaDevice())
    family.build_media_encoder(model, GPU).encode(torch.zeros(1, *media, dtype=torch.uint8))
    close(trace)


def test_a_sample_in_the_middle_of_training_takes_what_was_forecast() -> None:
    config, family, model = known("sd3.5")
    shape = EncoderShapeProbe(config, family, model).batch_shape(1, (3, 1024, 1024))
    trace = trace_sampling(config, family, model, shape, device=CudaDevice()).trace
    precision, expert = ComputePrecision("bf16", GPU), selected_experts(config, model)[0]
    module = family.load_denoiser(model, expert, weight_dtype(config, precision))
    trained = build_trainable_expert(config, family, expert, module, precision, NullSink())
    trainee = build_expert_state(config, expert, trained, precision)
    for parameter in trainee.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    vae, encoder = (
        loading.load_module(model, "vae", torch.float32),
        family.build_text_encoder(model, GPU, torch.bfloat16),
    )
    rules = build_step_options(config, family, model, precision, NullSink())
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
