"""A plan put to work on an expert in training, and taken off again; what of it cannot be followed is said, not hidden.

A plan that does nothing installs nothing: module, optimizer and window are then what they are without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from supertuner.core.errors import TrainError
from supertuner.plan.placement.memory_needs import UPDATE_PIECE_BYTES
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.step.window import ExpertState
from supertuner.train.offload.activations import ActivationOffloader
from supertuner.train.offload.host_buffers import HostBuffers
from supertuner.train.offload.host_memory import HostMemoryPool
from supertuner.train.offload.offloaded_blocks import OffloadedBlocks
from supertuner.step.parameter_state import HOST, ParameterState
from supertuner.train.offload.optimizer_step import PlannedOptimizerOffload
from supertuner.train.offload.param_storage import stored_tensors
from supertuner.train.offload.transfer import DeviceTransfer
from supertuner.train.offload.weight_ring import StreamedBlock, WeightRing

MIN_OFFLOAD_BYTES = 1 << 20
"""Smaller tensors stay: to begin a copy of them takes longer than the copy."""


@dataclass(frozen=True, eq=False, slots=True)
class OffloadedExpert:
    """One expert under its plan."""

    expert_state: ExpertState
    plan: MemoryPlan
    transfer: DeviceTransfer
    host_buffers: HostBuffers
    """Of weights and state: they last. Activations have memory of their own."""
    parameter_state: ParameterState
    ring: WeightRing
    activation_offloader: ActivationOffloader
    blocks: OffloadedBlocks | None
    optimizer_offload: PlannedOptimizerOffload | None
    unfollowed: tuple[str, ...]
    """What of the plan is not followed, and why. Results are the same."""

    @property
    def offloads_activations(self) -> bool:
        """Whether activations of any block go to host memory."""
        return any(row.activations is ActivationPolicy.SEND for row in self.plan.blocks)

    def resident_parameters(self) -> list[nn.Parameter]:
        """Parameters that the plan has on the device."""
        streamed_ids = {
            id(parameter) for block in self.ring.streamed.values() for parameter in block.parameters.values()
        }
        return [parameter for parameter in self.expert_state.module.parameters() if id(parameter) not in streamed_ids]

    def set_prefetch_depth(self, blocks: int) -> None:
        """Fetch so many blocks ahead from now on. Only between two windows."""
        self.ring.release_slots()
        self.ring.prefetch_depth = blocks
        self.activation_offloader.max_blocks_in_flight = max(1, blocks)
        if self.blocks is not None:
            self.blocks.prefetch_depth = blocks

    def detach(self) -> None:
        """Follow the plan no more; everything stays where it is. Only between two windows."""
        if self.blocks is not None:
            self.blocks.remove()
        if self.optimizer_offload is not None:
            self.optimizer_offload.remove()
        self.expert_state.optimizer_offload = None

    def restore_to_device(self) -> None:
        """Everything is on the device again, as without a plan. Only between two windows."""
        self.detach()
        move_to_device(self.expert_state.module.parameters(), self.transfer.device)
        self.parameter_state.move_to(self.transfer.device)


def apply_plan(
    expert_state: ExpertState,
    plan: MemoryPlan,
    transfer: DeviceTransfer,
    *,
    on_device: bool = True,
    host_buffers: HostBuffers | None = None,
    min_offload_bytes: int = MIN_OFFLOAD_BYTES,
) -> OffloadedExpert:
    """Put the plan to work. The module may be on the device or on the host; afterwards each part is where it is to be.

    Whether activations are recomputed is the plan's business from now on, block by block. An expert that is not
    `here` yet stays where it is until it is brought. `homes` are those of a plan that was taken off, and stay in use.
    """
    module = expert_state.module
    rows, unfollowed = _match_blocks(module, plan)
    _disable_gradient_checkpointing(module)
    host_buffers = host_buffers or HostBuffers(transfer, HostMemoryPool(transfer.device))
    parameter_state = ParameterState(expert_state.optimizer, expert_state.ema)
    modules = [module.get_submodule(row.name) for row in rows]
    ring = WeightRing(dict(_build_streamed_blocks(module, modules, rows)), len(rows), plan.ahead, transfer)
    activation_offloader = ActivationOffloader(
        transfer, HostMemoryPool(transfer.device), min_bytes=min_offload_bytes, max_blocks_in_flight=max(1, plan.ahead)
    )
    blocks = None
    if ring.streamed or any(row.activations is not ActivationPolicy.KEEP for row in rows):
        blocks = OffloadedBlocks(modules, [row.activations for row in rows], ring, activation_offloader, plan.ahead)
        blocks.install()
    for block in ring.streamed.values():
        block.move_to_host(host_buffers)
    streamed_ids = {id(parameter) for block in ring.streamed.values() for parameter in block.parameters.values()}
    names = [name for name, parameter in expert_state.parameters.items() if id(parameter) in streamed_ids]
    optimizer_offload = None
    if names or plan.stepping is not OptimizerPlacement.GPU:
        pieces = _split_into_pieces(expert_state, modules)
        optimizer_offload = PlannedOptimizerOffload(
            expert_state.parameters, expert_state.optimizer, parameter_state, plan.stepping, pieces, names, transfer, host_buffers, ring.invalidate,
            blocks.return_weights if blocks is not None else _do_nothing,
        )  # fmt: skip
        optimizer_offload.install()
    expert_state.optimizer_offload = optimizer_offload
    offloaded = OffloadedExpert(
        expert_state,
        plan,
        transfer,
        host_buffers,
        parameter_state,
        ring,
        activation_offloader,
        blocks,
        optimizer_offload,
        unfollowed,
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
    """The plan's rows that are blocks of the module; and what is asked of others, which cannot be done."""
    modules_by_name = dict(module.named_modules())
    rows = [row for row in plan.blocks if row.name in modules_by_name and row.name]
    unknown_blocks = [
        row.name for row in plan.blocks if row.name not in modules_by_name and not row.name.startswith("(")
    ]
    if unknown_blocks:
        raise TrainError(
            f"the plan is of another model: {type(module).__name__} has no block {unknown_blocks[0]} "
            f"({len(unknown_blocks)} such); make it anew for this configuration"
        )
    if len({id(modules_by_name[row.name]) for row in rows}) < len(rows):
        raise TrainError(f"the plan names a block of {type(module).__name__} twice; make it anew")
    unfollowed = [
        f"{row.name}: {what} is for blocks; what stands around them stays, and its activations are kept"
        for row in plan.blocks
        if row.name not in modules_by_name
        for what, asked in (
            (row.weights, row.weights is not WeightPlacement.GPU),
            (row.activations, row.activations is not ActivationPolicy.KEEP),
        )
        if asked
    ]
    return rows, tuple(unfollowed)


