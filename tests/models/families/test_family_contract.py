"""The contract of `Family`, on each variant of each family."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from supertuner.core.errors import ModelError
from supertuner.models.fingerprint import fingerprint
from supertuner.models.spec import ModelDescription, ModelSource, SampleRequest, Tensors
from tests.models.families.pipelines import CASES, EDIT_CASE, WrittenPipeline

CPU = torch.device("cpu")
pytestmark = pytest.mark.parametrize(
    "written", (*CASES, EDIT_CASE), ids=lambda case: case.name, indirect=True, scope="session"
)


def media(shape: tuple[int, ...], count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)


def encoded(written: WrittenPipeline, count: int = 2) -> tuple[torch.Tensor, Tensors, Tensors]:
    """Latents, conditions and text of a batch."""
    fields = written.family.build_media_encoder(written.model, CPU).encode(media(written.case.shape, count))
    captions = ["a red circle", "two öddly wörded 猫", "", "a"][:count]
    text = written.text_encoder(torch.float32).encode(captions)
    if written.model.edits_images:
        originals = media((3, 64, 32), count, seed=9)
        fields["condition"] = written.family.build_media_encoder(written.model, CPU).encode(originals)["latents"]
    return fields.pop("latents"), fields, written.family.pad_text(written.model, text)


def sample_request(written: WrittenPipeline, **changed: object) -> SampleRequest:
    shape = written.case.shape
    picture = media((shape[-2], shape[-1], 3), 1, seed=7)[0].numpy()
    request: dict[str, object] = {
        "prompt": "a red circle",
        "negative_prompt": "",
        "seed": 3,
        "width": shape[-1],
        "height": shape[-2],
        "frames": shape[1] if len(shape) == 4 else 1,
        "inference_steps": 2,
        "guidance_scale": 3.0,
        "image": picture,
    }
    return SampleRequest(**(request | changed))  # type: ignore[arg-type]


def test_a_model_is_read_from_its_config_files_alone(written: WrittenPipeline, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(written.folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    model = written.family.read_model(ModelSource(str(bare)))
    assert model.experts == written.model.experts and model.shift == written.model.shift
    assert model.experts[0].sigma_max == 1.0 and model.experts[-1].sigma_min == 0.0


def test_the_experts_divide_the_sigmas_without_gap_or_overlap(written: WrittenPipeline) -> None:
    ranges = sorted((expert.sigma_min, expert.sigma_max) for expert in written.model.experts)
    assert [low for low, _ in ranges[1:]] == [high for _, high in ranges[:-1]]


def test_encoded_fields_have_one_row_per_sample_in_fp32_on_the_cpu(written: WrittenPipeline) -> None:
    fields = written.family.build_media_encoder(written.model, CPU).encode(media(written.case.shape, 3))
    for tensor in fields.values():
        assert (len(tensor), tensor.dtype, tensor.device, tensor.requires_grad) == (3, torch.float32, CPU, False)
    assert fields["latents"].std() > 0.01


def test_a_sample_is_encoded_to_the_same_bits_alone_and_in_a_batch(written: WrittenPipeline) -> None:
    pixels = media(written.case.shape, 3)
    together = written.family.build_media_encoder(written.model, CPU).encode(pixels)
    alone = written.family.build_media_encoder(written.model, CPU).encode(pixels[1:2])
    for name, tensor in alone.items():
        assert torch.equal(tensor[0], together[name][1]), name


def test_a_caption_is_encoded_to_the_same_bits_alone_and_in_a_batch(written: WrittenPipeline) -> None:
    captions = ["a blue square", "", "something  with &amp; odd   spacing"]
    together = written.text_encoder(torch.float32).encode(captions)
    alone = written.text_encoder(torch.float32).encode(captions[2:])[0]
    for name, tensor in alone.items():
        assert torch.equal(tensor, together[2][name]), name
        assert tensor.device == CPU and not tensor.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_text_is_encoded_in_the_requested_precision(written: WrittenPipeline, dtype: torch.dtype) -> None:
    fields = written.text_encoder(dtype).encode(["a star"])[0]
    assert {tensor.dtype for tensor in fields.values()} == {dtype}


def test_the_prediction_has_the_shape_of_the_latents_and_its_gradient_reaches_every_block(
    written: WrittenPipeline,
) -> None:
    latents, conditions, text = encoded(written)
    for expert in written.model.experts:
        module = written.family.load_denoiser(written.model, expert, torch.float32)
        assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
        module.requires_grad_(True)
        levels = torch.tensor([expert.sigma_min + 0.01, expert.sigma_max])
        predicted = written.family.denoise(written.model, module, latents, levels, text, conditions)
        assert predicted.shape == latents.shape
        predicted.square().mean().backward()
        linear = [(name, one) for name, one in module.named_modules() if isinstance(one, nn.Linear)]
        untouched = [name for name, one in linear if one.weight.grad is None or not one.weight.grad.any()]
        assert [name for name in untouched if not name.startswith(written.case.without_gradient)] == []
        assert bool(untouched) == bool(written.case.without_gradient)


def test_a_sample_is_denoised_alike_alone_and_in_a_batch(written: WrittenPipeline) -> None:
    latents, conditions, text = encoded(written)
    module = written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)
    levels = torch.tensor([0.95, 0.99])

    def denoised(rows: slice) -> torch.Tensor:
        some = [{name: one[rows] for name, one in fields.items()} for fields in (text, conditions)]
        return written.family.denoise(written.model, module, latents[rows], levels[rows], some[0], some[1])

    with torch.no_grad():
        torch.testing.assert_close(denoised(slice(1, 2)), denoised(slice(0, 2))[1:], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(denoised(slice(0, 1)), denoised(slice(0, 2))[1:])


def test_a_bf16_module_denoises_under_autocast(written: WrittenPipeline) -> None:
    latents, conditions, text = encoded(written)
    module = written.family.load_denoiser(written.model, written.model.experts[0], torch.bfloat16)
    exact = written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)
    levels = torch.tensor([0.95, 0.99])
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            rough = written.family.denoise(written.model, module, latents, levels, text, conditions)
        fine = written.family.denoise(written.model, exact, latents, levels, text, conditions)
    # Flux also rounds its timestep to bf16, in steps of 4 of 1000, in its pipeline and therefore in training.
    assert (rough.float() - fine).norm() < 0.1 * fine.norm()


def test_loading_a_module_twice_gives_the_same_bits(written: WrittenPipeline) -> None:
    latents, conditions, text = encoded(written)
    results = []
    for _ in range(2):
        module = written.family.load_denoiser(written.model, written.model.experts[-1], torch.float32)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in (*module.parameters(), *module.buffers()))
        with torch.no_grad():
            levels = torch.tensor([0.2, 0.4])
            results.append(written.family.denoise(written.model, module, latents, levels, text, conditions))
    assert torch.equal(results[0], results[1])


def test_token_count_is_the_number_of_tokens_in_the_denoiser(written: WrittenPipeline) -> None:
    latents, conditions, text = encoded(written)
    module = written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)
    seen: list[int] = []
    inner = module.get_submodule(written.case.token_layer)
    handle = inner.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[1]))
    with torch.no_grad():
        written.family.denoise(written.model, module, latents, torch.tensor([0.9, 0.9]), text, conditions)
    handle.remove()
    shown = [latents, *(conditions.values() if written.model.edits_images else ())]
    assert seen == [sum(written.family.token_count(written.model, tuple(one.shape[1:])) for one in shown)]


def test_equal_requests_give_equal_samples_and_another_seed_another_sample(written: WrittenPipeline) -> None:
    sampler = written.family.build_sampler(written.model, {}, CPU, torch.float32)
    first, again = sampler.sample(sample_request(written)), sampler.sample(sample_request(written))
    fresh = written.family.build_sampler(written.model, {}, CPU, torch.float32).sample(sample_request(written))
    shape = written.case.shape
    frames = shape[1] if len(shape) == 4 else 1
    assert first.dtype == np.uint8 and first.shape == (frames, shape[-2], shape[-1], 3)
    assert np.array_equal(first, again) and np.array_equal(first, fresh)
    assert not np.array_equal(first, sampler.sample(sample_request(written, seed=4)))
    assert not np.array_equal(first, sampler.sample(sample_request(written, prompt="something else")))


def test_the_sampler_uses_the_passed_modules(written: WrittenPipeline) -> None:
    parts = {e.component: written.family.load_denoiser(written.model, e, torch.float32) for e in written.model.experts}
    before = written.family.build_sampler(written.model, parts, CPU, torch.float32).sample(sample_request(written))
    for module in parts.values():
        with torch.no_grad():
            module.get_submodule(written.case.last_layer).weight.mul_(3)  # type: ignore[operator, union-attr]
    after = written.family.build_sampler(written.model, parts, CPU, torch.float32).sample(sample_request(written))
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sampling_does_not_change_a_module(written: WrittenPipeline, dtype: torch.dtype) -> None:
    module = written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)
    module.train()
    module.get_submodule(written.case.last_layer).eval()
    modes = [one.training for one in module.modules()]
    sampler = written.family.build_sampler(written.model, {written.model.experts[0].component: module}, CPU, dtype)
    sampler.sample(sample_request(written))
    assert [one.training for one in module.modules()] == modes
    assert not module._forward_pre_hooks and not module._forward_hooks
    assert not torch.is_autocast_enabled("cpu")


def test_no_function_uses_the_global_random_state(written: WrittenPipeline) -> None:
    before = torch.get_rng_state()
    latents, conditions, text = encoded(written)
    module = written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)
    written.family.denoise(written.model, module, latents, torch.tensor([0.9, 0.95]), text, conditions)
    written.family.build_sampler(written.model, {}, CPU, torch.float32).sample(sample_request(written))
    assert torch.equal(before, torch.get_rng_state())


def test_unsupported_shapes_get_a_reason(written: WrittenPipeline) -> None:
    *_, height, width = written.case.shape
    lead = written.case.shape[:-2]
    assert written.family.unsupported_reason(written.model, written.case.shape) is None
    off = written.case.forbidden_offset
    for wrong in ((*lead, height + off, width), (*lead, height, width - off)):
        reason = written.family.unsupported_reason(written.model, wrong)
        assert reason is not None and f"{wrong[-1]}×{wrong[-2]}" in reason and "multiples of" in reason
    assert "RGB" in str(written.family.unsupported_reason(written.model, (1, *written.case.shape[1:])))
    assert "RGB" in str(written.family.unsupported_reason(written.model, (2, 48_000)))


def test_a_sample_of_an_unsupported_size_raises_an_error_with_the_reason(written: WrittenPipeline) -> None:
    sampler = written.family.build_sampler(written.model, {}, CPU, torch.float32)
    with pytest.raises(ModelError, match="multiples of"):
        sampler.sample(sample_request(written, width=written.case.shape[-1] + written.case.forbidden_offset))


def test_target_presets_are_linear_layers_and_all_linear_has_all_of_them(written: WrittenPipeline) -> None:
    module = written.family.load_denoiser(written.model, written.model.experts[0], torch.float32)
    linear = {name for name, one in module.named_modules() if isinstance(one, nn.Linear)}

    def matched(ending: str) -> set[str]:
        return {name for name, _ in module.named_modules() if name == ending or name.endswith(f".{ending}")}

    presets = {name: written.family.target_presets[name] for name in ("attention", "attention_mlp", "all_linear")}
    for endings in presets.values():
        assert all(matched(ending) and matched(ending) <= linear for ending in endings)
    assert set().union(*map(matched, presets["all_linear"])) == linear
    assert set(presets["attention"]) < set(presets["attention_mlp"]) < set(presets["all_linear"])
    assert set(written.family.export_prefix) >= {expert.component for expert in written.model.experts}


def test_media_files_and_text_files_are_those_of_the_encoders(written: WrittenPipeline, tmp_path: Path) -> None:
    files = [written.family.media_files(written.model), written.family.text_files(written.model)]
    assert all(any(file.suffix == ".safetensors" for file in some) for some in files)
    copy = tmp_path / "copy"
    shutil.copytree(written.folder, copy)
    moved = written.family.read_model(ModelSource(str(copy)))
    assert fingerprint(written.family.media_files(moved), None) == fingerprint(files[0], None)
    assert fingerprint(written.family.text_files(moved), None) == fingerprint(files[1], None)


def test_a_tiny_pipeline_is_small_and_depends_only_on_its_seed(written: WrittenPipeline, tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> tuple[ModelDescription, str]:
        written.family.write_tiny_pipeline(tmp_path / name, seed)
        model = written.family.read_model(ModelSource(str(tmp_path / name)))
        files = sorted((tmp_path / name).rglob("*.safetensors"))
        assert sum(file.stat().st_size for file in files) < 1 << 20
        return model, fingerprint(files, None)

    assert weights("a", 1)[1] == weights("b", 1)[1] != weights("c", 2)[1]


def test_truncated_captions_are_counted(written: WrittenPipeline) -> None:
    encoder = written.text_encoder(torch.float32)
    encoder.encode(["a red circle", ""])
    assert encoder.truncated_captions == 0
    encoder.encode(["a red circle, " * 400])
    assert encoder.truncated_captions == (0 if written.model.edits_images else 1), (
        "Qwen-Image-Edit reads whatever it is told"
    )
