"""Weights sharded over ranks by FSDP2: each rank holds a shard of every block and gathers the rest while it computes.

    adapters       The frozen base is sharded. Trained parameters are whole on each rank, and their gradients are summed
                   as without FSDP. Optimizer, averages, checkpoints and exports work as usual.
    all weights    Everything is sharded. Outside this file a trained parameter is a plain tensor: this rank's rows of
                   the whole one, in the memory that FSDP gathers from. Elementwise work, such as an optimizer step or
                   an average, needs no change.

Each rank moves one block at a time to its device, keeps its shard and frees the rest before the next: no device ever
holds the whole model. Gradients are sums, not means: losses are already divided by the samples of the whole window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import TrainError
from supertuner.core.waiting import waiting_for_other_ranks
from supertuner.distributed.gradient_sum import ReplicatedGradientReduction
from supertuner.memory.out_of_memory import explain_out_of_memory
from supertuner.models.adapters.attach import RowShard, TrainableExpert
from supertuner.models.blocks import named_blocks
from supertuner.models.library_guards import exclusive_construction
from supertuner.optim.optimizer_registry import OPTIMIZERS
from supertuner.step.expert_swap import ExpertSwap
from supertuner.step.parameter_state import HOST, ParameterState
from supertuner.step.train_step import ExpertState

OUT_OF_MEMORY_REMEDY = "use more processes, or set parallel.cpu_offload: true"


@dataclass(frozen=True, eq=False, slots=True)
class FsdpShardedModule:
    """A sharded module whose weights are all trained. (`ShardedParameters` documents the methods.)"""

    fsdp_modules: tuple[FSDPModule, ...]
    """Its blocks, and the module itself for parameters outside of blocks."""
    dtensors: Mapping[str, DTensor]
    """Its parameters as FSDP holds them."""
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
        with waiting_for_other_ranks("gather of sharded weights"):
            dist.gather(padded, gathered)
        return torch.cat([rows[:count] for rows, count in zip(gathered, row_counts, strict=True)]) if gathered else None


@dataclass(eq=False, slots=True)
class FsdpSharder:
    """Shards modules, and remembers which parameters it has sharded."""

    settings: ParallelSettings
    device: torch.device
    mesh: DeviceMesh
    sharded_modules: list[FsdpShardedModule] = field(default_factory=list)
    """Modules of experts whose weights are all trained."""
    dtensor_by_parameter: dict[nn.Parameter, DTensor] = field(default_factory=dict)
    """Trained parameter (this rank's rows) → the parameter as FSDP holds it."""
    expert_swap: ExpertSwap | None = None
    """Moves idle experts to host memory; None: all stay on the device, or FSDP keeps them in host memory anyway."""
    one_pool: bool = False
    """CPU and GPU share one memory: nothing is gained by moving anything to host memory."""

    @exclusive_construction()
    def shard_expert(self, trainable: TrainableExpert) -> TrainableExpert:
        """Shard an expert whose module is not on the device yet. Returns it with this rank's parameters."""
        module = trainable.module
        ignored_params = () if trainable.adapter_type == "full" else tuple(trainable.parameters.values())
        remedy = "use more processes" if self.one_pool else OUT_OF_MEMORY_REMEDY
        with explain_out_of_memory(f"the shard of {trainable.name} does", remedy):
            self.shard_module(module, ignored_params)
        if trainable.adapter_type != "full":
            return trainable
        sharded = _collect_sharded_module(module)
        self.sharded_modules.append(sharded)
        parameters = {name: nn.Parameter(weight.to_local().detach()) for name, weight in sharded.dtensors.items()}
        self.dtensor_by_parameter |= {parameters[name]: weight for name, weight in sharded.dtensors.items()}
        return replace(trainable, parameters=parameters, shards=sharded)

    def enable_expert_swap(self, expert_states: Sequence[ExpertState]) -> None:
        two_memories = self.device.type != "cpu" and not self.one_pool
        if len(expert_states) > 1 and two_memories and not self.settings.cpu_offload:
            self.expert_swap = ExpertSwap()
            for expert_state in expert_states:
                self.expert_swap.add(expert_state.expert.name, FsdpSwappableExpert(expert_state, self))

    def relink_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Point trained parameters at the memory that FSDP gathers from, after it has moved."""
        for parameter in parameters:
            if parameter in self.dtensor_by_parameter:
                parameter.data = self.dtensor_by_parameter[parameter].to_local().detach()

    def shard_module(self, module: nn.Module, /, ignored_params: Collection[nn.Parameter] = ()) -> None:
        """Shard the module onto the device; `ignored_params` move there whole."""
        for parameter in ignored_params:
            parameter.data = parameter.data.to(self.device)
        reshard = self.settings.reshard_after_forward
        for block in named_blocks(module).values():
            self._fully_shard(block, set(ignored_params), reshard)
        # Parameters outside of blocks are small, and the backward pass begins with them: FSDP's default for a root
        # module (None) keeps them gathered until then.
        self._fully_shard(module, set(ignored_params), None if reshard else False)

    def _fully_shard(self, module: nn.Module, ignored: set[nn.Parameter], reshard: bool | None) -> None:
        module.register_forward_hook(_clone_output_views)  # runs before FSDP's hook
        offload_policy = OffloadPolicy()
        if self.settings.cpu_offload:
            offload_policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard,
            # autocast decides the dtype layer by layer, as in a run with one process.
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            offload_policy=offload_policy,
            ignored_params=ignored,
        )


class FsdpGradientReduction(ReplicatedGradientReduction):
    """If all weights are trained, FSDP itself sums gradients, by reduce-scatter in the backward pass; this only
    controls when. If adapters are trained, each rank holds them whole, and they are summed as without FSDP."""

    def __init__(self, sharder: FsdpSharder) -> None:
        self._sharder = sharder
        self._syncs_gradients: bool | None = None

    def begin_backward(self, is_last: bool) -> None:
        """Let FSDP reduce gradients in the window's last backward pass only, or in each (`reduce_every_batch`)."""
        sync_gradients = is_last or self._sharder.settings.reduce_every_batch
        if self._syncs_gradients is not sync_gradients:
            self._syncs_gradients = sync_gradients
            for sharded in self._sharder.sharded_modules:
                for module in sharded.fsdp_modules:
                    module.set_requires_gradient_sync(sync_gradients, recurse=False)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter], loss: torch.Tensor) -> torch.Tensor:
        if not self._sharder.sharded_modules:
            return super().reduce_gradients(parameters, loss)
        # The gradients are summed already; they only have to become the plain tensors of this rank's rows.
        for parameter in parameters:
            dtensor = self._sharder.dtensor_by_parameter[parameter]
            parameter.grad = None if dtensor.grad is None else cast(DTensor, dtensor.grad).to_local()
            dtensor.grad = None
        total = loss.detach().clone()
        with waiting_for_other_ranks("loss all-reduce"):
            dist.all_reduce(total)
        return total

    def global_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        if not self._sharder.sharded_modules:
            return local_norm
        squares = local_norm.double().square()
        with waiting_for_other_ranks("gradient norm all-reduce"):
            dist.all_reduce(squares)
        return squares.sqrt().to(local_norm.dtype)


