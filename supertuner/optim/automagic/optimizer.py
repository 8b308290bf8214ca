"""Automagic: every weight has a learning rate of its own, which goes up while its updates agree in sign and else down.

With g the gradient of a tensor as a matrix (a vector has one row; a kernel has a row per output channel):

    r ← β₂ r + (1 - β₂) (mean over columns of g² + ε)      c ← β₂ c + (1 - β₂) (mean over rows of g² + ε)
    u = g / √(r c / mean r)                                 the factored second moment of Adafactor (arXiv:1804.04235)
    u ← u / max(1, rms(u) / clip)                           its update clipping, here also in place of a warm-up
    η ← clamp(η ± bump, lowest, highest)                    + where u has the sign of the last update, - where the other
    w ← w - f η (u + decay · w)                             f: the schedule's factor, 1 without one

A first update has nothing to agree with, and an update of zero has no sign: neither moves η. There is no momentum. η is
kept in 10 bits and the last sign in one (`rates.py`); bf16 weights are rounded by chance (`chance.py`), so that small
updates are not lost. Tensors of equal shape are worked on together, and the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal

import torch
from torch import nn

from supertuner.optim.automagic.batched import Batch, batches, matrix_shape
from supertuner.optim.automagic.native import Native, Numbers, built
from supertuner.optim.automagic.packed_rates import (
    MOST,
    Limits,
    Move,
    Noise,
    PackedRates,
    PlainRates,
    Spread,
    directions,
)
from supertuner.optim.automagic.workspace import Bench, Tools, padded
from supertuner.optim.stochastic_bits import Chance, rounded_to_bf16

EPSILON = 1e-30
MOVE_RATES, ROUND_WEIGHTS = 1, 2
"""Purposes of random numbers."""


class Automagic(torch.optim.Optimizer):
    """One expert's weights. `lr` over the limits' start is the factor that a schedule applies to all rates."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        limits: Limits,
        *,
        weight_decay: float = 0.0,
        seed: int = 0,
        beta2: float = 0.999,
        clip: float = 1.0,
        mask: Literal["packed", "fp32"] = "packed",
        native: bool = True,
    ) -> None:
        assert all(p.dtype in (torch.float32, torch.bfloat16) for p in parameters.values()), "fp32 or bf16 weights"
        self._rates = PackedRates(limits) if mask == "packed" else PlainRates(limits)
        # What differs in a group from its defaults is saved: steps made, and in which units rates are kept.
        defaults = {"lr": limits.start, "weight_decay": weight_decay, "updates": 0, "lowest": 0.0, "unit": 0.0}
        super().__init__(list(parameters.values()), defaults)
        self.param_groups[0].update(lowest=self._rates.lowest, unit=self._rates.unit)
        self._parameters = dict(parameters)
        self._limits, self._seed, self._beta2, self._clip = limits, seed, beta2, clip
        library = built() if native else None
        self._native = None if library is None else Native(library)
        self._benches: dict[torch.device, Bench] = {}
        self._batches: list[Batch] = []
        self._live: list[int] = []
        """Which parameters the batches are of."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "a window computes its gradients once"
        (group,) = self.param_groups
        step: int = group["updates"]
        chance = Chance(self._seed, step)
        fresh = self._arrange()
        factor, decay = group["lr"] / self._limits.start * self._rates.unit, group["weight_decay"]
        for batch in self._by_c(factor, decay, fresh):
            tools = batch.tools()
            gradient = batch.gradient(tools)
            updates = self._updates(batch, gradient, tools, factor)
            moves = _moves(batch, gradient, tools, fresh)
            draw = partial(chance.draw, batch.keys, padded(batch.count))
            rates = self._rates.advance(batch.state, moves, Move(step, partial(draw, MOVE_RATES), tools))
            _apply(batch, updates, rates, factor * decay, partial(draw, ROUND_WEIGHTS))
        group["updates"] = step + 1
        self._clear()

    @torch.no_grad()
    def spread(self) -> Spread | None:
        """How the rates of all weights that were ever trained are spread now; None if there are none."""
        if not isinstance(self._rates, PackedRates) or not self.state:
            return None
        (group,) = self.param_groups
        self._keep_units()
        home = next(iter(self.state)).device
        total = torch.zeros(MOST + 1, dtype=torch.float64, device=home)
        for state, count, tools in self._rows():
            total += self._rates.counts(state, count, tools).to(home)
        self._clear()
        return self._rates.spread(total, group["lr"] / self._limits.start)

    def states_replaced(self) -> None:
        """States were moved to another memory: batches, which hold them together, are made anew when needed."""
        self._batches, self._live = [], []

    def _rows(self) -> Iterator[tuple[Mapping[str, torch.Tensor], int, Tools]]:
        """Everything remembered: batches as they are, and what is of parameters outside of them."""
        yield from ((batch.state, batch.count, batch.tools()) for batch in self._batches)
        inside = {id(view) for batch in self._batches for view in batch.views}
        for p, state in self.state.items():
            if id(state) not in inside:
                yield {key: kept.unsqueeze(0) for key, kept in state.items()}, p.numel(), self.tools(p)

    def _by_c(self, factor: float, decay: float, fresh: set[int]) -> list[Batch]:
        """Make the step of all batches that the library takes; the others."""
        native, rates = self._native, self._rates
        if native is None or not isinstance(rates, PackedRates) or rates.chance < 1.0:
            return self._batches
        lowest = rates.lowest / rates.unit
        numbers = Numbers(1 - self._beta2, EPSILON, self._clip, factor, factor * decay, lowest, rates.top)
        native.step([batch for batch in self._batches if native.takes(batch)], numbers, fresh)
        return [batch for batch in self._batches if not native.takes(batch)]

    def _arrange(self) -> set[int]:
        """Put the parameters that have a gradient into batches, unless they are; those that never had one before.

        Batches are made anew where other parameters have gradients than in the step before, or states were loaded.
        """
        self._keep_units()
        live = {name: p for name, p in self._parameters.items() if p.grad is not None}
        own = all(
            self.state.get(p) is view for b in self._batches for p, view in zip(b.parameters, b.views, strict=True)
        )
        if own and self._live == list(map(id, live.values())):
            return set()
        fresh = {id(p) for p in live.values() if p not in self.state}
        self._batches = batches(live, self.state, self._rates, self._bench)
        self._live = list(map(id, live.values()))
        for batch in self._batches:
            self.state.update(zip(batch.parameters, batch.views, strict=True))
        return fresh

    def _keep_units(self) -> None:
        """Rates that were loaded in other units, since limits or bump were others then, are put into ours."""
        (group,) = self.param_groups
        lowest, unit = group["lowest"], group["unit"]
        if isinstance(self._rates, PackedRates) and (lowest, unit) != (self._rates.lowest, self._rates.unit):
            for p, state in self.state.items():
                rows = {key: kept.unsqueeze(0) for key, kept in state.items()}
                self._rates.convert(rows, self.tools(p), lowest, unit)
        group.update(lowest=self._rates.lowest, unit=self._rates.unit)

    def tools(self, p: torch.Tensor) -> Tools:
        """What the state of one parameter is read with: where the state is, which may be at home while `p` is not."""
        home = next((kept.device for kept in self.state.get(p, {}).values()), p.device)
        return self._bench(home).tools(1, *matrix_shape(p.shape))

    def _clear(self) -> None:
        for bench in self._benches.values():
            bench.clear()

    def _bench(self, device: torch.device) -> Bench:
        if device not in self._benches:
            self._benches[device] = Bench(device)
        return self._benches[device]

    def _updates(self, batch: Batch, gradient: torch.Tensor, tools: Tools, factor: float) -> torch.Tensor:
        """u, clipped, times `factor`: one matrix per tensor."""
        row, column, work = batch.state["row"], batch.state["column"], tools.updates
        torch.mul(gradient, gradient, out=work)
        row.lerp_(work.mean(-1).add_(EPSILON), 1 - self._beta2)
        column.lerp_(work.mean(-2).add_(EPSILON), 1 - self._beta2)
        torch.mul(gradient, (row / row.mean(-1, keepdim=True)).rsqrt_().unsqueeze(-1), out=work)
        work.mul_(column.rsqrt().unsqueeze(-2))
        rms = torch.linalg.vector_norm(work, dim=(-2, -1), keepdim=True).div_(self._clip * batch.count**0.5)
        return work.mul_(rms.clamp_(min=1.0).reciprocal_().mul_(factor))


def _moves(batch: Batch, gradient: torch.Tensor, tools: Tools, fresh: set[int]) -> torch.Tensor:
    """By how many bumps each rate moves: 1, 0 or -1. An update has the sign of its gradient."""
    tools.signs_in.copy_(torch.sign(gradient, out=tools.exact_signs))
    if tools.beyond.numel():
        tools.beyond.zero_()
    moves = directions(batch.state["signs"], tools)
    for row, p in enumerate(batch.parameters if fresh else ()):
        if id(p) in fresh:
            moves[row].zero_()
    return moves


def _apply(batch: Batch, updates: torch.Tensor, rates: torch.Tensor, decay: float, noise: Noise) -> None:
    """w ← w - rates · (updates + decay · w), both in the same units."""
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
    torch._foreach_copy_(parameters, batch.split(rounded_to_bf16(flat, noise()[:, : batch.count])))
