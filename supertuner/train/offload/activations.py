"""Sends the activations that a block's forward pass saves to host memory, and fetches them for its backward pass.

autograd passes every tensor that it saves to a pack hook, and the hook's result to an unpack hook
(saved_tensors_hooks). The hooks are in `offloaded_blocks.py`, which also handles streamed weights; `pack` and `unpack`
here are their parts for activations. `pack` returns one of:

    OffloadedView       for an activation: its storage is copied to host memory once, however many tensors are views of
                        it
    the tensor itself   for everything else: small tensors, weights that stay, inputs shared with the block before

On a GPU the storage stays alive until the compute stream has waited for the copy, so that the caching allocator cannot
reuse its memory too early. The number of blocks whose copies are in flight is bounded.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from supertuner.train.offload.param_storage import is_plain
from supertuner.train.offload.pinned_memory_pool import HostMemoryPool, storage_bytes
from supertuner.train.offload.transfer import DeviceTransfer, TransferEvent

StorageAddresses: TypeAlias = set[int]
"""Addresses (data_ptr) of storages."""


@dataclass(frozen=True, eq=False, slots=True)
class TensorView:
    """A tensor's dtype, offset, shape and strides within its storage."""

    dtype: torch.dtype
    begin: int
    shape: torch.Size
    stride: tuple[int, ...]
    conjugated: bool

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorView:
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.is_conj())

    def in_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.begin, self.shape, self.stride)
        return tensor.conj() if self.conjugated else tensor


@dataclass(frozen=True, eq=False, slots=True)
class StreamedWeightRef:
    """A saved tensor that is part of a streamed block's weights."""

    block: int
    view: TensorView


@dataclass(eq=False, slots=True, weakref_slot=True)
class OffloadedStorage:
    """One storage in host memory."""

    device_bytes: torch.Tensor | None
    """Its bytes on the device; None while they are only in host memory."""
    host_bytes: torch.Tensor
    event: TransferEvent
    """Completion of the last copy, in either direction."""
    fetched: bool = False
    """Whether the device bytes were fetched back; False: they are still the original storage."""
    awaited: bool = False
    """Whether the compute stream has waited for that event."""
    pending_uses: int = 0
    """Packed tensors of this storage that are not unpacked yet."""


@dataclass(frozen=True, eq=False, slots=True)
class OffloadedView:
    """A saved tensor whose storage is in host memory."""

    storage: OffloadedStorage
    view: TensorView