def _build_streamed_blocks(
    root: nn.Module, modules: Sequence[nn.Module], rows: Sequence[BlockPlan]
) -> Iterator[tuple[int, StreamedBlock]]:
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    holders = Counter(id(parameter) for module in modules for parameter in module.parameters())
    for number, (module, row) in enumerate(zip(modules, rows, strict=True)):
        if row.weights is WeightPlacement.STREAMED:
            unshared = [p for p in module.parameters() if holders[id(p)] == 1]  # what two blocks share stays
            chosen = {names[id(parameter)]: parameter for parameter in _parameters_to_stream(unshared)}
            if chosen:
                yield number, StreamedBlock.from_parameters(chosen)


def _parameters_to_stream(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Which of a streamed block's parameters are streamed: the frozen ones, and what is trained of it if that is more.

    An adapter beside frozen weights is small and is stepped in every window: it stays.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    stored = sum(leaf.get().nbytes for parameter in frozen for leaf in stored_tensors(parameter))
    return list(parameters) if trained > stored else frozen


def _split_into_pieces(expert_state: ExpertState, modules: Sequence[nn.Module]) -> list[list[str]]:
    """Names of trained parameters, block by block; those of no block come first. A large block is several pieces, so
    that an update takes no more room than plans count for it."""
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


def _do_nothing() -> None: ...


def _disable_gradient_checkpointing(module: nn.Module) -> None:
    switch = getattr(module, "disable_gradient_checkpointing", None)
    if switch is not None and getattr(module, "is_gradient_checkpointing", False):
        switch()
