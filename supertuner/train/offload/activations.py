"""What a block's forward pass leaves for its backward pass: kept, or sent to host memory and fetched again in time.

autograd hands over every tensor that it saves, and asks for it again. Three answers:

    Borrowed    bytes of a streamed weight: not kept at all, for the slot is another's by then; taken from where the
                block's weights are when they are needed
    Part        bytes of an activation that was sent: each storage once, however many tensors are views of it
    the tensor  everything else: small tensors, weights that stay, what several blocks were given

On a GPU the storage that is being sent lives on until the computation has waited for the copy, so that the caching
allocator cannot give it away too early; how many blocks may be on their way at once is bounded.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from supertuner.train.offload.host_memory import HostMemoryPool, storage_bytes
from supertuner.train.offload.param_storage import is_plain
from supertuner.train.offload.transfer import DeviceTransfer, TransferEvent

StorageAddresses: TypeAlias = set[int]
"""Addresses of storages."""


@dataclass(frozen=True, eq=False, slots=True)
class TensorView:
    """A tensor's form within its storage."""

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
    block: int
    view: TensorView


class OffloadedStorage:
    """One storage in host memory."""

    __slots__ = ("__weakref__", "awaited", "device_bytes", "event", "fetched", "host_bytes", "pending_uses")

    def __init__(self, device_bytes: torch.Tensor, host_bytes: torch.Tensor) -> None:
        self.device_bytes: torch.Tensor | None = device_bytes
        """Its bytes on the device, as long as they are there."""
        self.fetched = False
        """Whether they came back; else they have been there all the time."""
        self.host_bytes = host_bytes
        self.event: TransferEvent = None
        """When the last copy of it, there or back, is done."""
        self.awaited = False
        """Whether the computation has waited for that."""
        self.pending_uses = 0
        """Tensors of it that are still to be asked for."""


@dataclass(frozen=True, eq=False, slots=True)
class OffloadedView:
    storage: OffloadedStorage
    view: TensorView


class ActivationOffloader:
    """Sends a block's activations home while it computes, and brings them back."""

    def __init__(
        self, transfer: DeviceTransfer, host_memory: HostMemoryPool, *, min_bytes: int, max_blocks_in_flight: int
    ) -> None:
        self._transfer, self._host_memory, self._min_bytes = transfer, host_memory, min_bytes
        self.max_blocks_in_flight = max_blocks_in_flight
        """Blocks whose activations may be on their way home together."""
        self._storages_by_block: dict[int, list[OffloadedStorage]] = {}
        self._blocks_in_flight: deque[int] = deque()
        self._live_storages = 0

    def begin_block(self, block: int) -> dict[int, OffloadedStorage]:
        """A forward pass of the block begins: what is sent of it, by the storage's address."""
        self.release_block(block)
        self._storages_by_block[block] = []
        return {}

    def pack(
        self, block: int, tensor: torch.Tensor, storages: dict[int, OffloadedStorage], keep_addresses: StorageAddresses
    ) -> OffloadedView | torch.Tensor:
        """The answer to autograd. `own` keeps every storage of this pass alive: an address means one storage only."""
        if not is_plain(tensor) or tensor.device != self._transfer.device or tensor.is_sparse:
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < self._min_bytes or address in keep_addresses:
            return tensor
        if address not in storages:
            storages[address] = self._start_offload(storage_bytes(tensor))
            self._storages_by_block[block].append(storages[address])
        storages[address].pending_uses += 1
        return OffloadedView(storages[address], TensorView.from_tensor(tensor))

    def end_block(self, block: int) -> None:
        """The block's forward pass is over. Its storages leave the device when the computation has waited for them."""
        self._blocks_in_flight.append(block)
        while len(self._blocks_in_flight) > self.max_blocks_in_flight:
            for storage in self._storages_by_block.get(self._blocks_in_flight.popleft(), ()):
                self._free_device_bytes(storage)

    def prefetch_block(self, block: int) -> None:
        """Begin to fetch what the block's backward pass will ask for."""
        for storage in self._storages_by_block.get(block, ()):
            if storage.device_bytes is None and storage.pending_uses:
                self._fetch(storage)

    def unpack(self, view: OffloadedView) -> torch.Tensor:
        storage = view.storage
        if storage.device_bytes is None:
            self._fetch(storage)
        assert storage.device_bytes is not None
        tensor = view.view.in_storage(storage.device_bytes.untyped_storage())
        storage.pending_uses -= 1
        if storage.fetched:
            self._await(storage)
            if (
                storage.pending_uses <= 0
            ):  # as autograd drops what it has used; whoever asks again gets it from home again
                storage.device_bytes = None
        return tensor

    def release_block(self, block: int) -> None:
        """The block's backward pass is over: what nobody asked for leaves too."""
        for storage in self._storages_by_block.pop(block, ()):
            self._free_device_bytes(storage)

    def release_all_blocks(self) -> None:
        """A new pass begins."""
        for block in list(self._storages_by_block):
            self.release_block(block)
        self._blocks_in_flight.clear()
        if self._live_storages == 0:
            self._host_memory.reset()

    def _start_offload(self, device_bytes: torch.Tensor) -> OffloadedStorage:
        storage = OffloadedStorage(device_bytes, self._host_memory.allocate(device_bytes.nbytes))
        storage.event = self._transfer.copy_to_host([(storage.host_bytes, device_bytes)])
        self._live_storages += 1
        weakref.finalize(storage, self._on_storage_freed).atexit = False
        return storage

    def _fetch(self, storage: OffloadedStorage) -> None:
        storage.device_bytes = torch.empty_like(storage.host_bytes, device=self._transfer.device)
        storage.event = self._transfer.copy_to_device(
            [(storage.device_bytes, storage.host_bytes)], after=(storage.event,)
        )
        storage.awaited, storage.fetched = False, True

    def _free_device_bytes(self, storage: OffloadedStorage) -> None:
        """From here on the allocator may give its device memory to others: no copy uses it any more."""
        if storage.device_bytes is not None:
            self._await(storage)
            storage.device_bytes = None

    def _await(self, storage: OffloadedStorage) -> None:
        if not storage.awaited:
            self._transfer.wait_on_device(storage.event)
            storage.awaited = True

    def _on_storage_freed(self) -> None:
        """Home memory is given back when no graph holds any of it: after every backward pass, as a rule."""
        self._live_storages -= 1


class BlockInputs:
    """Which tensors several blocks are given: to send them would free nothing."""

    def __init__(self) -> None:
        self._previous_inputs: list[weakref.ref[torch.Tensor]] = []

    def shared_addresses(self, tensors: Iterable[torch.Tensor]) -> StorageAddresses:
        """Addresses of those that the block before was given too."""
        inputs = list(tensors)
        previous_ids = {id(tensor) for reference in self._previous_inputs if (tensor := reference()) is not None}
        self._previous_inputs = [weakref.ref(tensor) for tensor in inputs]
        return {tensor.untyped_storage().data_ptr() for tensor in inputs if id(tensor) in previous_ids}


def iter_tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in what a block is given or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        yield from iter_tensors(list(value.values()))