def create_fsdp_sharder(settings: ParallelSettings, device: torch.device) -> FsdpSharder:
    """Shards over all ranks of the job."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return FsdpSharder(settings, device, mesh, one_pool=_has_one_pool(device))


def _has_one_pool(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)


def rows_per_rank(rows: int, world_size: int) -> list[int]:
    """How many rows of a tensor each rank holds: as `torch.chunk` splits it; the last ranks may have none."""
    chunk_rows = -(-rows // world_size)
    return [max(0, min(chunk_rows, rows - rank * chunk_rows)) for rank in range(world_size)]


def _collect_sharded_module(module: nn.Module) -> FsdpShardedModule:
    fsdp_modules = tuple(submodule for submodule in module.modules() if isinstance(submodule, FSDPModule))
    for part in fsdp_modules:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has only sums
    dtensors = {name: cast(DTensor, parameter) for name, parameter in module.named_parameters()}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    row_shards = {
        name: RowShard(tuple(weight.shape), sum(rows_per_rank(weight.shape[0], world_size)[:rank]))
        for name, weight in dtensors.items()
    }
    return FsdpShardedModule(fsdp_modules, dtensors, row_shards)


def _clone_output_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Clone outputs that are views: FSDP attaches its backward hooks to a module's outputs and warns about views, which
    could be changed in place without its notice."""
    if isinstance(output, torch.Tensor):
        return output.clone() if output.requires_grad and output._is_view() else output
    if isinstance(output, tuple):
        return tuple(_clone_output_views(_module, _inputs, item) for item in output)
    return output


