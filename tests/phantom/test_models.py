"""Diffusers' models on the phantom: schedulers, whole pipelines, attention, and training steps up to full size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from supertuner.models.families.flux.family import tiny_flux_pipeline
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline

GIB = 1 << 30
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name.lower())
def test_attention_runs_forward_and_backward(backend: SDPBackend) -> None:
    q, k, v = (torch.empty(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    before = torch.cuda.memory_allocated()
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v).float().sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape
    scores = 2 * 8 * 1024 * 1024 * 2
    assert (torch.cuda.max_memory_allocated() - before > scores) == (backend is SDPBackend.MATH)


def test_the_scheduler_of_wan_takes_its_steps() -> None:
    """UniPC solves small linear systems on the device."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    scheduler.set_timesteps(6, device="cuda")
    scheduler.set_begin_index(0)  # as pipelines do; to find a timestep by its value takes a kernel
    sample = torch.empty(1, 16, 1, 8, 8, device="cuda")
    for timestep in scheduler.timesteps:
        sample = scheduler.step(torch.empty_like(sample), timestep, sample, return_dict=False)[0]
    assert sample.is_cuda


def test_linear_systems_are_solved_without_complaint() -> None:
    for size in (1, 2, 3, 40):
        stale = torch.arange(1, 5000).to("cuda")
        del stale
        matrix = torch.eye(size, device="cuda")
        assert torch.linalg.solve(matrix, torch.ones(size, device="cuda")).shape == (size,)
        assert torch.linalg.inv(matrix.expand(4, size, size)).shape == (4, size, size)


def test_a_pipeline_of_wan_samples() -> None:
    pipe = build_pipeline(tiny_wan_pipeline, 0).to("cuda")
    frames = pipe("a red square", height=32, width=48, num_frames=5, num_inference_steps=4, output_type="np").frames
    assert frames.shape == (1, 5, 32, 48, 3)


def test_a_pipeline_of_flux_samples() -> None:
    pipe = build_pipeline(tiny_flux_pipeline, 0).to("cuda")
    images = pipe("a red square", height=32, width=48, num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 32, 48, 3)


def lora_step(**sizes: int) -> None:
    """One step of a LoRA on Wan's transformer, with checkpointing, as the trainer does it."""
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    frames, side = sizes.pop("frames"), sizes.pop("side")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = WanTransformer3DModel(**sizes)
            model.requires_grad_(False)
            model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS))
    finally:
        torch.set_default_dtype(torch.float32)
    model = model.to_empty(device="cuda")
    model.enable_gradient_checkpointing()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    latents = torch.empty(1, 16, frames, side, side, device="cuda", dtype=torch.bfloat16)
    text = torch.empty(1, 512, 4096, device="cuda", dtype=torch.bfloat16)
    when = torch.zeros(1, device="cuda", dtype=torch.long)
    predicted = model(hidden_states=latents, timestep=when, encoder_hidden_states=text, return_dict=False)[0]
    (predicted.float() - latents.float()).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    assert all(parameter.grad is not None for parameter in trained)
    assert all("exp_avg" in optimizer.state[parameter] for parameter in trained)


def test_a_lora_step_of_two_layers_leaves_nothing_behind() -> None:
    before = torch.cuda.memory_allocated()
    lora_step(num_layers=2, frames=5, side=20)
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert torch.cuda.max_memory_allocated() > GIB


def test_a_lora_step_of_all_fourteen_billion_parameters_has_its_real_peak() -> None:
    """42,525 tokens. On fake tensors the same step came to 56.3 GiB: another way to the same figure."""
    lora_step(num_layers=40, frames=21, side=90)
    assert torch.cuda.max_memory_allocated() / GIB == pytest.approx(56.3, rel=0.03)
