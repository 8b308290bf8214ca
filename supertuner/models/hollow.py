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


def stand_in(skeleton: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """What loading would give: in eval mode, no gradient required, in fp32 what its class keeps so. It is on the meta
    device, or, where fake tensors are in use, on the CPU with fake ones."""
    mode = detect_fake_mode()
    with unset_fake_temporarily():
        module = skeleton()
        kept = _kept_in_fp32(module, dtype)
        for name, tensor in module.state_dict(keep_vars=True).items():  # what a file would hold; other buffers stay
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    module = module.eval().requires_grad_(False)
    return module if mode is None else filled(module, mode, torch.device("cpu"))


class Nowhere(TorchFunctionMode):
    """Inside, tensors are made on the meta device and stay there, whoever wants a copy on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cpu and args[0].is_meta:
            return args[0]
        with torch.device("meta"):
            return func(*args, **(kwargs or {}))


class Wordless:
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


def _kept_in_fp32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of submodules: diffusers keeps what a class names, transformers only beside fp16, unless the class is
    strict about it."""
    named = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if type(module).__module__.startswith("transformers.") and dtype is not torch.float16:
        named = set()
    return named | set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())


def filled(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """The module with every tensor of it replaced by a fake one on `device`; parameters that are shared stay so."""
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return _fake(tensor, mode, device)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(fake(parameter.data), requires_grad=parameter.requires_grad)
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake(buffer)
        for name, value in vars(part).items():  # tables that a class keeps as plain attributes
            if isinstance(value, torch.Tensor):
                vars(part)[name] = fake(value)
            elif isinstance(value, list):
                vars(part)[name] = [fake(one) if isinstance(one, torch.Tensor) else one for one in value]
    # Fake tensors are where they are; torch's own `to` would swap each for another, which it refuses now and then.
    vars(module)["to"] = lambda *_where, **_how: module
    return module


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):  # 8-bit weights: several plain tensors in one
        names, context = wrapper.__tensor_flatten__()
        inner = {name: _fake(getattr(wrapper, name), mode, device) for name in names}
        made: torch.Tensor = type(wrapper).__tensor_unflatten__(inner, context, wrapper.shape, wrapper.stride())
        return made
    if tensor.device.type != "meta":
        tensor = tensor.to("meta")
    return FakeTensor(mode, tensor, device)
