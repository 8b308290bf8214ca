"""Sums gradients over ranks that each hold all trained parameters: once per window, in few large buckets.

A window is the samples of one optimizer step. All ranks use the same buckets in the same order: they agree on the
parameters that take part, and a rank without a gradient for one of them contributes zeros. A repeated run on the
same number of ranks therefore gives the same bits. While a bucket is in flight, the next one is packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from supertuner.core.waiting import waiting_for_other_ranks

LARGE_BYTES = 1 << 20
"""Tensors from this size on are buckets of their own, reduced in place. Smaller ones are copied into shared buckets."""
BUCKET_BYTES = 16 << 20
"""Bytes of small tensors in one bucket: enough to saturate a link, and little beside the gradients themselves."""
MAX_BUCKETS_IN_FLIGHT = 4
"""Buckets whose reduction may be pending while the next one is started. Bounds the memory of the copies."""
NO_GRADIENT, ON_DEVICE, ON_HOST = 0, 1, 2


class ReplicatedGradientReduction:
    """All-reduce of gradients for ranks that each hold all trained parameters (DDP, and adapters under FSDP)."""

    def begin_backward(self, is_last: bool) -> None:
        pass

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        trainable_parameters, total = list(parameters), loss.detach().reshape(1).clone()
        if loss.device.type == "cpu":
            _all_reduce_on_cpu(trainable_parameters, total)
        else:
            _all_reduce_on_device(trainable_parameters, total)
        return total.reshape(loss.shape)

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        return local_norm


def _all_reduce_on_cpu(parameters: Sequence[nn.Parameter], total_loss: torch.Tensor) -> None:
    """Sum gradients, the loss, and for each parameter the number of ranks that have a gradient, in one round.

    On a CPU reading that number is free, so no separate message is needed as on a GPU.
    """
    gradient_counts = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=total_loss.dtype)
    gradients = [_gradient_or_zeros(parameter, parameter.device) for parameter in parameters]
    all_reduce_tensors([total_loss, gradient_counts, *gradients])
    for parameter, gradient, count in zip(parameters, gradients, gradient_counts.tolist(), strict=True):
        parameter.grad = gradient if count else None


def _all_reduce_on_device(parameters: Sequence[nn.Parameter], total_loss: torch.Tensor) -> None:
    """Agree on which gradients exist, then sum them.

    The ranks agree through host memory (gloo) while the GPU still computes: reading a result from the GPU would make
    the host wait for it. Under an offload plan a gradient may be in host memory; a rank without that gradient then
    contributes zeros from host memory too, since all ranks must use the same backend.
    """
    locations = torch.tensor([_gradient_location(parameter) for parameter in parameters], dtype=torch.uint8)
    with waiting_for_other_ranks("agreement on gradients"):
        dist.all_reduce(locations, dist.ReduceOp.MAX)
    devices = {ON_DEVICE: total_loss.device, ON_HOST: torch.device("cpu")}
    gradients = {
        parameter: _gradient_or_zeros(parameter, devices[location])
        for parameter, location in zip(parameters, locations.tolist(), strict=True)
        if location
    }
    all_reduce_tensors([total_loss, *gradients.values()])
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.to(parameter.device)


def _gradient_location(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return NO_GRADIENT
    return ON_HOST if parameter.grad.device.type == "cpu" else ON_DEVICE


def _gradient_or_zeros(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """The gradient, or zeros if this rank did not use the parameter in the window; on `device` in all ranks."""
    return torch.zeros_like(parameter, device=device) if parameter.grad is None else parameter.grad.to(device)


def all_reduce_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, in place."""
    in_flight: deque[_BucketInFlight] = deque()
    for bucket in split_into_buckets(tensors):
        in_flight.append(_start_all_reduce(bucket))
        while len(in_flight) > MAX_BUCKETS_IN_FLIGHT:
            in_flight.popleft().wait_and_unpack()
    for pending in in_flight:
        pending.wait_and_unpack()


def split_into_buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors alone; small ones of the same dtype and device together, in their order, up to BUCKET_BYTES."""
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
    """A bucket whose all-reduce has started."""

    tensors: list[torch.Tensor]
    flat: torch.Tensor
    work: dist.Work

    def wait_and_unpack(self) -> None:
        with waiting_for_other_ranks("gradient all-reduce"):
            self.work.wait()
        if len(self.tensors) == 1 and self.tensors[0].data_ptr() == self.flat.data_ptr():
            return
        parts = torch.split(self.flat, [tensor.numel() for tensor in self.tensors])
        torch._foreach_copy_(self.tensors, [part.view_as(t) for part, t in zip(parts, self.tensors, strict=True)])


def _start_all_reduce(bucket: list[torch.Tensor]) -> _BucketInFlight:
    sent_in_place = len(bucket) == 1 and bucket[0].is_contiguous()  # no copy
    flat = bucket[0].view(-1) if sent_in_place else torch.cat([tensor.reshape(-1) for tensor in bucket])
    work = dist.all_reduce(flat, async_op=True)
    assert work is not None, "dist.all_reduce returned no work: this process is not in the group"
    return _BucketInFlight(bucket, flat, work)
