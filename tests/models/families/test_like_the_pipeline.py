"""Training calls a denoiser as the family's pipeline does: compared with calls captured while it samples."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline
from PIL import Image
from torch import nn

from supertuner.models.spec import Tensors
from tests.models.families.pipelines import WrittenPipeline
from tests.models.families.test_family_contract import CPU, media, sample_request

PACKED = ("flux", "qwen-image")
"""Families whose pipelines pass tokens, and timesteps from 0 to 1, to the denoiser."""
PROMPT = "a  red circle &amp; a “blue” square"


class CapturedCalls:
    """Recorded calls of a pipeline's denoisers: component, inputs, output."""

    def __init__(self, pipeline: Any, parts: list[str]) -> None:
        self.calls: list[tuple[str, dict[str, Any], torch.Tensor]] = []
        for part in parts:
            getattr(pipeline, part).register_forward_hook(self._hook(part), with_kwargs=True)

    def _hook(self, part: str) -> Any:
        def remember(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: tuple[torch.Tensor]) -> None:
            inputs = dict(zip(("hidden_states", "timestep"), args, strict=False)) | kwargs
            self.calls.append((part, inputs | (inputs.get("added_cond_kwargs") or {}), output[0]))

        return remember


@pytest.fixture
def loaded(written: WrittenPipeline) -> Any:
    """The pipeline as diffusers loads it, with aligned weights as in our loading."""
    pipeline = DiffusionPipeline.from_pretrained(written.folder)
    pipeline.set_progress_bar_config(disable=True)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.data = tensor.data.clone()
    return pipeline


def run(pipeline: Any, written: WrittenPipeline, steps: int, first_frame: np.ndarray[Any, Any], **options: Any) -> Any:
    shape = written.case.shape
    if written.case.family == "wan2.2":
        options = {"num_frames": shape[1], "max_sequence_length": 512} | options
    if isinstance(pipeline, WanImageToVideoPipeline):
        options["image"] = Image.fromarray(first_frame)
    return pipeline(
        prompt=PROMPT,
        height=shape[-2],
        width=shape[-1],
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(3),
        **guidance(written, {"guidance_scale": 1.0} | options),
    )


def is_qwen(written: WrittenPipeline) -> bool:
    return written.case.family.startswith("qwen-image")


def guidance(written: WrittenPipeline, options: dict[str, Any]) -> dict[str, Any]:
    """Qwen-Image has another name for it, and has no guidance without a negative prompt."""
    if not is_qwen(written):
        return options
    scale = options.pop("guidance_scale")
    return options | {"true_cfg_scale": scale, "negative_prompt": "" if scale > 1 else None}


def ours(written: WrittenPipeline, video: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Text and conditions as in training."""
    fields = written.family.build_media_encoder(written.model, CPU).encode(video)
    text = written.family.build_text_encoder(written.model, CPU, torch.float32).encode([PROMPT])
    return written.family.pad_text(written.model, text), {n: t for n, t in fields.items() if n != "latents"}


def unpacked(written: WrittenPipeline, hidden: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pipeline's input and output as latents and prediction in our layout."""
    if written.case.family in PACKED:
        _, height, width = written.case.shape
        unpack = DiffusionPipeline.from_pretrained(written.folder)._unpack_latents
        both = unpack(hidden, height, width, 8), unpack(output, height, width, 8)
        return both if written.case.family == "flux" else (both[0][:, :, 0], both[1][:, :, 0])
    return hidden[:, : output.shape[1]], output


def sigma_of(written: WrittenPipeline, timestep: torch.Tensor) -> torch.Tensor:
    """The sigma of the pipeline's timestep; for a row of a table, its middle."""
    first = timestep.flatten()[:1].double()
    if written.model.alphas_cumprod is not None:
        return (first + 0.5) / len(written.model.alphas_cumprod)
    return first / (1 if written.case.family in PACKED else 1000)


def test_predictions_equal_those_in_the_pipeline(written: WrittenPipeline, loaded: Any) -> None:
    video = media(written.case.shape, 1)
    first_frame = (video[0] if video.ndim == 4 else video[0, :, 0]).permute(1, 2, 0).contiguous().numpy()
    captured = CapturedCalls(loaded, [expert.component for expert in written.model.experts])
    run(loaded, written, 4, first_frame)
    text, conditions = ours(written, video)
    assert {part for part, _, _ in captured.calls} == {expert.component for expert in written.model.experts}
    for part, inputs, output in captured.calls:
        expert = next(expert for expert in written.model.experts if expert.component == part)
        level = sigma_of(written, inputs["timestep"])
        assert expert.sigma_min <= level.item() < expert.sigma_max or level.item() == expert.sigma_max == 1.0
        latents, expected = unpacked(written, inputs["hidden_states"], output)
        module = written.family.load_denoiser(written.model, expert, torch.float32)
        with torch.no_grad():
            predicted = written.family.denoise(written.model, module, latents, level.float(), text, conditions)
        torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)