class ActivationOffloader:
    """Copies activations of blocks to host memory while they compute, and back before their backward passes."""

    def __init__(
        self, transfer: DeviceTransfer, host_memory: HostMemoryPool, min_bytes: int, max_blocks_in_flight: int
    ) -> None:
        self._transfer, self._host_memory, self._min_bytes = transfer, host_memory, min_bytes
        self.max_blocks_in_flight = max_blocks_in_flight
        """Blocks whose copies to host memory may be in flight at the same time; each holds device memory meanwhile."""
        self._storages_by_block: dict[int, list[OffloadedStorage]] = {}
        self._blocks_in_flight: deque[int] = deque()
        self._live_storages = 0

    def begin_block(self, block: int) -> dict[int, OffloadedStorage]:
        """Start a forward pass of the block. Returns the table that `pack` fills: storage address → its copy."""
        self.release_block(block)
        self._storages_by_block[block] = []
        return {}

    def pack(
        self,
        block: int,
        tensor: torch.Tensor,
        storages: dict[int, OffloadedStorage],
        addresses_to_keep: StorageAddresses,
    ) -> OffloadedView | torch.Tensor:
        """Copy the tensor's storage to host memory if that pays off. `storages` keeps every storage of this pass alive,
        so an address identifies one storage."""
        if not is_plain(tensor) or tensor.device != self._transfer.device or tensor.is_sparse:
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < self._min_bytes or address in addresses_to_keep:
            return tensor
        if address not in storages:
            storages[address] = self._send_to_host(storage_bytes(tensor))
            self._storages_by_block[block].append(storages[address])
        storages[address].pending_uses += 1
        return OffloadedView(storages[address], TensorView.from_tensor(tensor))

    def end_block(self, block: int) -> None:
        """End a forward pass. Device memory of the oldest block in flight is freed once too many are in flight."""
        self._blocks_in_flight.append(block)
        while len(self._blocks_in_flight) > self.max_blocks_in_flight:
            for storage in self._storages_by_block.get(self._blocks_in_flight.popleft(), ()):
                self._free_device_bytes(storage)

    def prefetch_block(self, block: int) -> None:
        """Start fetching what the block's backward pass will unpack."""
        for storage in self._storages_by_block.get(block, ()):
            if storage.device_bytes is None and storage.pending_uses:
                self._fetch(storage)

    def unpack(self, view: OffloadedView) -> torch.Tensor:
        """The tensor of a view, on the device; fetched now if it was not prefetched."""
        storage = view.storage
        if storage.device_bytes is None:
            self._fetch(storage)
        assert storage.device_bytes is not None
        tensor = view.view.in_storage(storage.device_bytes.untyped_storage())
        storage.pending_uses -= 1
        if storage.fetched:
            self._await(storage)
            if storage.pending_uses <= 0:  # a second backward pass (retain_graph) fetches it again
                storage.device_bytes = None
        return tensor

    def release_block(self, block: int) -> None:
        """End a backward pass: also free the device memory of tensors that were never unpacked."""
        for storage in self._storages_by_block.pop(block, ()):
            self._free_device_bytes(storage)

    def release_all_blocks(self) -> None:
        """Before a new forward pass: drop everything of the last one."""
        for block in list(self._storages_by_block):
            self.release_block(block)
        self._blocks_in_flight.clear()
        if self._live_storages == 0:
            self._host_memory.reset()

    def _send_to_host(self, device_bytes: torch.Tensor) -> OffloadedStorage:
        host_bytes = self._host_memory.allocate(device_bytes.nbytes)
        event = self._transfer.copy_to_host([(host_bytes, device_bytes)])
        storage = OffloadedStorage(device_bytes, host_bytes, event)
        self._live_storages += 1
        weakref.finalize(storage, self._on_storage_freed).atexit = False
        return storage

    def _fetch(self, storage: OffloadedStorage) -> None:
        storage.device_bytes = torch.empty_like(storage.host_bytes, device=self._transfer.device)
        pair = storage.device_bytes, storage.host_bytes
        storage.event = self._transfer.copy_to_device([pair], after=(storage.event,))
        storage.awaited, storage.fetched = False, True

    def _free_device_bytes(self, storage: OffloadedStorage) -> None:
        """Release device memory; the compute stream waits for the copy first, so the allocator may then reuse it."""
        if storage.device_bytes is not None:
            self._await(storage)
            storage.device_bytes = None

    def _await(self, storage: OffloadedStorage) -> None:
        if not storage.awaited:
            self._transfer.wait_on_device(storage.event)
            storage.awaited = True

    def _on_storage_freed(self) -> None:
        """Called when no autograd graph holds the storage any more. At zero, host memory can be reset."""
        self._live_storages -= 1


class BlockInputs:
    """Finds inputs that a block shares with the block before it: sending them to host memory would free nothing."""

    def __init__(self) -> None:
        self._previous_inputs: list[weakref.ref[torch.Tensor]] = []

    def shared_addresses(self, tensors: Iterable[torch.Tensor]) -> StorageAddresses:
        """Addresses of the inputs that the block before received, too."""
        inputs = list(tensors)
        previous_ids = {id(tensor) for reference in self._previous_inputs if (tensor := reference()) is not None}
        self._previous_inputs = [weakref.ref(tensor) for tensor in inputs]
        return {tensor.untyped_storage().data_ptr() for tensor in inputs if id(tensor) in previous_ids}


def iter_tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in a block's arguments or outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        yield from iter_tensors(list(value.values()))
