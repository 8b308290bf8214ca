"""Streams weights: they live in host memory, and are on the device only while their block computes.

A ring of `prefetch_depth + 1` slots in device memory, each as large as the largest block, holds the block that computes
and the blocks that come next; copies run beside the computation:

    slot 0   block 3 computes
    slot 1   block 4, copied already
    slot 2   block 5, being copied          (prefetch_depth = 2)

When block 4 begins, block 6 is needed within the depth. If a slot is free it gets that one, else the slot of the block
whose next use is furthest away (`prefetch_order.py`). At the turn from the forward to the backward pass, and from one
step to the next, the blocks that are used next are still in their slots, and are not copied again.

Outside of its own computation a block's parameters point at the host tensors, so saving or reading them between two
windows gives the true weights. Frozen weights are never copied back; trained ones are updated in host memory by
`optimizer_offload.py`, which then invalidates the slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from supertuner.train.offload.param_storage import StoredTensor, stored_tensors
from supertuner.train.offload.pinned_memory_pool import ALIGNMENT, tensor_in_bytes
from supertuner.train.offload.prefetch_order import BlockPass, block_to_evict, next_uses
from supertuner.train.offload.tensor_host_buffers import HostBuffers
from supertuner.train.offload.transfer import CopyPair, DeviceTransfer, TransferEvent


@dataclass(frozen=True, eq=False, slots=True)
class StreamedBlock:
    """The tensors of one block that live in host memory, and their layout in a slot: one after the other."""

    parameters: Mapping[str, nn.Parameter]
    stored: Sequence[StoredTensor]
    offsets: Sequence[int]
    nbytes: int
    trained: bool
    """Whether any of them is trained. Then averages may stand in for them for a while, in other host tensors."""

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, nn.Parameter]) -> StreamedBlock:
        stored = [tensor for parameter in parameters.values() for tensor in stored_tensors(parameter)]
        offsets, end = [], 0
        for tensor in stored:
            offsets.append(end)
            end += -(-tensor.get().nbytes // ALIGNMENT) * ALIGNMENT
        return cls(parameters, stored, offsets, end, any(parameter.requires_grad for parameter in parameters.values()))

    def move_to_host(self, host_buffers: HostBuffers) -> None:
        """Move the tensors to host memory, where they stay from now on."""
        for name, parameter in self.parameters.items():
            for stored in stored_tensors(parameter):
                host_buffers.move_to_host(name, stored)


@dataclass(eq=False, slots=True)
class _SlotContents:
    """A block in a slot."""

    slot: int
    host_tensors: list[torch.Tensor]
    """The tensors that were copied: those that the parameters pointed at when the copy started."""
    event: TransferEvent
    """Completion of the copy."""
    awaited: bool = False
    """Whether the compute stream has waited for it."""


@dataclass(eq=False, slots=True)
class WeightRing:
    """The slots, and which block is in which. `block_count` counts all blocks of the module, streamed or not."""

    streamed: Mapping[int, StreamedBlock]
    block_count: int
    prefetch_depth: int
    transfer: DeviceTransfer
    _slots: list[torch.Tensor] = field(default_factory=list)
    _contents: dict[int, _SlotContents] = field(default_factory=dict)
    _views: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the slots take, once they are in use."""
        largest = max((block.nbytes for block in self.streamed.values()), default=0)
        return largest * min(self.prefetch_depth + 1, len(self.streamed))

    def parameter_ids(self) -> set[int]:
        """Ids of all parameters that are streamed."""
        return {id(parameter) for block in self.streamed.values() for parameter in block.parameters.values()}

    def begin_block(self, block: int, current_pass: BlockPass) -> None:
        """A block is about to compute: make sure that it is on the device, and start fetching the next ones."""
        if block in self.streamed:
            # A trained block may have been copied with other values, of an average: then it is fetched again.
            if block in self._contents and self.streamed[block].trained and not self._is_current(block):
                del self._contents[block]
            self.wait_for_block(block, current_pass)
        for use in next_uses(block, self.block_count, current_pass, self.prefetch_depth):
            if use.block in self.streamed and use.block not in self._contents:
                self._fetch(use.block, block, current_pass)

    def wait_for_block(self, block: int, current_pass: BlockPass) -> _SlotContents:
        """The block's slot, fetched now if it was not fetched before; the compute stream waits for the copy."""
        contents = self._contents.get(block)
        if contents is None:
            self._fetch(block, block, current_pass)
            self.transfer.counters.late += 1
            contents = self._contents[block]
        if not contents.awaited:
            self.transfer.wait_on_device(contents.event)
            contents.awaited = True
        return contents

    def use_device_weights(self, block: int) -> None:
        """Point the parameters at the slot, after `wait_for_block`, while the block runs."""
        for stored, view in zip(self.streamed[block].stored, self._slot_views(block), strict=True):
            stored.put(view)

    def use_host_weights(self, block: int) -> None:
        """Point the parameters at host memory again."""
        for stored, host_tensor in zip(self.streamed[block].stored, self._contents[block].host_tensors, strict=True):
            stored.put(host_tensor)

    def is_in_slot(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is a slot."""
        begin = tensor.untyped_storage().data_ptr()
        return any(slot.data_ptr() == begin for slot in self._slots)

    def block_storage(self, block: int, current_pass: BlockPass) -> torch.UntypedStorage:
        """The storage of the slot that holds the block now; a block's layout is the same in every slot."""
        return self._slots[self.wait_for_block(block, current_pass).slot].untyped_storage()

    def invalidate(self) -> None:
        """Forget what the slots hold: weights in host memory have changed."""
        self._contents.clear()

    def release_slots(self) -> None:
        """Free the device memory; the next use allocates it again.

        Copies into the slots may still run, for a pass that does not come: the compute stream waits for them first, so
        that the allocator does not give the memory to other tensors too early.
        """
        for contents in self._contents.values():
            if not contents.awaited:
                self.transfer.wait_on_device(contents.event)
        self.invalidate()
        self._slots.clear()
        self._views.clear()

    def _is_current(self, block: int) -> bool:
        """Whether the parameters still point at the host tensors that were copied."""
        pairs = zip(self.streamed[block].stored, self._contents[block].host_tensors, strict=True)
        return all(stored.get().data_ptr() == host_tensor.data_ptr() for stored, host_tensor in pairs)

    def _fetch(self, block: int, computing: int, current_pass: BlockPass) -> None:
        """Start copying a block into a slot, while block `computing` computes."""
        slot = self._free_slot(block, computing, current_pass)
        if slot is None:
            return  # every loaded block is used sooner
        host_tensors = [stored.get() for stored in self.streamed[block].stored]
        self._contents[block] = _SlotContents(slot, host_tensors, None)
        pairs: list[CopyPair] = list(zip(self._slot_views(block), host_tensors, strict=True))
        self._contents[block].event = self.transfer.copy_to_device(pairs)
        self.transfer.counters.fetches += 1

    def _free_slot(self, block: int, computing: int, current_pass: BlockPass) -> int | None:
        """A slot for `block`: a free one, or that of the evicted block; None: nothing may be evicted for a prefetch.

        A copy into a slot starts after all computation queued so far (see `transfer.py`), so the evicted block's
        kernels have read their weights before they are overwritten.
        """
        used = {contents.slot for contents in self._contents.values()}
        if len(used) < min(self.prefetch_depth + 1, len(self.streamed)):
            return self._new_slot(used)
        # A prefetch must not evict a block that is used as soon; the block that computes now may evict any other.
        uses = next_uses(computing, self.block_count, current_pass, self.prefetch_depth if block != computing else 0)
        candidates = self._contents.keys() - {use.block for use in uses}
        evicted = block_to_evict(candidates, computing, self.block_count, current_pass)
        return None if evicted is None else self._contents.pop(evicted).slot

    def _new_slot(self, used: set[int]) -> int:
        number = next(number for number in range(len(used) + 1) if number not in used)
        if number == len(self._slots):
            largest = max(streamed.nbytes for streamed in self.streamed.values())
            self._slots.append(torch.empty(largest, dtype=torch.uint8, device=self.transfer.device))
        return number

    def _slot_views(self, block: int) -> list[torch.Tensor]:
        slot = self._contents[block].slot
        if (block, slot) not in self._views:
            pairs = zip(self.streamed[block].stored, self.streamed[block].offsets, strict=True)
            places = [(self._slots[slot][begin:], stored.get()) for stored, begin in pairs]
            self._views[block, slot] = [tensor_in_bytes(raw[: like.nbytes], like) for raw, like in places]
        return self._views[block, slot]
