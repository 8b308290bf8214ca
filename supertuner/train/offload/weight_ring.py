"""Weights that are at home in host memory and on the device only while their block computes.

A ring of slots in device memory holds the block that computes and those that come next; copies run beside the
computation. Outside of its own computation a block's parameters are its home's tensors: whoever looks at them between
two windows, or saves them, sees true weights. Frozen weights need no way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from supertuner.train.offload.host_buffers import HostBuffers
from supertuner.train.offload.host_memory import ALIGNMENT, tensor_in_bytes
from supertuner.train.offload.param_storage import StoredTensor, stored_tensors
from supertuner.train.offload.prefetch_order import BlockPass, block_to_evict, next_uses
from supertuner.train.offload.transfer import CopyPair, DeviceTransfer, TransferEvent


@dataclass(frozen=True, eq=False, slots=True)
class StreamedBlock:
    """The stored tensors of one block that live at home, one after the other in a slot."""

    parameters: Mapping[str, nn.Parameter]
    stored: Sequence[StoredTensor]
    offsets: Sequence[int]
    nbytes: int
    trained: bool
    """Whether other values may be put in place of these: those of an average, for a while."""

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, nn.Parameter]) -> StreamedBlock:
        stored = [tensor for parameter in parameters.values() for tensor in stored_tensors(parameter)]
        offsets, end = [], 0
        for leaf in stored:
            offsets.append(end)
            end += -(-leaf.get().nbytes // ALIGNMENT) * ALIGNMENT
        return cls(parameters, stored, offsets, end, any(parameter.requires_grad for parameter in parameters.values()))

    def move_to_host(self, host_buffers: HostBuffers) -> None:
        """Have the tensors in host memory, which is their home from now on."""
        for name, parameter in self.parameters.items():
            for stored in stored_tensors(parameter):
                host_buffers.move_to_host(name, stored)


@dataclass(eq=False, slots=True)
class _SlotContents:
    """What a slot holds of a block."""

    slot: int
    host_tensors: list[torch.Tensor]
    """What was copied: the parameters' tensors when it was begun."""
    event: TransferEvent
    awaited: bool = False


@dataclass(eq=False, slots=True)
class WeightRing:
    """The slots, and which block is in which. `blocks` counts all blocks of the module, streamed or not."""

    streamed: Mapping[int, StreamedBlock]
    block_count: int
    prefetch_depth: int
    transfer: DeviceTransfer
    _slots: list[torch.Tensor] = field(default_factory=list)
    _contents: dict[int, _SlotContents] = field(default_factory=dict)
    _views: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of device memory, once it is in use."""
        largest = max((block.nbytes for block in self.streamed.values()), default=0)
        return largest * min(self.prefetch_depth + 1, len(self.streamed))

    def begin_block(self, block: int, current_pass: BlockPass) -> None:
        """A block is about to compute: it must be there, and those that come next are sent for."""
        if block in self.streamed:
            if block in self._contents and self.streamed[block].trained and not self._is_current(block):
                del self._contents[block]
            self.wait_for_block(block, current_pass)
        for use in next_uses(block, self.block_count, current_pass, self.prefetch_depth):
            if use.block in self.streamed and use.block not in self._contents:
                self._fetch(use.block, block, current_pass)

    def wait_for_block(self, block: int, current_pass: BlockPass) -> _SlotContents:
        """The block's slot, with what the parameters are at home; the computation waits for it."""
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
        """Put the slot's tensors in place of the home's while the block runs; `begin` came before."""
        for stored, view in zip(self.streamed[block].stored, self._slot_views(block), strict=True):
            stored.put(view)

    def use_host_weights(self, block: int) -> None:
        for stored, host_tensor in zip(self.streamed[block].stored, self._contents[block].host_tensors, strict=True):
            stored.put(host_tensor)

    def is_in_slot(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes are in a slot."""
        begin = tensor.untyped_storage().data_ptr()
        return any(slot.data_ptr() == begin for slot in self._slots)

    def block_storage(self, block: int, current_pass: BlockPass) -> torch.UntypedStorage:
        """Where the block's bytes are on the device now, laid out as whenever they are there."""
        return self._slots[self.wait_for_block(block, current_pass).slot].untyped_storage()

    def invalidate(self) -> None:
        """What the slots hold is worthless: homes have changed."""
        self._contents.clear()

    def release_slots(self) -> None:
        """Give the device memory back; the next use takes it again. Nobody may be given it before copies into it, which
        may be for a pass that does not come, are done."""
        for contents in self._contents.values():
            if not contents.awaited:
                self.transfer.wait_on_device(contents.event)
        self.invalidate()
        self._slots.clear()
        self._views.clear()

    def _is_current(self, block: int) -> bool:
        """Whether what was copied is what the parameters are now."""
        pairs = zip(self.streamed[block].stored, self._contents[block].host_tensors, strict=True)
        return all(leaf.get().data_ptr() == home.data_ptr() for leaf, home in pairs)

    def _fetch(self, block: int, computing: int, current_pass: BlockPass) -> None:
        slot = self._free_slot(block, computing, current_pass)
        if slot is None:
            return  # everything that is there is needed sooner
        host_tensors = [leaf.get() for leaf in self.streamed[block].stored]
        self._contents[block] = _SlotContents(slot, host_tensors, None)
        pairs: list[CopyPair] = list(zip(self._slot_views(block), host_tensors, strict=True))
        self._contents[block].event = self.transfer.copy_to_device(pairs)
        self.transfer.counters.fetches += 1

    def _free_slot(self, block: int, computing: int, current_pass: BlockPass) -> int | None:
        used = {held.slot for held in self._contents.values()}
        if len(used) < min(self.prefetch_depth + 1, len(self.streamed)):
            return self._new_slot(used)
        next_blocks = (
            {use.block for use in next_uses(computing, self.block_count, current_pass, self.prefetch_depth)}
            if block != computing
            else {}
        )
        evicted = block_to_evict(
            list(self._contents), computing, self.block_count, current_pass, is_protected=lambda one: one in next_blocks
        )
        return None if evicted is None else self._contents.pop(evicted).slot

    def _new_slot(self, used: set[int]) -> int:
        number = next(number for number in range(len(used) + 1) if number not in used)
        if number == len(self._slots):
            largest = max(one.nbytes for one in self.streamed.values())
            self._slots.append(torch.empty(largest, dtype=torch.uint8, device=self.transfer.device))
        return number

    def _slot_views(self, block: int) -> list[torch.Tensor]:
        slot = self._contents[block].slot
        if (block, slot) not in self._views:
            streamed_block = self.streamed[block]
            raw = self._slots[slot]
            self._views[block, slot] = [
                tensor_in_bytes(raw[begin : begin + leaf.get().nbytes], leaf.get())
                for leaf, begin in zip(streamed_block.stored, streamed_block.offsets, strict=True)
            ]
        return self._views[block, slot]
