"""The forecasts of encoding and sampling hold for published models at full size, with uninitialized weights."""

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
    """Moves a module from the meta device to the GPU, uninitialized; shared parameters stay shared."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(torch.empty_like(parameter, device=GPU), requires_grad=False)
                part._parameters[name] = moved[parameter]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=GPU)
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                vars(part)[name] = torch.zeros_like(value, device="cpu")
    return module


@pytest.fixture(autouse=True)
def parts_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of traces, modules without weights are built on the GPU."""
    load_on_meta = loading.load_module

    def load_module(model: ModelDescription, part: str, dtype: torch.dtype, *place: object) -> nn.Module:
        module = load_on_meta(model, part, dtype)
        return module if _is_tracing() else on_the_gpu(module)

    monkeypatch.setattr(loading, "load_module", load_module)


def _is_tracing() -> bool:
    return detect_fake_mode() is not None or bool(_get_current_function_mode_stack())


def described(family: str) -> tuple[RunConfig, Family, ModelDescription]:
    config = RunConfig.model_validate({"model": {"family": family, "path": NAMES[family]}})
    loaded, model, _ = describe_model(config.model)
    return config, loaded, without_weights(model)


def assert_close(trace: ExecutionTrace, tolerance: float = 0.03) -> None:
    modelled = simulate_allocator(trace).allocated_bytes
    assert modelled == pytest.approx(torch.cuda.max_memory_allocated(), rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_forecast_of_encoding_a_caption_holds(name: str) -> None:
    config, family, model = described(name)
    trace = trace_text_encoding(config, family, model, device=CudaDevice())
    family.build_text_encoder(model, GPU, torch.bfloat16).encode(["a"])
    assert_close(trace)


@pytest.mark.parametrize(("name", "media"), [("wan2.2", (3, 9, 480, 832)), ("sdxl", (3, 1024, 1024))])
def test_the_forecast_of_encoding_media_holds(name: str, media: tuple[int, ...]) -> None:
    """The phantom's cuDNN has no workspaces of its own, so they are not compared."""
    _, family, model = described(name)
    trace = trace_media_encoding(family, model, media, device=CudaDevice())
    family.build_media_encoder(model, GPU).encode(torch.zeros(1, *media, dtype=torch.uint8))
    assert_close(trace)


def test_the_forecast_of_a_sample_during_training_holds() -> None:
    config, family, model = described("sd3.5")
    shape = EncoderShapeProbe(config, family, model).batch_shape(1, (3, 1024, 1024))
    trace = trace_sampling(config, family, model, shape, device=CudaDevice())
    precision, expert = ComputePrecision("bf16", GPU), selected_experts(config, model)[0]
    module = family.load_denoiser(model, expert, weight_dtype(config, precision))
    trained = build_trainable_expert(config, family, expert, module, precision, NullSink())
    expert_state = build_expert_state(config, expert, trained, precision)
    for parameter in expert_state.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    expert_state.optimizer.step()
    expert_state.optimizer.zero_grad(set_to_none=True)
    vae, encoder = (
        loading.load_module(model, "vae", torch.float32),
        family.build_text_encoder(model, GPU, torch.bfloat16),
    )
    options = build_step_options(config, family, model, precision, NullSink())
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        module.eval()
        encoder.encode(["a", "b"])
        both = {name: torch.zeros(2, *one.shape, dtype=one.dtype, device=GPU) for name, one in shape.text.items()}
        latents = torch.zeros(2, *shape.latents, device=GPU)
        with precision.autocast():
            options.denoise(module, latents, torch.zeros(2, device=GPU), both, {})
        vae.decode(latents[:1], return_dict=False)
    assert_close(trace, 0.05)  # the VAE has the peak: strides of fake tensors of one image differ from the real ones
