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
from supertuner.distributed.gradient_sum import ReplicatedGradientReduction
from supertuner.distributed.sharded_expert_swap import ShardedExpertSwap
from supertuner.models.adapters.attach import RowShard, TrainableExpert
from supertuner.models.blocks import named_blocks
from supertuner.step.window import ExpertState
from supertuner.memory.out_of_memory import explain_out_of_memory

OUT_OF_MEMORY_REMEDY = "use more processes, or set parallel.cpu_offload: true"


@dataclass(frozen=True, eq=False, slots=True)
class FsdpShardedModule:
    """An expert's module whose weights are all trained, shared out. (`Parts` says what the calls mean.)"""

    fsdp_modules: tuple[FSDPModule, ...]
    """Its blocks, and itself for what stands outside of them."""
    dtensors: Mapping[str, DTensor]
    """Its parameters as FSDP knows them."""
    row_shards: Mapping[str, RowShard]

    def mark_changed(self) -> None:
        for module in self.fsdp_modules:
            module.reshard()

    def gather_full(self, name: str, part: torch.Tensor, /) -> torch.Tensor | None:
        row_shard = self.row_shards[name]
        row_counts = rows_per_rank(row_shard.full_shape[0], dist.get_world_size())
        padded = torch.zeros(max(row_counts), *row_shard.full_shape[1:], dtype=part.dtype)
        padded[: len(part)] = part.detach()
        is_rank_zero = dist.get_rank() == 0
        gathered = [torch.empty_like(padded) for _ in row_counts] if is_rank_zero else None
        dist.gather(padded, gathered)
        return torch.cat([rows[:count] for rows, count in zip(gathered, row_counts, strict=True)]) if gathered else None


@dataclass(eq=False, slots=True)
class FsdpSharder:
    """How weights are shared out, and who has been."""

    settings: ParallelSettings
    device: torch.device
    mesh: DeviceMesh
    sharded_modules: list[FsdpShardedModule] = field(default_factory=list)
    """Of experts whose weights are all trained."""
    dtensor_by_parameter: dict[nn.Parameter, DTensor] = field(default_factory=dict)
    """Trained part → the weight as FSDP knows it."""
    expert_swap: ShardedExpertSwap | None = None
    """Experts that wait in host memory; None: all are on the device, or in host memory anyway."""

    def shard_expert(self, trainable: TrainableExpert) -> TrainableExpert:
        """The same in parts, on the device; its module was elsewhere."""
        module = trainable.module
        ignored_params = () if trainable.adapter_type == "full" else tuple(trainable.parameters.values())
        with explain_out_of_memory(f"{trainable.name} in parts does", OUT_OF_MEMORY_REMEDY):
            self.shard_module(module, ignored_params)
        if trainable.adapter_type != "full":
            return trainable
        sharded = _collect_sharded_module(module)
        self.sharded_modules.append(sharded)
        parameters = {name: nn.Parameter(weight.to_local().detach()) for name, weight in sharded.dtensors.items()}
        self.dtensor_by_parameter |= {parameters[name]: weight for name, weight in sharded.dtensors.items()}
        return replace(trainable, parameters=parameters, shards=sharded)

    def enable_expert_swap(self, expert_states: Sequence[ExpertState]) -> None:
        """Have those that do not compute wait in host memory, where the device has one of its own."""
        if len(expert_states) > 1 and self.device.type != "cpu" and not self.settings.cpu_offload:
            self.expert_swap = ShardedExpertSwap(self.device)
            for expert_state in expert_states:
                self.expert_swap.add(expert_state, partial(self.relink_parameters, expert_state.parameters.values()))

    def relink_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """FSDP's weights are elsewhere now: what is trained is there again."""
        for parameter in parameters:
            if parameter in self.dtensor_by_parameter:
                parameter.data = self.dtensor_by_parameter[parameter].to_local().detach()

    def shard_module(self, module: nn.Module, /, ignored_params: Collection[nn.Parameter] = ()) -> None:
        """The module in parts, on the device; what is `outside` stays whole there."""
        for parameter in ignored_params:
            parameter.data = parameter.data.to(self.device)
        reshard = self.settings.reshard_after_forward
        for block in named_blocks(module).values():
            self._fully_shard(block, set(ignored_params), reshard)
        # What stands outside of blocks is little, and the backward pass begins with it: FSDP's own rule (None) has it
        # stay until then.
        self._fully_shard(module, set(ignored_params), None if reshard else False)

    def _fully_shard(
        self, module: nn.Module, ignored_params: set[nn.Parameter], reshard_after_forward: bool | None
    ) -> None:
        module.register_forward_hook(_clone_output_views)  # before FSDP's own
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            # What is computed in is decided by autocast, layer by layer, as in a run of one process.
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            offload_policy=self._offload_policy(),
            ignored_params=ignored_params,
        )

    def _offload_policy(self) -> OffloadPolicy:
        if not self.settings.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")


class FsdpGradientReduction(ReplicatedGradientReduction):
    """A reduction for processes that share out the weights."""

    def __init__(self, sharder: FsdpSharder) -> None:
        self._sharder = sharder
        self._syncs_gradients: bool | None = None

    def begin_backward(self, is_last: bool) -> None:
        """FSDP adds up in the backward pass itself, block by block: told to do so in the last one, or in each."""
        sync_gradients = is_last or self._sharder.settings.reduce_every_batch
        if self._syncs_gradients is not sync_gradients:
            self._syncs_gradients = sync_gradients
            for sharded in self._sharder.sharded_modules:
                for module in sharded.fsdp_modules:
                    module.set_requires_gradient_sync(sync_gradients, recurse=False)

    def all_reduce(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        if not self._sharder.sharded_modules:
            return super().all_reduce(parameters, loss)
        for parameter in parameters:
            dtensor = self._sharder.dtensor_by_parameter[parameter]
            parameter.grad = None if dtensor.grad is None else cast(DTensor, dtensor.grad).to_local()
            dtensor.grad = None
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        if not self._sharder.sharded_modules:
            return local_norm
        squares = local_norm.double().square()
        dist.all_reduce(squares)
        return squares.sqrt().to(local_norm.dtype)


def create_fsdp_sharder(settings: ParallelSettings, device: torch.device) -> FsdpSharder:
    """Sharing out over all processes of the job."""
    return FsdpSharder(settings, device, init_device_mesh(device.type, (dist.get_world_size(),)))


def rows_per_rank(rows: int, world_size: int) -> list[int]:
    """How many rows of a tensor each process has: as torch cuts it, of which the last ones may have none."""
    chunk_rows = -(-rows // world_size)
    return [max(0, min(chunk_rows, rows - rank * chunk_rows)) for rank in range(world_size)]


def _collect_sharded_module(module: nn.Module) -> FsdpShardedModule:
    fsdp_modules = tuple(submodule for submodule in module.modules() if isinstance(submodule, FSDPModule))
    for part in fsdp_modules:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    dtensors = {name: cast(DTensor, parameter) for name, parameter in module.named_parameters()}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = {
        name: RowShard(tuple(weight.shape), sum(rows_per_rank(weight.shape[0], world_size)[:rank]))
        for name, weight in dtensors.items()
    }
    return FsdpShardedModule(fsdp_modules, dtensors, places)


def _clone_output_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """FSDP hangs its work of the backward pass on what a module returns, and warns of views: they may be changed in
    place behind its back."""
    if isinstance(output, torch.Tensor):
        return output.clone() if output.requires_grad and output._is_view() else output
    if isinstance(output, tuple):
        return tuple(_clone_output_views(_module, _inputs, one) for one in output)
    return output
