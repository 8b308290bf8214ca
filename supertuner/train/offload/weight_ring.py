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

from supertuner.train.offload.host_buffers import Homes
from supertuner.train.offload.host_memory import ALIGNMENT, placed
from supertuner.train.offload.param_storage import Leaf, leaves
from supertuner.train.offload.prefetch_order import Pass, farthest, soon
from supertuner.train.offload.transfer import Carrier, Mark, Pair


@dataclass(frozen=True, eq=False, slots=True)
class StreamedBlock:
    """The stored tensors of one block that live at home, one after the other in a slot."""

    named: Mapping[str, nn.Parameter]
    leaves: Sequence[Leaf]
    offsets: Sequence[int]
    nbytes: int
    trained: bool
    """Whether other values may be put in place of these: those of an average, for a while."""

    @classmethod
    def of(cls, named: Mapping[str, nn.Parameter]) -> StreamedBlock:
        own = [leaf for parameter in named.values() for leaf in leaves(parameter)]
        offsets, end = [], 0
        for leaf in own:
            offsets.append(end)
            end += -(-leaf.get().nbytes // ALIGNMENT) * ALIGNMENT
        return cls(named, own, offsets, end, any(parameter.requires_grad for parameter in named.values()))

    def go_home(self, homes: Homes) -> None:
        """Have the tensors in host memory, which is their home from now on."""
        for name, parameter in self.named.items():
            for leaf in leaves(parameter):
                homes.settle(name, leaf)


@dataclass(eq=False, slots=True)
class _Held:
    """What a slot holds of a block."""

    slot: int
    homes: list[torch.Tensor]
    """What was copied: the parameters' tensors when it was begun."""
    mark: Mark
    awaited: bool = False


@dataclass(eq=False, slots=True)
class Ring:
    """The slots, and which block is in which. `blocks` counts all blocks of the module, streamed or not."""

    streamed: Mapping[int, StreamedBlock]
    blocks: int
    ahead: int
    carrier: Carrier
    _slots: list[torch.Tensor] = field(default_factory=list)
    _held: dict[int, _Held] = field(default_factory=dict)
    _views: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of device memory, once it is in use."""
        largest = max((block.nbytes for block in self.streamed.values()), default=0)
        return largest * min(self.ahead + 1, len(self.streamed))

    def begin(self, block: int, now: Pass) -> None:
        """A block is about to compute: it must be there, and those that come next are sent for."""
        if block in self.streamed:
            if block in self._held and self.streamed[block].trained and not self._is_of_now(block):
                del self._held[block]
            self.need(block, now)
        for use in soon(block, self.blocks, now, self.ahead):
            if use.block in self.streamed and use.block not in self._held:
                self._fetch(use.block, block, now)

    def need(self, block: int, now: Pass) -> _Held:
        """The block's slot, with what the parameters are at home; the computation waits for it."""
        held = self._held.get(block)
        if held is None:
            self._fetch(block, block, now)
            self.carrier.counters.late += 1
            held = self._held[block]
        if not held.awaited:
            self.carrier.await_(held.mark)
            held.awaited = True
        return held

    def lend(self, block: int) -> None:
        """Put the slot's tensors in place of the home's while the block runs; `begin` came before."""
        for leaf, view in zip(self.streamed[block].leaves, self._views_of(block), strict=True):
            leaf.put(view)

    def take_back(self, block: int) -> None:
        for leaf, home in zip(self.streamed[block].leaves, self._held[block].homes, strict=True):
            leaf.put(home)

    def slot_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes are in a slot."""
        begin = tensor.untyped_storage().data_ptr()
        return any(slot.data_ptr() == begin for slot in self._slots)

    def storage(self, block: int, now: Pass) -> torch.UntypedStorage:
        """Where the block's bytes are on the device now, laid out as whenever they are there."""
        return self._slots[self.need(block, now).slot].untyped_storage()

    def forget(self) -> None:
        """What the slots hold is worthless: homes have changed."""
        self._held.clear()

    def release(self) -> None:
        """Give the device memory back; the next use takes it again. Nobody may be given it before copies into it, which
        may be for a pass that does not come, are done."""
        for held in self._held.values():
            if not held.awaited:
                self.carrier.await_(held.mark)
        self.forget()
        self._slots.clear()
        self._views.clear()

    def _is_of_now(self, block: int) -> bool:
        """Whether what was copied is what the parameters are now."""
        pairs = zip(self.streamed[block].leaves, self._held[block].homes, strict=True)
        return all(leaf.get().data_ptr() == home.data_ptr() for leaf, home in pairs)

    def _fetch(self, block: int, computing: int, now: Pass) -> None:
        slot = self._free_slot(block, computing, now)
        if slot is None:
            return  # everything that is there is needed sooner
        homes = [leaf.get() for leaf in self.streamed[block].leaves]
        self._held[block] = _Held(slot, homes, None)
        pairs: list[Pair] = list(zip(self._views_of(block), homes, strict=True))
        self._held[block].mark = self.carrier.fetch(pairs)
        self.carrier.counters.fetches += 1

    def _free_slot(self, block: int, computing: int, now: Pass) -> int | None:
        used = {held.slot for held in self._held.values()}
        if len(used) < min(self.ahead + 1, len(self.streamed)):
            return self._new_slot(used)
        next_ones = {use.block for use in soon(computing, self.blocks, now, self.ahead)} if block != computing else {}
        given_up = farthest(list(self._held), computing, self.blocks, now, spared=lambda one: one in next_ones)
        return None if given_up is None else self._held.pop(given_up).slot

    def _new_slot(self, used: set[int]) -> int:
        number = next(number for number in range(len(used) + 1) if number not in used)
        if number == len(self._slots):
            largest = max(one.nbytes for one in self.streamed.values())
            self._slots.append(torch.empty(largest, dtype=torch.uint8, device=self.carrier.device))
        return number

    def _views_of(self, block: int) -> list[torch.Tensor]:
        slot = self._held[block].slot
        if (block, slot) not in self._views:
            own = self.streamed[block]
            raw = self._slots[slot]
            self._views[block, slot] = [
                placed(raw[begin : begin + leaf.get().nbytes], leaf.get())
                for leaf, begin in zip(own.leaves, own.offsets, strict=True)
            ]
        return self._views[block, slot]
