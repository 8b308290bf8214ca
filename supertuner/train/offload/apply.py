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
from supertuner.plan.placement.memory_needs import PIECE_BYTES
from supertuner.plan.placement.plan import BlockPlan, Fate, Plan, Residence, Stepping
from supertuner.step.window import Trainee
from supertuner.train.offload.activations import Sender
from supertuner.train.offload.blocks import Blocks
from supertuner.train.offload.host_buffers import Homes
from supertuner.train.offload.host_memory import HostMemory
from supertuner.train.offload.optimizer_state import HOST, TrainedState
from supertuner.train.offload.optimizer_step import TrainedKeeper
from supertuner.train.offload.param_storage import leaves
from supertuner.train.offload.transfer import Carrier
from supertuner.train.offload.weight_ring import Ring, StreamedBlock

LEAST_SENT_BYTES = 1 << 20
"""Smaller tensors stay: to begin a copy of them takes longer than the copy."""


@dataclass(frozen=True, eq=False, slots=True)
class Acting:
    """One expert under its plan."""

    trainee: Trainee
    plan: Plan
    carrier: Carrier
    homes: Homes
    """Of weights and state: they last. Activations have memory of their own."""
    state: TrainedState
    ring: Ring
    sender: Sender
    blocks: Blocks | None
    keeper: TrainedKeeper | None
    refused: tuple[str, ...]
    """What of the plan is not followed, and why. Results are the same."""

    @property
    def sends(self) -> bool:
        """Whether activations of any block go to host memory."""
        return any(row.activations is Fate.SEND for row in self.plan.blocks)

    def staying(self) -> list[nn.Parameter]:
        """Parameters that the plan has on the device."""
        visitors = {id(parameter) for block in self.ring.streamed.values() for parameter in block.named.values()}
        return [parameter for parameter in self.trainee.module.parameters() if id(parameter) not in visitors]

    def fetch_ahead(self, blocks: int) -> None:
        """Fetch so many blocks ahead from now on. Only between two windows."""
        self.ring.release()
        self.ring.ahead = blocks
        self.sender.at_once = max(1, blocks)
        if self.blocks is not None:
            self.blocks.ahead = blocks

    def take_off(self) -> None:
        """Follow the plan no more; everything stays where it is. Only between two windows."""
        if self.blocks is not None:
            self.blocks.remove()
        if self.keeper is not None:
            self.keeper.remove()
        self.trainee.keeper = None

    def remove(self) -> None:
        """Everything is on the device again, as without a plan. Only between two windows."""
        self.take_off()
        to_device(self.trainee.module.parameters(), self.carrier.device)
        self.state.move(self.carrier.device)


def act(
    trainee: Trainee,
    plan: Plan,
    carrier: Carrier,
    *,
    here: bool = True,
    homes: Homes | None = None,
    least_sent_bytes: int = LEAST_SENT_BYTES,
) -> Acting:
    """Put the plan to work. The module may be on the device or on the host; afterwards each part is where it is to be.

    Whether activations are recomputed is the plan's business from now on, block by block. An expert that is not
    `here` yet stays where it is until it is brought. `homes` are those of a plan that was taken off, and stay in use.
    """
    module = trainee.module
    rows, refused = _rows(module, plan)
    _own_checkpointing_off(module)
    homes = homes or Homes(carrier, HostMemory(carrier.device))
    state = TrainedState(trainee.optimizer, trainee.ema)
    modules = [module.get_submodule(row.name) for row in rows]
    ring = Ring(dict(_streamed(module, modules, rows)), len(rows), plan.ahead, carrier)
    sender = Sender(carrier, HostMemory(carrier.device), least_bytes=least_sent_bytes, at_once=max(1, plan.ahead))
    blocks = None
    if ring.streamed or any(row.activations is not Fate.KEEP for row in rows):
        blocks = Blocks(modules, [row.activations for row in rows], ring, sender, plan.ahead)
        blocks.install()
    for block in ring.streamed.values():
        block.go_home(homes)
    away = {id(parameter) for block in ring.streamed.values() for parameter in block.named.values()}
    names = [name for name, parameter in trainee.parameters.items() if id(parameter) in away]
    keeper = None
    if names or plan.stepping is not Stepping.GPU:
        pieces = _pieces(trainee, modules)
        keeper = TrainedKeeper(
            trainee.parameters, trainee.optimizer, state, plan.stepping, pieces, names, carrier, homes, ring.forget,
            blocks.rest if blocks is not None else _nothing,
        )  # fmt: skip
        keeper.install()
    trainee.keeper = keeper
    acting = Acting(trainee, plan, carrier, homes, state, ring, sender, blocks, keeper, refused)
    to_device(module.buffers(), carrier.device)
    if here:
        to_device(acting.staying(), carrier.device)
    if plan.stepping is not Stepping.GPU:
        state.move(HOST)
    elif here:
        state.move(carrier.device)
    return acting


