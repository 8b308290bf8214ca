"""Permanent buffers in host memory for single tensors, and copies between them and the device.

A device tensor stays alive until the compute stream has waited for its copy, so that its memory is not reused too
early. The host may read what was copied after `synchronize`.
"""

from __future__ import annotations

from collections import deque

import torch

from supertuner.plan.placement.memory_needs import MAX_COPIES_IN_FLIGHT
from supertuner.step.parameter_state import BufferKey
from supertuner.train.offload.param_storage import StoredTensor
from supertuner.train.offload.pinned_memory_pool import HostMemoryPool, tensor_in_bytes
from supertuner.train.offload.transfer import CopyPair, DeviceTransfer, TransferEvent


class HostBuffers:
    def __init__(self, transfer: DeviceTransfer, memory: HostMemoryPool) -> None:
        self._transfer, self.memory = transfer, memory
        self._buffers: dict[BufferKey, torch.Tensor] = {}
        self._in_flight: deque[tuple[TransferEvent, list[torch.Tensor]]] = deque()
        self._last_event: TransferEvent = None

    def buffer_for(self, key: BufferKey, like: torch.Tensor) -> torch.Tensor:
        """The buffer of a tensor; allocated at the first call."""
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
            buffer = self._buffers[key] = tensor_in_bytes(self.memory.allocate(like.nbytes), like)
        return buffer

    def move_to_host(self, name: str, stored: StoredTensor) -> torch.Tensor:
        """Replace a parameter's tensor by its host buffer, with its values copied, unless it is that buffer already."""
        current, key = stored.get(), (name, stored.role)
        if not self.is_buffer(key, current):
            buffer = self.buffer_for(key, current)
            buffer.copy_(current)
            stored.put(buffer)
        return stored.get()

    def is_buffer(self, key: BufferKey, tensor: torch.Tensor) -> bool:
        return key in self._buffers and self._buffers[key].data_ptr() == tensor.data_ptr()

    def copy_to_host(self, pairs: list[CopyPair]) -> None:
        """Start copying pairs of (host buffer, device tensor)."""
        if not pairs:
            return
        self._last_event = self._transfer.copy_to_host(pairs)
        self._in_flight.append((self._last_event, [source for _, source in pairs]))
        while len(self._in_flight) > MAX_COPIES_IN_FLIGHT:
            self._transfer.wait_on_device(self._in_flight.popleft()[0])

    def copy_to_device(self, buffers: list[torch.Tensor]) -> tuple[list[torch.Tensor], TransferEvent]:
        """Start copying these to the device, after earlier copies to the host, which may be of the same buffers."""
        device_tensors = [torch.empty_like(buffer, device=self._transfer.device) for buffer in buffers]
        after = [] if self._last_event is None else [self._last_event]
        pairs = list(zip(device_tensors, buffers, strict=True))
        return device_tensors, self._transfer.copy_to_device(pairs, after)

    def synchronize(self) -> None:
        """Wait until the host may read everything that was copied to it."""
        for event, _ in self._in_flight:
            self._transfer.wait_on_device(event)
        self._in_flight.clear()
        if self._last_event is not None:
            self._transfer.synchronize(self._last_event)
            self._last_event = None