def test_inputs_equal_those_in_the_pipeline_to_the_bit(written: WrittenPipeline, loaded: Any) -> None:
    video = media(written.case.shape, 1)
    first_frame = (video[0] if video.ndim == 4 else video[0, :, 0]).permute(1, 2, 0).contiguous().numpy()
    part = written.model.experts[0].component
    captured = CapturedCalls(loaded, [part])
    run(loaded, written, 2, first_frame)
    _, theirs, _ = captured.calls[0]
    text, conditions = ours(written, video)
    latents, _ = unpacked(written, theirs["hidden_states"], captured.calls[0][2])
    module = written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)
    mine = CapturedCalls(SimpleNamespace(**{part: module}), [part])
    level = sigma_of(written, theirs["timestep"]).float()
    with torch.no_grad():
        written.family.denoise(written.model, module, latents, level, text, conditions)
    _, given, _ = mine.calls[0]
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            if name == "timestep":
                torch.testing.assert_close(given[name].float(), value.float().expand(given[name].shape))
                continue
            assert given[name].shape == value.shape, name
            assert torch.equal(given[name], value), name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With two threads, oneDNN may round convolutions of equal weights differently in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_sample_equals_that_of_the_pipeline_to_the_bit(written: WrittenPipeline, loaded: Any) -> None:
    request = sample_request(written, prompt=PROMPT)
    assert request.image is not None
    sample = written.family.build_sampler(written.model, {}, CPU, torch.float32).sample(request)
    options = {"guidance_scale": request.guidance_scale, "output_type": "np"}
    made = run(loaded, written, request.inference_steps, request.image, **options)
    theirs = made.frames[0] if written.case.family == "wan2.2" else made.images
    assert np.array_equal(sample, (theirs * 255).round().astype(np.uint8))


def test_latents_are_normalized_as_the_pipeline_decodes_them(written: WrittenPipeline, loaded: Any) -> None:
    """Undoing the pipeline's normalization gives the mode of the VAE's posterior."""
    video = media(written.case.shape, 1)
    latents = written.family.build_media_encoder(written.model, CPU).encode(video)["latents"]
    config = loaded.vae.config
    with torch.no_grad():
        pixels = video.float() / 255 * 2 - 1
        mode = loaded.vae.encode(pixels[:, :, None] if is_qwen(written) else pixels).latent_dist.mode()
    if is_qwen(written):
        latents = latents[:, :, None]
    if written.case.family in ("flux", "sdxl", "sd3.5"):
        undone = latents / config.scaling_factor + (config.shift_factor or 0.0)
    else:
        shape = (1, -1, 1, 1, 1)
        undone = latents * torch.tensor(config.latents_std).view(shape) + torch.tensor(config.latents_mean).view(shape)
    torch.testing.assert_close(undone, mode, rtol=1e-4, atol=1e-5)