@dataclass(frozen=True, eq=False, slots=True)
class FsdpSwappableExpert:
    """How a sharded expert moves between device and host memory. Creating it moves the expert to host memory."""

    expert_state: ExpertState
    sharder: FsdpSharder
    move_module: Callable[[nn.Module, torch.device], object] = nn.Module.to

    def __post_init__(self) -> None:
        self._move_to(HOST)

    @property
    def module(self) -> nn.Module:
        return self.expert_state.module

    @property
    def device(self) -> torch.device:
        return self.sharder.device

    @property
    def swapped_parameters(self) -> Collection[nn.Parameter]:
        return self.expert_state.parameters.values()

    def move_to_device(self) -> None:
        self._move_to(self.device)

    def move_to_host(self, *, trained: bool) -> None:
        self._move_to(HOST)

    def _move_to(self, device: torch.device) -> None:
        self.move_module(self.module, device)
        self.sharder.relink_parameters(self.swapped_parameters)
        ParameterState(self.expert_state.optimizer, self.expert_state.ema).move_to(device)


def require_fsdp_supported(config: RunConfig, device: torch.device) -> None:
    """TrainError if the settings ask for something that sharded weights cannot do; called before anything is loaded."""
    if config.parallel.cpu_offload and _has_one_pool(device):
        name = torch.cuda.get_device_name(device)
        raise TrainError(
            f"parallel.cpu_offload is true, and CPU and GPU share one memory on {name}: a copy in host memory would "
            "free nothing and take as much again; set parallel.cpu_offload: false"
        )
    kind = config.model.base_weights
    if kind != "as_computed":
        raise TrainError(
            f'model.base_weights is "{kind}" and parallel.strategy "fsdp": torchao\'s 8-bit tensors cannot be sharded; '
            'set model.base_weights: "as_computed", or parallel.strategy: "ddp"'
        )
    name = config.optimizer.name
    if config.adapter.type == "full" and not OPTIMIZERS[name].elementwise:
        others = " or ".join(f'"{key}"' for key, entry in OPTIMIZERS.items() if entry.elementwise)
        raise TrainError(
            f'optimizer.name is "{name}", adapter.type "full" and parallel.strategy "fsdp": this optimizer needs whole '
            f'tensors, and each rank has only some rows; use {others}, an adapter, or parallel.strategy: "ddp"'
        )
    choices = config.plan.explicit_choices.items()
    plan_settings = ", ".join(f"plan.{name}: {value}" for name, value in choices if name != "idle_experts")
    if config.plan.act != "never" and plan_settings:
        raise TrainError(
            f'parallel.strategy is "fsdp", and {plan_settings} asks for an offload plan: FSDP moves weights itself; '
            'leave it out (see parallel.cpu_offload), or set parallel.strategy: "ddp"'
        )
