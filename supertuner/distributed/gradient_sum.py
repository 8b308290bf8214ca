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
BUCKET_BYTES = 16 << 20
"""Small tensors that travel together: enough to fill any line, and little beside the gradients themselves."""
MAX_BUCKETS_IN_FLIGHT = 4
"""Pieces at a time: most are copies."""
NO_GRADIENT, ON_DEVICE, ON_HOST = 0, 1, 2


class ReplicatedGradientReduction:
    """A reduction for processes that each have all trained parameters."""

    def begin_backward(self, is_last: bool) -> None:
        pass

    def all_reduce(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        trainable_parameters, total = list(parameters), loss.detach().reshape(1).clone()
        if loss.device.type == "cpu":
            _all_reduce_on_cpu(trainable_parameters, total)
        else:
            _all_reduce_on_device(trainable_parameters, total)
        return total.reshape(loss.shape)

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        return local_norm


def _all_reduce_on_cpu(parameters: Sequence[nn.Parameter], total_loss: torch.Tensor) -> None:
    """Who has which gradient travels with them: on a CPU it can be looked at for nothing, and every message counts."""
    gradient_counts = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=total_loss.dtype)
    gradients = [_gradient_or_zeros(parameter, parameter.device) for parameter in parameters]
    all_reduce_tensors([total_loss, gradient_counts, *gradients])
    for parameter, gradient, count in zip(parameters, gradients, gradient_counts.tolist(), strict=True):
        parameter.grad = gradient if count else None


def _all_reduce_on_device(parameters: Sequence[nn.Parameter], total_loss: torch.Tensor) -> None:
    """The host asks the others beforehand, while the device still computes: nobody waits for the device to look.

    Under a plan a gradient may be in host memory: a process without it sends its zeros from where the others have
    theirs.
    """
    locations = torch.tensor([_gradient_location(parameter) for parameter in parameters], dtype=torch.uint8)
    dist.all_reduce(locations, dist.ReduceOp.MAX)
    devices = {ON_DEVICE: total_loss.device, ON_HOST: torch.device("cpu")}
    participating = [
        (parameter, devices[home]) for parameter, home in zip(parameters, locations.tolist(), strict=True) if home
    ]
    gradients = [_gradient_or_zeros(parameter, home) for parameter, home in participating]
    all_reduce_tensors([total_loss, *gradients])
    for (parameter, _), gradient in zip(participating, gradients, strict=True):
        parameter.grad = gradient.to(parameter.device)


def _gradient_location(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return NO_GRADIENT
    return ON_HOST if parameter.grad.device.type == "cpu" else ON_DEVICE


def _gradient_or_zeros(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Of a parameter that this process had no use for in the window, zeros; all from the same memory."""
    return torch.zeros_like(parameter, device=device) if parameter.grad is None else parameter.grad.to(device)


def all_reduce_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Each becomes its sum over all processes, in place."""
    in_flight: deque[_BucketInFlight] = deque()
    for bucket in split_into_buckets(tensors):
        in_flight.append(_start_all_reduce(bucket))
        while len(in_flight) > MAX_BUCKETS_IN_FLIGHT:
            in_flight.popleft().wait_and_unpack()
    for pending in in_flight:
        pending.wait_and_unpack()


def split_into_buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors one by one; small ones of one dtype and device, in their order, as many together as `PIECE_BYTES`
    has room for."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    room_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        bucket_key = (tensor.dtype, tensor.device)
        if tensor.nbytes >= LARGE_BYTES:
            yield [tensor]
            continue
        if bucket_key in open_buckets and tensor.nbytes > room_bytes[bucket_key]:
            yield open_buckets.pop(bucket_key)
        if bucket_key not in open_buckets:
            open_buckets[bucket_key], room_bytes[bucket_key] = [], BUCKET_BYTES
        open_buckets[bucket_key].append(tensor)
        room_bytes[bucket_key] -= tensor.nbytes
    yield from open_buckets.values()


@dataclass(frozen=True, eq=False, slots=True)
class _BucketInFlight:
    """A piece under way."""

    tensors: list[torch.Tensor]
    flat: torch.Tensor
    work: dist.Work

    def wait_and_unpack(self) -> None:
        self.work.wait()
        if len(self.tensors) == 1 and self.tensors[0].data_ptr() == self.flat.data_ptr():
            return
        parts = torch.split(self.flat, [tensor.numel() for tensor in self.tensors])
        torch._foreach_copy_(self.tensors, [part.view_as(t) for part, t in zip(parts, self.tensors, strict=True)])


def _start_all_reduce(bucket: list[torch.Tensor]) -> _BucketInFlight:
    sent_in_place = len(bucket) == 1 and bucket[0].is_contiguous()  # a large one travels as it is
    flat = bucket[0].view(-1) if sent_in_place else torch.cat([tensor.reshape(-1) for tensor in bucket])
    work = dist.all_reduce(flat, async_op=True)
    assert work is not None, "this process is one of those that add up"
    return _BucketInFlight(bucket, flat, work)
