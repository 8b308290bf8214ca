"""Modules without weights, as loading would make them: every layer, shape and number format, and no memory.

A module is made on torch's meta device by its config alone; `filled` then gives it fake tensors, on which its own code
runs operator by operator and computes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from supertuner.models import loading
from supertuner.models.spec import Model


def hollow(model: Model, part: str, dtype: torch.dtype) -> nn.Module:
    """A part on the meta device, in eval mode, no gradient required; what its class keeps in fp32 is in fp32."""
    module = loading.skeleton(model, part)
    kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in module.named_parameters():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(kept) & set(name.split(".")) else dtype)
    return module.eval().requires_grad_(False)


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
