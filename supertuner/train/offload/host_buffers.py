"""Homes in host memory for single tensors: each has its place there once, and copies go to and fro.

What is being sent lives on the device until the computation has waited for the copy, so that nobody overwrites it too
early; what was sent may be read by the host after `arrived`.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import torch

from supertuner.train.offload.host_memory import HostMemoryPool, tensor_in_bytes
from supertuner.train.offload.param_storage import StoredTensor
from supertuner.train.offload.transfer import CopyPair, DeviceTransfer, TransferEvent

BufferKey: TypeAlias = tuple[str, str]
"""The parameter's name, and what of it: `weight`, `gradient`, `average`, `state.exp_avg`."""
MAX_COPIES_IN_FLIGHT = 8
"""Copies home that may be under way together: each holds device memory as long as it lasts."""


class HostBuffers:
    def __init__(self, transfer: DeviceTransfer, memory: HostMemoryPool) -> None:
        self._transfer, self.memory = transfer, memory
        self._buffers: dict[BufferKey, torch.Tensor] = {}
        self._in_flight: deque[tuple[TransferEvent, list[torch.Tensor]]] = deque()
        self._last_event: TransferEvent = None

    def buffer_for(self, key: BufferKey, like: torch.Tensor) -> torch.Tensor:
        """The home of a tensor; it is made where there is none."""
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            buffer = self._buffers[key] = tensor_in_bytes(self.memory.allocate(like.nbytes), like)
        return buffer

    def move_to_host(self, name: str, stored: StoredTensor) -> torch.Tensor:
        """Put a copy at home in the place of a parameter's tensor, unless it is there; what is there now is freed."""
        current, key = stored.get(), (name, stored.role)
        if not self.is_buffer(key, current):
            buffer = self.buffer_for(key, current)
            buffer.copy_(current)
            stored.put(buffer)
        return stored.get()

    def is_buffer(self, key: BufferKey, tensor: torch.Tensor) -> bool:
        return key in self._buffers and self._buffers[key].data_ptr() == tensor.data_ptr()

    def copy_to_host(self, pairs: list[CopyPair]) -> None:
        """Begin to copy (home, tensor on the device)."""
        if not pairs:
            return
        self._last_event = self._transfer.copy_to_host(pairs)
        self._in_flight.append((self._last_event, [source for _, source in pairs]))
        while len(self._in_flight) > MAX_COPIES_IN_FLIGHT:
            self._transfer.wait_on_device(self._in_flight.popleft()[0])

    def copy_to_device(self, buffers: list[torch.Tensor]) -> tuple[list[torch.Tensor], TransferEvent]:
        """Begin to copy these to the device: after what was sent before, which may be the same."""
        device_tensors = [torch.empty_like(home, device=self._transfer.device) for home in buffers]
        after = [] if self._last_event is None else [self._last_event]
        return device_tensors, self._transfer.copy_to_device(
            list(zip(device_tensors, buffers, strict=True)), after=after
        )

    def synchronize(self) -> None:
        """Wait until the host may read all that was sent."""
        for event, _ in self._in_flight:
            self._transfer.wait_on_device(event)
        self._in_flight.clear()
        if self._last_event is not None:
            self._transfer.synchronize(self._last_event)
            self._last_event = None
