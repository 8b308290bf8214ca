"""Attention backends: the chosen one is used, and one that cannot train here raises an error."""

from __future__ import annotations

import pytest
import torch
from diffusers.models import attention_dispatch

from supertuner.core.errors import ModelError
from supertuner.models.attention import ALIASES, require_backend, use_backend
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelSource

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["native", "_native_math", "NATIVE", "sdpa", "math"])
def test_torchs_own_backends_can_train_here(name: str) -> None:
    require_backend(name, CPU)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("flash", "flash-attn"),
        ("flash_attn_2", "flash-attn"),
        ("flash_attn_3", "Flash Attention 3"),
        ("_flash_3", "Flash Attention 3"),
        ("sage", "sageattention"),
        ("xformers", "xformers"),
        ("flash-hub", "kernels"),
    ],
)
def test_a_backend_that_is_not_installed_raises_an_error_with_its_package(name: str, package: str) -> None:
    with pytest.raises(ModelError) as caught:
        require_backend(name, CPU)
    assert (
        repr(name) in str(caught.value)
        and package in str(caught.value)
        and 'set model.attention: "native"' in str(caught.value)
    )


@pytest.mark.parametrize("name", ["flex", "_native_cudnn"])
def test_a_backend_that_cannot_train_on_this_device_raises_an_error(name: str) -> None:
    with pytest.raises(ModelError, match="cannot train on this machine"):
        require_backend(name, CPU)


def test_a_backend_without_a_gradient_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example sage, which has no backward pass; here torch's own with a detached output takes its place."""
    backends = attention_dispatch._AttentionBackendRegistry._backends
    native = backends[attention_dispatch.AttentionBackendName.NATIVE]

    def forward_only(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        detached: torch.Tensor = native(query, key, value, **options).detach()
        return detached

    monkeypatch.setitem(backends, attention_dispatch.AttentionBackendName.NATIVE, forward_only)
    with pytest.raises(ModelError, match="computes no gradient"):
        require_backend("native", CPU)


@pytest.mark.parametrize(("name", "guess"), [("nativ", "native"), ("flash_atn_3", "flash_attn_3"), ("sgae", "sage")])
def test_a_misspelt_backend_gets_a_suggestion(name: str, guess: str) -> None:
    with pytest.raises(ModelError, match=f"did you mean '{guess}'"):
        require_backend(name, CPU)


def test_an_unknown_backend_gets_the_list() -> None:
    with pytest.raises(ModelError, match=r"use one of .*native"):
        require_backend("something_else_entirely", CPU)


def test_every_alias_names_a_backend_of_diffusers() -> None:
    assert set(ALIASES.values()) <= {backend.value for backend in attention_dispatch.AttentionBackendName}


@pytest.mark.parametrize("which", ["wan2.2", "flux"])
def test_a_module_uses_its_backend_and_other_modules_keep_theirs(
    which: str, tiny_wan: ModelSource, tiny_flux: ModelSource
) -> None:
    one = load_family(which)
    model = one.read_model(tiny_wan if which == "wan2.2" else tiny_flux)
    chosen, other = (one.load_denoiser(model, model.experts[0], torch.float32) for _ in range(2))
    active = attention_dispatch._AttentionBackendRegistry._active_backend
    use_backend(chosen, "math")

    def backends(module: torch.nn.Module) -> set[object]:
        processors = [getattr(part, "processor", None) for part in module.modules()]
        return {getattr(processor, "_attention_backend", None) for processor in processors if processor is not None}

    assert backends(chosen) == {attention_dispatch.AttentionBackendName._NATIVE_MATH}
    assert backends(other) == {None}
    assert attention_dispatch._AttentionBackendRegistry._active_backend == active
