"""Weights shared out over processes by FSDP2: of each block a part is here, and the rest comes while it is computed.

    adapters       the frozen base is shared out; what is trained is here as a whole, and its gradients are added up
                   like those of processes that have everything. Optimizer, average, checkpoint, export: as ever.
    all weights    everything is shared out. Outside of this file a trained parameter is a plain tensor, this process's
                   rows of the whole one, in the memory that FSDP gathers from: whatever is computed for each weight by
                   itself, an optimizer's step or an average, does not notice.

Each process moves a block to its device, keeps its part and lets go of the rest before the next: no device ever holds
the whole model. Gradients are sums, not means: losses are divided by the samples of the whole window already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.distributed.expert_swap import Turns
from supertuner.distributed.gradient_sum import Replicated
from supertuner.models.adapters.attach import Place, Trained
from supertuner.models.blocks import blocks_of
from supertuner.step.window import Trainee
from supertuner.train.out_of_memory import fitting

LESS_MEMORY = "use more processes, or set parallel.cpu_offload: true"


@dataclass(frozen=True, eq=False, slots=True)
class Shards:
    """An expert's module whose weights are all trained, shared out. (`Parts` says what the calls mean.)"""

    modules: tuple[FSDPModule, ...]
    """Its blocks, and itself for what stands outside of them."""
    weights: Mapping[str, DTensor]
    """Its parameters as FSDP knows them."""
    places: Mapping[str, Place]

    def changed(self) -> None:
        for module in self.modules:
            module.reshard()

    def whole(self, name: str, part: torch.Tensor, /) -> torch.Tensor | None:
        place = self.places[name]
        counts = rows_of(place.shape[0], dist.get_world_size())
        padded = torch.zeros(max(counts), *place.shape[1:], dtype=part.dtype)
        padded[: len(part)] = part.detach()
        first = dist.get_rank() == 0
        gathered = [torch.empty_like(padded) for _ in counts] if first else None
        dist.gather(padded, gathered)
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)]) if gathered else None


@dataclass(eq=False, slots=True)
class Sharing:
    """How weights are shared out, and who has been."""

    settings: ParallelSettings
    device: torch.device
    mesh: DeviceMesh
    shards: list[Shards] = field(default_factory=list)
    """Of experts whose weights are all trained."""
    known_as: dict[nn.Parameter, DTensor] = field(default_factory=dict)
    """Trained part → the weight as FSDP knows it."""
    turns: Turns | None = None
    """Experts that wait in host memory; None: all are on the device, or in host memory anyway."""

    def share_out(self, trained: Trained) -> Trained:
        """The same in parts, on the device; its module was elsewhere."""
        module = trained.module
        outside = () if trained.kind == "full" else tuple(trained.parameters.values())
        with fitting(f"{trained.name} in parts does", LESS_MEMORY):
            self.share(module, outside)
        if trained.kind != "full":
            return trained
        shards = _shards_of(module)
        self.shards.append(shards)
        parameters = {name: nn.Parameter(weight.to_local().detach()) for name, weight in shards.weights.items()}
        self.known_as |= {parameters[name]: weight for name, weight in shards.weights.items()}
        return replace(trained, parameters=parameters, parts=shards)

    def take_turns(self, trainees: Sequence[Trainee]) -> None:
        """Have those that do not compute wait in host memory, where the device has one of its own."""
        if len(trainees) > 1 and self.device.type != "cpu" and not self.settings.cpu_offload:
            self.turns = Turns(self.device)
            for trainee in trainees:
                self.turns.add(trainee, partial(self.relink, trainee.parameters.values()))

    def relink(self, parts: Iterable[nn.Parameter]) -> None:
        """FSDP's weights are elsewhere now: what is trained is there again."""
        for part in parts:
            if part in self.known_as:
                part.data = self.known_as[part].to_local().detach()

    def share(self, module: nn.Module, /, outside: Collection[nn.Parameter] = ()) -> None:
        """The module in parts, on the device; what is `outside` stays whole there."""
        for parameter in outside:
            parameter.data = parameter.data.to(self.device)
        reshard = self.settings.reshard_after_forward
        for block in blocks_of(module).values():
            self._shard(block, set(outside), reshard)
        # What stands outside of blocks is little, and the backward pass begins with it: FSDP's own rule (None) has it
        # stay until then.
        self._shard(module, set(outside), None if reshard else False)

    def _shard(self, module: nn.Module, outside: set[nn.Parameter], reshard: bool | None) -> None:
        module.register_forward_hook(_owned)  # before FSDP's own
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard,
            # What is computed in is decided by autocast, layer by layer, as in a run of one process.
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            offload_policy=self._offload(),
            ignored_params=outside,
        )

    def _offload(self) -> OffloadPolicy:
        if not self.settings.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")


class Sharded(Replicated):
    """A reduction for processes that share out the weights."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._sums: bool | None = None

    def begin(self, last: bool) -> None:
        """FSDP adds up in the backward pass itself, block by block: told to do so in the last one, or in each."""
        sums = last or self._sharing.settings.reduce_every_batch
        if self._sums is not sums:
            self._sums = sums
            for shards in self._sharing.shards:
                for module in shards.modules:
                    module.set_requires_gradient_sync(sums, recurse=False)

    def add(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        if not self._sharing.shards:
            return super().add(parameters, loss)
        for part in parameters:
            weight = self._sharing.known_as[part]
            part.grad = None if weight.grad is None else cast(DTensor, weight.grad).to_local()
            weight.grad = None
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    def norm(self, norm: torch.Tensor) -> torch.Tensor:
        if not self._sharing.shards:
            return norm
        squares = norm.double().square()
        dist.all_reduce(squares)
        return squares.sqrt().to(norm.dtype)


def sharing_over_all(settings: ParallelSettings, device: torch.device) -> Sharing:
    """Sharing out over all processes of the job."""
    return Sharing(settings, device, init_device_mesh(device.type, (dist.get_world_size(),)))


def rows_of(rows: int, ranks: int) -> list[int]:
    """How many rows of a tensor each process has: as torch cuts it, of which the last ones may have none."""
    each = -(-rows // ranks)
    return [max(0, min(each, rows - rank * each)) for rank in range(ranks)]


def _shards_of(module: nn.Module) -> Shards:
    modules = tuple(part for part in module.modules() if isinstance(part, FSDPModule))
    for part in modules:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    weights = {name: cast(DTensor, parameter) for name, parameter in module.named_parameters()}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    places = {
        name: Place(tuple(weight.shape), sum(rows_of(weight.shape[0], ranks)[:rank]))
        for name, weight in weights.items()
    }
    return Shards(modules, weights, places)


def _owned(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """FSDP hangs its work of the backward pass on what a module returns, and warns of views: they may be changed in
    place behind its back."""
    if isinstance(output, torch.Tensor):
        return output.clone() if output.requires_grad and output._is_view() else output
    if isinstance(output, tuple):
        return tuple(_owned(_module, _inputs, one) for one in output)
    return output
