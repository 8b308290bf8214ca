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

from supertuner.train.offload.host_memory import HostMemory, bytes_of
from supertuner.train.offload.param_storage import is_plain
from supertuner.train.offload.transfer import Carrier, Mark

Storages: TypeAlias = set[int]
"""Addresses of storages."""


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A tensor's form within its storage."""

    dtype: torch.dtype
    begin: int
    shape: torch.Size
    stride: tuple[int, ...]
    conjugated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.is_conj())

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.begin, self.shape, self.stride)
        return made.conj() if self.conjugated else made


@dataclass(frozen=True, eq=False, slots=True)
class Borrowed:
    block: int
    view: View


class Sent:
    """One storage in host memory."""

    __slots__ = ("__weakref__", "awaited", "device", "fetched", "home", "mark", "uses")

    def __init__(self, device: torch.Tensor, home: torch.Tensor) -> None:
        self.device: torch.Tensor | None = device
        """Its bytes on the device, as long as they are there."""
        self.fetched = False
        """Whether they came back; else they have been there all the time."""
        self.home = home
        self.mark: Mark = None
        """When the last copy of it, there or back, is done."""
        self.awaited = False
        """Whether the computation has waited for that."""
        self.uses = 0
        """Tensors of it that are still to be asked for."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    sent: Sent
    view: View


class Sender:
    """Sends a block's activations home while it computes, and brings them back."""

    def __init__(self, carrier: Carrier, host: HostMemory, *, least_bytes: int, at_once: int) -> None:
        self._carrier, self._host, self._least = carrier, host, least_bytes
        self.at_once = at_once
        """Blocks whose activations may be on their way home together."""
        self._parcels: dict[int, list[Sent]] = {}
        self._under_way: deque[int] = deque()
        self._alive = 0

    def begin(self, block: int) -> dict[int, Sent]:
        """A forward pass of the block begins: what is sent of it, by the storage's address."""
        self.done(block)
        self._parcels[block] = []
        return {}

    def pack(self, block: int, tensor: torch.Tensor, own: dict[int, Sent], staying: Storages) -> Part | torch.Tensor:
        """The answer to autograd. `own` keeps every storage of this pass alive: an address means one storage only."""
        if not is_plain(tensor) or tensor.device != self._carrier.device or tensor.is_sparse:
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < self._least or address in staying:
            return tensor
        if address not in own:
            own[address] = self._begun(bytes_of(tensor))
            self._parcels[block].append(own[address])
        own[address].uses += 1
        return Part(own[address], View.of(tensor))

    def end(self, block: int) -> None:
        """The block's forward pass is over. Its storages leave the device when the computation has waited for them."""
        self._under_way.append(block)
        while len(self._under_way) > self.at_once:
            for sent in self._parcels.get(self._under_way.popleft(), ()):
                self._leave(sent)

    def bring(self, block: int) -> None:
        """Begin to fetch what the block's backward pass will ask for."""
        for sent in self._parcels.get(block, ()):
            if sent.device is None and sent.uses:
                self._fetch(sent)

    def unpack(self, part: Part) -> torch.Tensor:
        sent = part.sent
        if sent.device is None:
            self._fetch(sent)
        assert sent.device is not None
        found = part.view.within(sent.device.untyped_storage())
        sent.uses -= 1
        if sent.fetched:
            self._await(sent)
            if sent.uses <= 0:  # as autograd drops what it has used; whoever asks again gets it from home again
                sent.device = None
        return found

    def done(self, block: int) -> None:
        """The block's backward pass is over: what nobody asked for leaves too."""
        for sent in self._parcels.pop(block, ()):
            self._leave(sent)

    def done_all(self) -> None:
        """A new pass begins."""
        for block in list(self._parcels):
            self.done(block)
        self._under_way.clear()
        if self._alive == 0:
            self._host.take_back_all()

    def _begun(self, device: torch.Tensor) -> Sent:
        sent = Sent(device, self._host.take(device.nbytes))
        sent.mark = self._carrier.send([(sent.home, device)])
        self._alive += 1
        weakref.finalize(sent, self._freed).atexit = False
        return sent

    def _fetch(self, sent: Sent) -> None:
        sent.device = torch.empty_like(sent.home, device=self._carrier.device)
        sent.mark = self._carrier.fetch([(sent.device, sent.home)], after=(sent.mark,))
        sent.awaited, sent.fetched = False, True

    def _leave(self, sent: Sent) -> None:
        """From here on the allocator may give its device memory to others: no copy uses it any more."""
        if sent.device is not None:
            self._await(sent)
            sent.device = None

    def _await(self, sent: Sent) -> None:
        if not sent.awaited:
            self._carrier.await_(sent.mark)
            sent.awaited = True

    def _freed(self) -> None:
        """Home memory is given back when no graph holds any of it: after every backward pass, as a rule."""
        self._alive -= 1


class Inputs:
    """Which tensors several blocks are given: to send them would free nothing."""

    def __init__(self) -> None:
        self._before: list[weakref.ref[torch.Tensor]] = []

    def shared(self, tensors: Iterable[torch.Tensor]) -> Storages:
        """Addresses of those that the block before was given too."""
        given = list(tensors)
        before = {id(tensor) for reference in self._before if (tensor := reference()) is not None}
        self._before = [weakref.ref(tensor) for tensor in given]
        return {tensor.untyped_storage().data_ptr() for tensor in given if id(tensor) in before}


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in what a block is given or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
