"""Sums of a window's gradients over processes that each have all trained parameters: once in a window, few and large.

Tensors travel together in pieces of a fixed size and order, whatever this process has a gradient for: on the same
number of processes the same bits come out. While a piece travels, the next is put together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

LARGE_BYTES = 1 << 20
"""A tensor that travels by itself, as it lies there. Smaller ones are copied together: messages have a price too."""
PIECE_BYTES = 16 << 20
"""Small tensors that travel together: enough to fill any line, and little beside the gradients themselves."""
UNDER_WAY = 4
"""Pieces at a time: most are copies."""
NOWHERE, ON_DEVICE, IN_HOST = 0, 1, 2


class Replicated:
    """A reduction for processes that each have all trained parameters."""

    def begin(self, last: bool) -> None:
        pass

    def add(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        trained, total = list(parameters), loss.detach().reshape(1).clone()
        if loss.device.type == "cpu":
            _add_at_once(trained, total)
        else:
            _add_where_agreed(trained, total)
        return total.reshape(loss.shape)

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        return norm


def _add_at_once(trained: Sequence[nn.Parameter], total: torch.Tensor) -> None:
    """Who has which gradient travels with them: on a CPU it can be looked at for nothing, and every message counts."""
    users = torch.tensor([parameter.grad is not None for parameter in trained], dtype=total.dtype)
    gradients = [_gradient(parameter, parameter.device) for parameter in trained]
    add_up([total, users, *gradients])
    for parameter, gradient, count in zip(trained, gradients, users.tolist(), strict=True):
        parameter.grad = gradient if count else None


def _add_where_agreed(trained: Sequence[nn.Parameter], total: torch.Tensor) -> None:
    """The host asks the others beforehand, while the device still computes: nobody waits for the device to look.

    Under a plan a gradient may be in host memory: a process without it sends its zeros from where the others have
    theirs.
    """
    here = torch.tensor([_home(parameter) for parameter in trained], dtype=torch.uint8)
    dist.all_reduce(here, dist.ReduceOp.MAX)
    homes = {ON_DEVICE: total.device, IN_HOST: torch.device("cpu")}
    wanted = [(parameter, homes[home]) for parameter, home in zip(trained, here.tolist(), strict=True) if home]
    gradients = [_gradient(parameter, home) for parameter, home in wanted]
    add_up([total, *gradients])
    for (parameter, _), gradient in zip(wanted, gradients, strict=True):
        parameter.grad = gradient.to(parameter.device)


def _home(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return NOWHERE
    return IN_HOST if parameter.grad.device.type == "cpu" else ON_DEVICE


def _gradient(parameter: nn.Parameter, home: torch.device) -> torch.Tensor:
    """Of a parameter that this process had no use for in the window, zeros; all from the same memory."""
    return torch.zeros_like(parameter, device=home) if parameter.grad is None else parameter.grad.to(home)


def add_up(tensors: Iterable[torch.Tensor]) -> None:
    """Each becomes its sum over all processes, in place."""
    under_way: deque[_Sent] = deque()
    for piece in pieces(tensors):
        under_way.append(_sent(piece))
        while len(under_way) > UNDER_WAY:
            under_way.popleft().arrive()
    for sent in under_way:
        sent.arrive()


def pieces(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors one by one; small ones of one dtype and device, in their order, as many together as `PIECE_BYTES`
    has room for."""
    begun: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if tensor.nbytes >= LARGE_BYTES:
            yield [tensor]
            continue
        if kind in begun and tensor.nbytes > room[kind]:
            yield begun.pop(kind)
        if kind not in begun:
            begun[kind], room[kind] = [], PIECE_BYTES
        begun[kind].append(tensor)
        room[kind] -= tensor.nbytes
    yield from begun.values()


@dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    """A piece under way."""

    tensors: list[torch.Tensor]
    whole: torch.Tensor
    work: dist.Work

    def arrive(self) -> None:
        self.work.wait()
        if len(self.tensors) == 1 and self.tensors[0].data_ptr() == self.whole.data_ptr():
            return
        parts = torch.split(self.whole, [tensor.numel() for tensor in self.tensors])
        torch._foreach_copy_(self.tensors, [part.view_as(t) for part, t in zip(parts, self.tensors, strict=True)])


def _sent(piece: list[torch.Tensor]) -> _Sent:
    alone = len(piece) == 1 and piece[0].is_contiguous()  # a large one travels as it is
    whole = piece[0].view(-1) if alone else torch.cat([tensor.reshape(-1) for tensor in piece])
    work = dist.all_reduce(whole, async_op=True)
    assert work is not None, "this process is one of those that add up"
    return _Sent(piece, whole, work)
