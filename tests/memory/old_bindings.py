"""A stand-in for the bindings of CUDA 12, made from those of 13, with the differences that `cuda.py` handles.

The plain names take a device number, the forms with a location end in _v2, and there are no batch calls. That the real
bindings of 12 behave like this was checked by running the contract with cuda-bindings 12.9.10 in a separate
environment:

    python -m venv V && V/bin/pip install 'cuda-bindings==12.9.*' pytest pytest-timeout numpy
    V/bin/python -m pytest tests/memory/test_contract.py
"""

from __future__ import annotations

from typing import Any


class OldBindings:
    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        if name.endswith("BatchAsync"):
            raise AttributeError(name)
        return getattr(self._bindings, name)

    def cuMemAdvise(self, address: int, nbytes: int, advice: Any, device: int) -> Any:
        raise TypeError(f"an integer is required, got {type(device)}")

    def cuMemAdvise_v2(self, address: int, nbytes: int, advice: Any, location: Any) -> Any:
        return self._bindings.cuMemAdvise(address, nbytes, advice, location)

    def cuMemPrefetchAsync(self, address: int, nbytes: int, device: int, stream: Any) -> Any:
        raise TypeError(f"an integer is required, got {type(device)}")

    def cuMemPrefetchAsync_v2(self, address: int, nbytes: int, location: Any, flags: int, stream: Any) -> Any:
        return self._bindings.cuMemPrefetchAsync(address, nbytes, location, flags, stream)