def to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        for leaf in leaves(tensor):
            leaf.put(leaf.get().to(device))


def _rows(module: nn.Module, plan: Plan) -> tuple[list[BlockPlan], tuple[str, ...]]:
    """The plan's rows that are blocks of the module; and what is asked of others, which cannot be done."""
    there = dict(module.named_modules())
    rows = [row for row in plan.blocks if row.name in there and row.name]
    strange = [row.name for row in plan.blocks if row.name not in there and not row.name.startswith("(")]
    if strange:
        raise TrainError(
            f"the plan is of another model: {type(module).__name__} has no block {strange[0]} "
            f"({len(strange)} such); make it anew for this configuration"
        )
    if len({id(there[row.name]) for row in rows}) < len(rows):
        raise TrainError(f"the plan names a block of {type(module).__name__} twice; make it anew")
    refused = [
        f"{row.name}: {what} is for blocks; what stands around them stays, and its activations are kept"
        for row in plan.blocks
        if row.name not in there
        for what, asked in (
            (row.weights, row.weights is not Residence.GPU),
            (row.activations, row.activations is not Fate.KEEP),
        )
        if asked
    ]
    return rows, tuple(refused)


def _streamed(
    whole: nn.Module, modules: Sequence[nn.Module], rows: Sequence[BlockPlan]
) -> Iterator[tuple[int, StreamedBlock]]:
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    holders = Counter(id(parameter) for module in modules for parameter in module.parameters())
    for number, (module, row) in enumerate(zip(modules, rows, strict=True)):
        if row.weights is Residence.STREAMED:
            own = [p for p in module.parameters() if holders[id(p)] == 1]  # what two blocks share stays
            chosen = {names[id(parameter)]: parameter for parameter in _along(own)}
            if chosen:
                yield number, StreamedBlock.of(chosen)


def _along(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Which of a streamed block's parameters are streamed: the frozen ones, and what is trained of it if that is more.

    An adapter beside frozen weights is small and is stepped in every window: it stays.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    stored = sum(leaf.get().nbytes for parameter in frozen for leaf in leaves(parameter))
    return list(parameters) if trained > stored else frozen


def _pieces(trainee: Trainee, modules: Sequence[nn.Module]) -> list[list[str]]:
    """Names of trained parameters, block by block; those of no block come first. A large block is several pieces, so
    that an update takes no more room than plans count for it."""
    block_of = {id(parameter): number for number, module in enumerate(modules, 1) for parameter in module.parameters()}
    blocks: list[list[str]] = [[] for _ in range(len(modules) + 1)]
    for name, parameter in trainee.parameters.items():
        blocks[block_of.get(id(parameter), 0)].append(name)
    pieces: list[list[str]] = []
    for names in blocks:
        room = 0
        for name in names:
            nbytes = trainee.parameters[name].nbytes
            if nbytes > room or not pieces:
                pieces.append([])
                room = PIECE_BYTES
            pieces[-1].append(name)
            room -= nbytes
    return pieces


def _nothing() -> None: ...


def _own_checkpointing_off(module: nn.Module) -> None:
    switch = getattr(module, "disable_gradient_checkpointing", None)
    if switch is not None and getattr(module, "is_gradient_checkpointing", False):
        switch()
