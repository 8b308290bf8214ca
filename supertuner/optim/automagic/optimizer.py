"""Automagic: every weight has its own learning rate, which rises while its updates keep their sign and falls otherwise.

With g the gradient of a tensor as a matrix (a vector has one row; a kernel has a row per output channel):

    r ← β₂ r + (1 - β₂) (mean over columns of g² + ε)      c ← β₂ c + (1 - β₂) (mean over rows of g² + ε)
    u = g / √(r c / mean r)                                 the factored second moment of Adafactor (arXiv:1804.04235)
    u ← u / max(1, rms(u) / clip)                           its update clipping, here also in place of a warm-up
    η ← clamp(η ± bump, lowest, highest)                    + where u has the sign of the last update, - where the other
    w ← w - f η (u + decay · w)                             f: the schedule's factor, 1 without one

The first update of a weight has no predecessor, and an update of zero has no sign: neither moves η. There is no
momentum. η is stored in 10 bits and the last sign in one (packed_rates.py); bf16 weights are rounded stochastically
(stochastic_bits.py), so that small updates are not lost. Tensors of equal shape are updated together (see
parameter_batches.py), and the host never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from supertuner.optim.automagic import packed_rates, rate_grid
from supertuner.optim.automagic.native import NativeAutomagic, NativeStepConstants, find_native_library
from supertuner.optim.automagic.packed_rates import LearningRateSpread, PackedRates
from supertuner.optim.automagic.parameter_batches import ParameterBatch, build_batches, matrix_shape
from supertuner.optim.automagic.rate_grid import LearningRateLimits, RateGrid
from supertuner.optim.automagic.stochastic_bits import StochasticBits, stochastic_round_to_bf16
from supertuner.optim.automagic.workspace import DeviceWorkspace, ScratchViews, padded_count

BETA2, CLIP, EPSILON = 0.999, 1.0, 1e-30
MOVE_RATES, ROUND_WEIGHTS = 1, 2
"""The two purposes of random numbers in a step."""
GRID_ENTRIES = ("lowest", "highest", "unit", "offset", "split")
"""What says which rate a stored code stands for; a checkpoint has it as `grid_…`."""


class Automagic(torch.optim.Optimizer):
    """The optimizer of one expert. The group's `lr` divided by `limits.start` is the schedule's factor on all rates."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        limits: LearningRateLimits,
        *,
        weight_decay: float = 0.0,
        seed: int = 0,
        native: bool = True,
    ) -> None:
        assert all(p.dtype in (torch.float32, torch.bfloat16) for p in parameters.values()), "fp32 or bf16 weights"
        self._rates = PackedRates(limits)
        # Checkpoints save the group's entries that differ from the defaults: number of steps, and grid of the rates.
        # Version 0.1 saved `lowest` and `unit` of a grid without other entries.
        defaults = {"lr": limits.start, "weight_decay": weight_decay, "updates": 0, "lowest": 0.0, "unit": 0.0}
        super().__init__(list(parameters.values()), defaults | dict.fromkeys(map("grid_{}".format, GRID_ENTRIES)))
        self._mark_grid()
        self._parameters = dict(parameters)
        self._limits, self._seed = limits, seed
        library = find_native_library() if native else None
        self._native = None if library is None else NativeAutomagic(library)
        self.batch_elements: int | None = None
        """The largest number of elements in a batch; None: by the device of the weights. A trace on fake CPU tensors
        that stands for another device sets it."""
        self._workspaces: dict[torch.device, DeviceWorkspace] = {}
        self._batches: list[ParameterBatch] = []
        self._batched_ids: list[int] = []
        """The ids of the parameters in the batches."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed before the step; there is no closure"
        (group,) = self.param_groups
        step: int = group["updates"]
        random_bits = StochasticBits(self._seed, step)
        fresh = self._update_batches()
        factor, decay = group["lr"] / self._limits.start * self._rates.grid.unit, group["weight_decay"]
        for batch in self._step_native(factor, decay, fresh):
            scratch = batch.scratch()
            gradient = batch.gradient(scratch)
            updates = _scaled_updates(batch, gradient, scratch.updates, factor)
            moves = _rate_moves(batch, gradient, scratch, fresh)
            draw = partial(random_bits.draw, batch.keys, padded_count(batch.count))
            rates = self._rates.advance(batch.state, moves, step, partial(draw, MOVE_RATES), scratch)
            _apply_updates(batch, updates, rates, factor * decay, partial(draw, ROUND_WEIGHTS))
        group["updates"] = step + 1
        self._release_workspaces()

    @torch.no_grad()
    def learning_rate_spread(self) -> LearningRateSpread | None:
        """The distribution of the rates of all weights that have a state; None without any."""
        if not self.state:
            return None
        (group,) = self.param_groups
        self._convert_loaded_rates()
        device = next(iter(self.state)).device
        total = torch.zeros(rate_grid.MAX_CODE + 1, dtype=torch.float64, device=device)
        for state, count, scratch in self._state_rows():
            total += self._rates.histogram(state, count, scratch).to(device)
        self._release_workspaces()
        return self._rates.spread_of_histogram(total, group["lr"] / self._limits.start)

    @torch.no_grad()
    def create_state(self) -> None:
        """Create the state of all weights with a gradient, without a step."""
        self._update_batches()

    def states_replaced(self) -> None:
        """Call after states were moved to another memory: the next step rebuilds the batches that stack them."""
        self._batches, self._batched_ids = [], []

    def _state_rows(self) -> Iterator[tuple[Mapping[str, torch.Tensor], int, ScratchViews]]:
        """All state as (rows, elements per row, scratch): the batches, then each parameter outside of them."""
        yield from ((batch.state, batch.count, batch.scratch()) for batch in self._batches)
        inside = {id(view) for batch in self._batches for view in batch.views}
        for p, state in self.state.items():
            if id(state) not in inside:
                yield {key: entry.unsqueeze(0) for key, entry in state.items()}, p.numel(), self.scratch_for(p)

    def _step_native(self, factor: float, decay: float, fresh: set[int]) -> list[ParameterBatch]:
        """Update the batches that the C library supports, and return the others."""
        native, grid = self._native, self._rates.grid
        if native is None or grid.move_probability < 1.0:
            return self._batches
        constants = NativeStepConstants(
            share=1 - BETA2,
            epsilon=EPSILON,
            clip=CLIP,
            factor=factor,
            decay=factor * decay,
            lowest=grid.lowest / grid.unit,
            highest=grid.highest / grid.unit,
            offset=grid.offset,
            top=self._rates.max_code,
            split=grid.split,
            bump=grid.step,
        )
        native.step([batch for batch in self._batches if native.supports(batch)], constants, fresh)
        return [batch for batch in self._batches if not native.supports(batch)]

    def _update_batches(self) -> set[int]:
        """Batch the parameters that have a gradient; return the ids of those that never had one before.

        The batches are rebuilt only if other parameters have gradients than in the last step, or states were loaded.
        """
        self._convert_loaded_rates()
        with_gradient = {name: p for name, p in self._parameters.items() if p.grad is not None}
        batched = (pair for batch in self._batches for pair in zip(batch.parameters, batch.views, strict=True))
        states_current = all(self.state.get(p) is view for p, view in batched)
        if states_current and self._batched_ids == list(map(id, with_gradient.values())):
            return set()
        fresh = {id(p) for p in with_gradient.values() if p not in self.state}
        self._batches = build_batches(with_gradient, self.state, self._rates, self._workspace, self.batch_elements)
        self._batched_ids = list(map(id, with_gradient.values()))
        for batch in self._batches:
            self.state.update(zip(batch.parameters, batch.views, strict=True))
        return fresh

    def _convert_loaded_rates(self) -> None:
        """Convert loaded rates whose grid differs, because limits or bump have changed since they were saved."""
        (group,) = self.param_groups
        saved = RateGrid(*(group[f"grid_{name}"] for name in GRID_ENTRIES))
        if group["unit"]:  # loaded from a checkpoint of version 0.1
            saved = RateGrid(group["lowest"], math.inf, group["unit"])
        if any(getattr(saved, name) != getattr(self._rates.grid, name) for name in GRID_ENTRIES):
            for p, state in self.state.items():
                rows = {key: entry.unsqueeze(0) for key, entry in state.items()}
                self._rates.convert(rows, self.scratch_for(p), saved)
        self._mark_grid()

    def _mark_grid(self) -> None:
        """Note the grid of the stored rates in the group, for checkpoints."""
        grid = {f"grid_{name}": getattr(self._rates.grid, name) for name in GRID_ENTRIES}
        self.param_groups[0].update(grid, lowest=0.0, unit=0.0)

    def scratch_for(self, p: torch.Tensor) -> ScratchViews:
        """Scratch on the device of a parameter's state, which under a plan may differ from the parameter's device."""
        device = next((entry.device for entry in self.state.get(p, {}).values()), p.device)
        return self._workspace(device).scratch(1, *matrix_shape(p.shape))

    def _release_workspaces(self) -> None:
        for workspace in self._workspaces.values():
            workspace.clear()

    def _workspace(self, device: torch.device) -> DeviceWorkspace:
        if device not in self._workspaces:
            self._workspaces[device] = DeviceWorkspace(device)
        return self._workspaces[device]


def _scaled_updates(batch: ParameterBatch, gradient: torch.Tensor, work: torch.Tensor, factor: float) -> torch.Tensor:
    """The clipped updates u times `factor`, one matrix per tensor, in `work`."""
    row, column = batch.state["row"], batch.state["column"]
    torch.mul(gradient, gradient, out=work)
    row.lerp_(work.mean(-1).add_(EPSILON), 1 - BETA2)
    column.lerp_(work.mean(-2).add_(EPSILON), 1 - BETA2)
    torch.mul(gradient, (row / row.mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1), out=work)
    work.mul_(column.rsqrt().unsqueeze(-2))
    rms = torch.linalg.vector_norm(work, dim=(-2, -1), keepdim=True).div_(CLIP * batch.count**0.5)
    return work.mul_(rms.clamp_(min=1.0).reciprocal_().mul_(factor))


def _rate_moves(batch: ParameterBatch, gradient: torch.Tensor, scratch: ScratchViews, fresh: set[int]) -> torch.Tensor:
    """By how many bumps each rate moves: 1, 0 or -1. An update has the sign of its gradient."""
    scratch.signs_in.copy_(torch.sign(gradient, out=scratch.exact_signs))
    if scratch.padding.numel():
        scratch.padding.zero_()
    moves = packed_rates.sign_agreement(batch.state["signs"], scratch)
    for row, p in enumerate(batch.parameters if fresh else ()):
        if id(p) in fresh:
            moves[row].zero_()
    return moves


def _apply_updates(
    batch: ParameterBatch, updates: torch.Tensor, rates: torch.Tensor, decay: float, noise: packed_rates.NoiseSource
) -> None:
    """w ← w - rates · (updates + decay · w). Rates are in units; `updates` and `decay` contain the unit as a factor."""
    parameters: list[torch.Tensor] = list(batch.parameters)
    if parameters[0].dtype == torch.float32:
        parts = batch.split(updates)
        if decay:
            torch._foreach_add_(parts, parameters, alpha=decay)
        torch._foreach_addcmul_(parameters, parts, batch.split(rates), value=-1.0)
        return
    weights = torch.empty_like(updates)
    torch._foreach_copy_(batch.split(weights), parameters)
    if decay:
        updates.add_(weights, alpha=decay)
    flat = weights.view(len(weights), -1)
    flat.addcmul_(updates.view_as(flat), rates[:, : batch.count], value=-1.0)
    torch._foreach_copy_(parameters, batch.split(stochastic_round_to_bf16(flat, noise()[:, : batch.count])))
