"""Applies an offload plan to an expert in training, and removes it again; reports what cannot be followed.

A plan that moves nothing installs nothing: module, optimizer and window then work as without a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from supertuner.core.errors import TrainError
from supertuner.plan.placement.memory_needs import MIN_OFFLOAD_BYTES, UPDATE_PIECE_BYTES
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.step.parameter_state import HOST, ParameterState
from supertuner.step.train_step import ExpertState
from supertuner.train.offload.activations import ActivationOffloader
from supertuner.train.offload.offloaded_blocks import OffloadedBlocks
from supertuner.train.offload.optimizer_offload import PlannedOptimizerOffload
from supertuner.train.offload.param_storage import stored_tensors
from supertuner.train.offload.pinned_memory_pool import HostMemoryPool
from supertuner.train.offload.tensor_host_buffers import HostBuffers
from supertuner.train.offload.transfer import DeviceTransfer
from supertuner.train.offload.weight_ring import StreamedBlock, WeightRing


@dataclass(frozen=True, eq=False, slots=True)
class OffloadedExpert:
    """An expert with its plan applied."""

    expert_state: ExpertState
    plan: MemoryPlan
    transfer: DeviceTransfer
    host_buffers: HostBuffers
    """For weights and optimizer state, which last. Activations have a separate pool."""
    parameter_state: ParameterState
    ring: WeightRing
    offloader: ActivationOffloader
    blocks: OffloadedBlocks | None
    optimizer_offload: PlannedOptimizerOffload | None
    unfollowed: tuple[str, ...]
    """Parts of the plan that are not followed, with reasons. Results are the same."""

    def resident_parameters(self) -> list[nn.Parameter]:
        """Parameters that the plan keeps on the device."""
        streamed_ids = self.ring.parameter_ids()
        return [parameter for parameter in self.expert_state.module.parameters() if id(parameter) not in streamed_ids]

    def set_prefetch_depth(self, blocks: int) -> None:
        """Fetch this many blocks ahead from now on. Only between two windows."""
        self.ring.release_slots()
        self.ring.prefetch_depth = blocks
        self.offloader.max_blocks_in_flight = max(1, blocks)

    def detach(self) -> None:
        """Stop following the plan; every tensor stays where it is. Only between two windows."""
        if self.blocks is not None:
            self.blocks.remove()
        if self.optimizer_offload is not None:
            self.optimizer_offload.remove()
        self.expert_state.optimizer_offload = None


def apply_plan(
    expert_state: ExpertState,
    plan: MemoryPlan,
    transfer: DeviceTransfer,
    *,
    on_device: bool = True,
    host_buffers: HostBuffers | None = None,
    min_offload_bytes: int = MIN_OFFLOAD_BYTES,
) -> OffloadedExpert:
    """Apply the plan. The module may be on the device or the host; afterwards each tensor is where the plan puts it.

    From now on the plan decides block by block whether activations are recomputed. With `on_device=False` the resident
    parameters stay where they are, until an expert swap brings them. `host_buffers` are those of a detached plan, which
    stay in use.
    """
    module = expert_state.module
    rows, unfollowed = _match_blocks(module, plan)
    _disable_gradient_checkpointing(module)
    host_buffers = host_buffers or HostBuffers(transfer, HostMemoryPool(transfer.device))
    parameter_state = ParameterState(expert_state.optimizer, expert_state.ema)
    modules = [module.get_submodule(row.name) for row in rows]
    ring = WeightRing(dict(_build_streamed_blocks(module, modules, rows)), len(rows), plan.ahead, transfer)
    offloader = ActivationOffloader(transfer, HostMemoryPool(transfer.device), min_offload_bytes, max(1, plan.ahead))
    blocks = None
    if ring.streamed or any(row.activations is not ActivationPolicy.KEEP for row in rows):
        blocks = OffloadedBlocks(modules, [row.activations for row in rows], ring, offloader)
        blocks.install()
    for block in ring.streamed.values():
        block.move_to_host(host_buffers)
    streamed_ids = ring.parameter_ids()
    names = [name for name, parameter in expert_state.parameters.items() if id(parameter) in streamed_ids]
    optimizer = None
    if names or plan.stepping is not OptimizerPlacement.GPU:
        pieces = _split_into_pieces(expert_state, modules)
        optimizer = PlannedOptimizerOffload(
            expert_state.parameters, parameter_state, plan.stepping, pieces, names, transfer, host_buffers, ring, blocks
        )
        optimizer.install()
    expert_state.optimizer_offload = optimizer
    offloaded = OffloadedExpert(
        expert_state, plan, transfer, host_buffers, parameter_state, ring, offloader, blocks, optimizer, unfollowed
    )
    move_to_device(module.buffers(), transfer.device)
    if on_device:
        move_to_device(offloaded.resident_parameters(), transfer.device)
    if plan.stepping is not OptimizerPlacement.GPU:
        parameter_state.move_to(HOST)
    elif on_device:
        parameter_state.move_to(transfer.device)
    return offloaded


def move_to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        for stored in stored_tensors(tensor):
            stored.put(stored.get().to(device))


def _match_blocks(module: nn.Module, plan: MemoryPlan) -> tuple[list[BlockPlan], tuple[str, ...]]:
    """(rows of the plan that are blocks of the module, requests for other parts, which cannot be followed)."""
    modules_by_name = dict(module.named_modules())
    rows = [row for row in plan.blocks if row.name in modules_by_name and row.name]
    other_rows = [row for row in plan.blocks if row.name not in modules_by_name]
    if unknown := [row.name for row in other_rows if not row.name.startswith("(")]:
        problem = f"{type(module).__name__} has no block {unknown[0]} ({len(unknown)} such blocks)"
        raise TrainError(f"the plan belongs to another model: {problem}; make a new plan for this configuration")
    if len({id(modules_by_name[row.name]) for row in rows}) < len(rows):
        raise TrainError(f"the plan names a block of {type(module).__name__} twice; make a new plan")
    unfollowed = [
        f"{row.name}: {policy} is for blocks only; parameters around them stay, and their activations are kept"
        for row in other_rows
        for policy in (row.weights, row.activations)
        if policy not in (WeightPlacement.GPU, ActivationPolicy.KEEP)
    ]
    return rows, tuple(unfollowed)


def _build_streamed_blocks(
    root: nn.Module, modules: Sequence[nn.Module], rows: Sequence[BlockPlan]
) -> Iterator[tuple[int, StreamedBlock]]:
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    holders = Counter(id(parameter) for module in modules for parameter in module.parameters())
    for number, (module, row) in enumerate(zip(modules, rows, strict=True)):
        if row.weights is WeightPlacement.STREAMED:
            unshared = [p for p in module.parameters() if holders[id(p)] == 1]  # shared parameters stay
            chosen = {names[id(parameter)]: parameter for parameter in _parameters_to_stream(unshared)}
            if chosen:
                yield number, StreamedBlock.from_parameters(chosen)


def _parameters_to_stream(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Which parameters of a streamed block are streamed: the frozen ones; also the trained ones if they are larger.

    An adapter beside frozen weights is small, and each window updates it: it stays on the device.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    stored = sum(leaf.get().nbytes for parameter in frozen for leaf in stored_tensors(parameter))
    return list(parameters) if trained > stored else frozen


def _split_into_pieces(expert_state: ExpertState, modules: Sequence[nn.Module]) -> list[list[str]]:
    """Names of trained parameters, block by block, those outside of blocks first.

    A large block is split, so that an update needs no more device memory than plans account for.
    """
    block_of = {id(parameter): number for number, module in enumerate(modules, 1) for parameter in module.parameters()}
    blocks: list[list[str]] = [[] for _ in range(len(modules) + 1)]
    for name, parameter in expert_state.parameters.items():
        blocks[block_of.get(id(parameter), 0)].append(name)
    pieces: list[list[str]] = []
    for names in blocks:
        room_bytes = 0
        for name in names:
            nbytes = expert_state.parameters[name].nbytes
            if nbytes > room_bytes or not pieces:
                pieces.append([])
                room_bytes = UPDATE_PIECE_BYTES
            pieces[-1].append(name)
            room_bytes -= nbytes
    return pieces


def _disable_gradient_checkpointing(module: nn.Module) -> None:
    switch = getattr(module, "disable_gradient_checkpointing", None)
    if switch is not None and getattr(module, "is_gradient_checkpointing", False):
        switch()
