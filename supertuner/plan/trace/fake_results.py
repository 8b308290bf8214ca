"""Remembers the results of operators on fake tensors, so that an operator with the same inputs is not computed again.

A step repeats the same few hundred operators in every transformer block. torch's own cache of fake operators builds
long keys; here the key is the operator, its plain arguments, and shape, strides, type and device of its tensors. These
determine the result of an operator that changes none of its inputs: new tensors, or views of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

Operator: TypeAlias = Any
"""torch's OpOverload, which has no public type."""

NEW_STORAGE = -1
_PLAIN_TYPES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class _ResultTensor:
    """A tensor in the result of an operator."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    source: int = NEW_STORAGE
    """The input whose storage it has."""
    offset: int = 0
    """Its storage offset, relative to that of the input."""


@dataclass(frozen=True, slots=True)
class _KnownResult:
    parts: tuple[_ResultTensor | None, ...]
    """None: the operator returns None at this place."""
    container: type[list[Any]] | type[tuple[Any, ...]] | None
    """None: the result is a single tensor."""


class FakeResultCache:
    """Calls operators, from memory where it can. The results do not depend on the mode of the fake tensors."""

    def __init__(self) -> None:
        self._results: dict[Any, _KnownResult | None] = {}
        """Key → the result; None: it cannot be made from memory."""
        self._is_pure: dict[Operator, bool] = {}

    def call(
        self, func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[torch.Tensor]
    ) -> Any:
        """The result of `func(*args, **kwargs)`. `inputs`: the tensors in the arguments, in their order."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for several times per operator
        key = self._key(func, args, kwargs, inputs)
        if key is None:
            return func(*args, **kwargs)
        if key in self._results:
            known = self._results[key]
            return func(*args, **kwargs) if known is None else _make_result(known, inputs)
        result = func(*args, **kwargs)
        self._results[key] = _describe_result(result, inputs)
        return result

    def _key(
        self, func: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[torch.Tensor]
    ) -> Any:
        """Everything that determines the result; None if that is not known."""
        is_pure = self._is_pure.get(func)
        if is_pure is None:
            tags = func.tags
            is_pure = self._is_pure[func] = not (
                func._schema.is_mutable or torch.Tag.dynamic_output_shape in tags or torch.Tag.inplace_view in tags
            )
        if not is_pure or not inputs or func.namespace == "prim":
            return None
        tensors = []
        for tensor in inputs:
            if type(tensor) is not FakeTensor or tensor.constant is not None:
                return None
            tensors.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device))
        plain: list[Any] = []
        if not _add_plain(args, plain) or (kwargs and not _add_plain(sorted(kwargs.items()), plain)):
            return None
        return func, tuple(tensors), tuple(plain)


class FakeResultMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operators on fake tensors come from memory where they can; nothing is recorded."""

    def __init__(self, results: FakeResultCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if has_wrapper(types):
            return NotImplemented
        return self._results.call(func, args, kwargs or {}, tensors_in((args, kwargs)))


def has_wrapper(types: Sequence[type]) -> bool:
    """Whether an operator is called for a wrapper of 8-bit tensors. It holds no memory of its own: its class does the
    operator on the tensors inside, in further calls."""
    return any(one is not FakeTensor and is_traceable_wrapper_subclass_type(one) for one in types)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts. (torch's tree functions take several times as long.)"""
    found: list[torch.Tensor] = []
    _collect_tensors(value, found)
    return found


def _collect_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect_tensors(inner, found)
    elif isinstance(value, dict):
        for inner in value.values():
            _collect_tensors(inner, found)


def _add_plain(values: Sequence[Any], plain: list[Any]) -> bool:
    """Append the values that are no tensors, with their types and places. False: one of them is not plain."""
    for value in values:
        if isinstance(value, torch.Tensor):
            plain.append("tensor")
        elif isinstance(value, list | tuple):
            plain.append(len(value))
            if not _add_plain(value, plain):
                return False
        elif isinstance(value, _PLAIN_TYPES):
            plain.append((type(value), value))  # 1, 1.0 and True are equal, and give results of different types
        else:
            return False
    return True


def _describe_result(result: Any, inputs: Sequence[torch.Tensor]) -> _KnownResult | None:
    """What is needed to make the result again; None if it is more than new tensors and views of the inputs."""
    container = type(result) if type(result) in (list, tuple) else None
    sources = {tensor.untyped_storage()._cdata: place for place, tensor in reversed(list(enumerate(inputs)))}
    parts: list[_ResultTensor | None] = []
    new_storages = set()
    for value in [result] if container is None else result:
        if value is None:
            parts.append(None)
            continue
        if type(value) is not FakeTensor or value.constant is not None or value.is_conj() or value.is_neg():
            return None
        storage, layout = value.untyped_storage(), (value.shape, value.stride(), value.dtype, value.fake_device)
        if (source := sources.get(storage._cdata)) is not None:
            if value is inputs[source]:
                return None
            offset = int(value.storage_offset()) - int(inputs[source].storage_offset())
            parts.append(_ResultTensor(*layout, source, offset))
            continue
        with torch._C._DisableTorchDispatch():
            again = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if (
            storage._cdata in new_storages
            or value.storage_offset()
            or again.untyped_storage().nbytes() != storage.nbytes()
        ):
            return None
        new_storages.add(storage._cdata)
        parts.append(_ResultTensor(*layout))
    return _KnownResult(tuple(parts), container)


def _make_result(known: _KnownResult, inputs: Sequence[torch.Tensor]) -> Any:
    mode: FakeTensorMode = inputs[0].fake_mode  # type: ignore[attr-defined]
    tensors = [None if part is None else _make_tensor(part, mode, inputs) for part in known.parts]
    return tensors[0] if known.container is None else known.container(tensors)


def _make_tensor(part: _ResultTensor, mode: FakeTensorMode, inputs: Sequence[torch.Tensor]) -> FakeTensor:
    with torch._C._DisableTorchDispatch():
        if part.source == NEW_STORAGE:
            plain = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
        else:
            source = inputs[part.source]
            plain = torch.empty(0, dtype=part.dtype, device="meta")
            offset = source.storage_offset() + part.offset
            plain.set_(source.untyped_storage(), offset, part.shape, part.stride)
    return FakeTensor(mode, plain, part.device)
