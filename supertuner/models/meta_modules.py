"""Modules without weights: every layer, shape and number format as after loading, but no memory.

A module is built on torch's meta device from its config alone. `fill_with_fake_tensors` then gives it fake tensors, on
which its code runs operator by operator without computing. Attach adapters before that: peft rejects fake parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def build_without_weights(build_module: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """The module in eval mode, frozen, with the number formats that loading would give it.

    It is on the meta device, or on the CPU with fake tensors if a fake tensor mode is active.
    """
    mode = detect_fake_mode()
    with unset_fake_temporarily():
        module = build_module()
        fp32_names = _fp32_module_names(module, dtype)
        # Only what a weight file would hold; other buffers keep their format.
        for name, tensor in module.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if fp32_names & set(name.split(".")) else dtype)
    module = module.eval().requires_grad_(False)
    return module if mode is None else fill_with_fake_tensors(module, mode, torch.device("cpu"))


class MetaDeviceMode(TorchFunctionMode):
    """Inside the block, new tensors are created on the meta device, and `.cpu()` leaves them there.

    Tensors of given numbers (`torch.tensor`) keep their values: lycoris-lora computes sizes with them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cpu and args[0].is_meta:
            return args[0]
        if func is torch.tensor:
            return func(*args, **(kwargs or {}))
        with torch.device("meta"):
            return func(*args, **(kwargs or {}))


class PlaceholderTokenizer:
    """A tokenizer without a vocabulary: any text becomes `max_length` tokens, or `tokens` if there is no `max_length`.

    Their values have no meaning.
    """

    model_max_length: Final = 77
    """That of CLIP; other encoders pass `max_length`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, text: str | Sequence[str], max_length: int | None = None, **_options: Any) -> SimpleNamespace:
        length = max_length or self.tokens
        if isinstance(text, str):
            return SimpleNamespace(input_ids=range(length))
        ids = torch.ones(len(text), length, dtype=torch.long)
        return SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))


def _fp32_module_names(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of submodules that loading keeps in fp32: in diffusers those that the class names, in transformers the same
    only for fp16, plus those of its strict list."""
    names = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if type(module).__module__.startswith("transformers.") and dtype is not torch.float16:
        names = set()
    return names | set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())


def fill_with_fake_tensors(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Replace every tensor of the module by a fake one on `device`. Shared parameters stay shared."""
    fake_parameters: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return _to_fake_tensor(tensor, mode, device)

    for submodule in module.modules():
        for name, old in submodule._parameters.items():
            if old is not None:
                if id(old) not in fake_parameters:
                    fake_parameters[id(old)] = nn.Parameter(fake(old.data), requires_grad=old.requires_grad)
                submodule._parameters[name] = fake_parameters[id(old)]
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = fake(buffer)
        for name, value in vars(submodule).items():  # tables that a class holds as plain attributes
            if isinstance(value, torch.Tensor):
                vars(submodule)[name] = fake(value)
            elif isinstance(value, list):
                vars(submodule)[name] = [fake(item) if isinstance(item, torch.Tensor) else item for item in value]
    # `to` must not move fake tensors: torch would swap each parameter for another, which sometimes raises an error.
    vars(module)["to"] = lambda *_args, **_kwargs: module
    return module


def _to_fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):  # quantized weights: a wrapper of several plain tensors
        names, context = wrapper.__tensor_flatten__()
        inner = {name: _to_fake_tensor(getattr(wrapper, name), mode, device) for name in names}
        rebuilt: torch.Tensor = type(wrapper).__tensor_unflatten__(inner, context, wrapper.shape, wrapper.stride())
        return rebuilt
    if tensor.device.type != "meta":
        tensor = tensor.to("meta")
    return FakeTensor(mode, tensor, device)
