"""Modules without weights, as loading would make them: every layer, shape and number format, and no memory.

A module is made on torch's meta device by its config alone; `filled` gives it fake tensors, on which its own code runs
operator by operator and computes nothing. Adapters are put on before that: peft takes no fake parameters.
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
    """What loading would give: in eval mode, no gradient required, in fp32 what its class keeps so. It is on the meta
    device, or, where fake tensors are in use, on the CPU with fake ones."""
    mode = detect_fake_mode()
    with unset_fake_temporarily():
        module = build_module()
        fp32_names = _fp32_module_names(module, dtype)
        for name, tensor in module.state_dict(keep_vars=True).items():  # what a file would hold; other buffers stay
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if fp32_names & set(name.split(".")) else dtype)
    module = module.eval().requires_grad_(False)
    return module if mode is None else fill_with_fake_tensors(module, mode, torch.device("cpu"))


class MetaDeviceMode(TorchFunctionMode):
    """Inside, tensors are made on the meta device and stay there, whoever wants a copy on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cpu and args[0].is_meta:
            return args[0]
        with torch.device("meta"):
            return func(*args, **(kwargs or {}))


class PlaceholderTokenizer:
    """A tokenizer that knows no words: of any text it makes as many tokens as it may, or `tokens` where nobody says how
    many that are. Nobody can look at their values."""

    model_max_length: Final = 77
    """CLIP's; the others are told how many."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, text: str | Sequence[str], max_length: int | None = None, **_how: Any) -> SimpleNamespace:
        length = max_length or self.tokens
        if isinstance(text, str):
            return SimpleNamespace(input_ids=range(length))
        ids = torch.ones(len(text), length, dtype=torch.long)
        return SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))


def _fp32_module_names(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of submodules: diffusers keeps what a class names, transformers only beside fp16, unless the class is
    strict about it."""
    names = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if type(module).__module__.startswith("transformers.") and dtype is not torch.float16:
        names = set()
    return names | set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())


def fill_with_fake_tensors(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """The module with every tensor of it replaced by a fake one on `device`; parameters that are shared stay so."""
    fake_parameters: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return _to_fake_tensor(tensor, mode, device)

    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                if id(parameter) not in fake_parameters:
                    fake_parameters[id(parameter)] = nn.Parameter(
                        fake(parameter.data), requires_grad=parameter.requires_grad
                    )
                submodule._parameters[name] = fake_parameters[id(parameter)]
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = fake(buffer)
        for name, value in vars(submodule).items():  # tables that a class keeps as plain attributes
            if isinstance(value, torch.Tensor):
                vars(submodule)[name] = fake(value)
            elif isinstance(value, list):
                vars(submodule)[name] = [fake(one) if isinstance(one, torch.Tensor) else one for one in value]
    # Fake tensors are where they are; torch's own `to` would swap each for another, which it refuses now and then.
    vars(module)["to"] = lambda *_where, **_how: module
    return module


def _to_fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):  # 8-bit weights: several plain tensors in one
        names, context = wrapper.__tensor_flatten__()
        inner = {name: _to_fake_tensor(getattr(wrapper, name), mode, device) for name in names}
        rebuilt: torch.Tensor = type(wrapper).__tensor_unflatten__(inner, context, wrapper.shape, wrapper.stride())
        return rebuilt
    if tensor.device.type != "meta":
        tensor = tensor.to("meta")
    return FakeTensor(mode, tensor, device)
