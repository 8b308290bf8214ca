"""The least time in which a machine can do a step, whatever the plan: a proven lower bound. Pure.

Counted for every way to run the step: the blocks' own work one after another; work done again where activations neither
stay nor are sent; bytes over the link; the update after the last gradient, with the state that had no room until then;
or a step on the host. Which of these a plan chooses is left open, even in parts of blocks: at the moment of one block's
backward pass, activations of earlier blocks, weights, state and idle experts each are on the GPU, at home, or to be
made again, and both memories hold what they can. The best mixture is a linear program; any prices for memory and link
give a lower bound on it (weak duality), so a search for good prices can be careless and the bound still holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from supertuner.plan.choice import Step
from supertuner.plan.decision import Stepping
from supertuner.plan.rates import Limits, Rates
from supertuner.plan.table import StepTable

MOMENTS: Final = 3
"""Of so many last blocks the backward pass is looked at: there most is held. Each gives a bound; the best counts."""
POINTS, ZOOMS, NARROWER = 7, 22, 0.6
"""The search for prices: points of a grid in each direction, how often it is drawn anew, and how much closer."""

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """Modelled seconds that no plan goes below; infinite if no plan fits."""

    seconds: float
    by: str
    """`compute`, `gpu memory`, `link to gpu`, `link to host`, `host memory`; `no room` if no plan fits."""
    compute_s: float
    """The step's own work, nothing done twice, with the optimizer's on the GPU."""
    stepping: Stepping | None
    """Where the optimizer steps in the best case."""


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to treat one thing at the moment that is looked at: its price in time and place."""

    chain_s: float = 0.0
    up_s: float = 0.0
    down_s: float = 0.0
    gpu: float = 0.0
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class _Program:
    """What any schedule does, and what it may choose."""

    chain_s: float
    up_s: float
    down_s: float
    gpu_room: float
    host_room: float
    items: tuple[tuple[_Option, ...], ...]


def bound(table: StepTable, rates: Rates, limits: Limits) -> Bound:
    """The least modelled time of one window. Rates that are needed must be known (`Rates.unknown`)."""
    step = Step.of(table, rates)
    compute_s = table.micro_batches * step.micro_s + step.update_s
    best = Bound(math.inf, "no room", compute_s, None)
    for stepping in (Stepping.STREAMED, Stepping.HOST):
        if stepping is Stepping.HOST and (rates.one_pool or not rates.has_link or rates.host_bytes_s is None):
            continue
        found = _bound(step, limits, stepping, compute_s)
        if found.seconds < best.seconds:
            best = found
    return best


def _bound(step: Step, limits: Limits, stepping: Stepping, compute_s: float) -> Bound:
    """With the optimizer on the GPU, its state wherever it likes to be between updates; or with it on the host."""
    count = len(step.weights)
    programs = [_program(step, limits, stepping, at) for at in range(max(0, count - MOMENTS), count)]
    if any(not _has_room(program) for program in programs):
        return Bound(math.inf, "no room", compute_s, None)
    seconds, prices, program = max(((*_priced(p, step.rates.duplex), p) for p in programs), key=lambda found: found[0])
    where = stepping
    if stepping is Stepping.STREAMED and _all_state_fits(step, limits):
        where = Stepping.GPU
    return Bound(seconds, _named(step, stepping, prices, program), compute_s, where)


def _program(step: Step, limits: Limits, stepping: Stepping, at: int) -> _Program:
    """The choices while block `at` is in its backward pass."""
    table, rates, micro = step.table, step.rates, step.table.micro_batches
    up, down = _cost(rates.to_device_bytes_s), _cost(rates.to_host_bytes_s)
    on_host = stepping is Stepping.HOST
    block = table.blocks[at]
    gpu = float(table.batch_bytes + step.saved[at] + block.backward_peak_bytes + step.weights[at])
    if on_host:
        gpu += step.gradients[at]
    else:
        gpu += sum(step.gradients if micro > 1 else step.gradients[at:])
    chain_s, up_s, down_s = _fixed(step, limits, on_host)
    items = [_activations(step, b, up, down, micro, step.rates.has_link) for b in range(at)]
    # Weights of later blocks were used in this pass already; whether they come again is the forward pass's account.
    items += [_stay_or_go(w, micro * w * up if b < at else 0.0, 0.0, rates) for b, w in _others(step.weights, at)]
    state = float(sum(step.state))
    if state and not on_host:
        items.append(_stay_or_go(state, state * up, state * down, rates))
    if table.idle_bytes:
        items.append(_stay_or_go(float(table.idle_bytes), 0.0, 0.0, rates))
    host = 0.0 if limits.host_bytes is None or rates.one_pool else float(limits.host_bytes)
    host -= sum(step.state) if on_host else 0
    return _Program(chain_s, up_s, down_s, limits.gpu_bytes - gpu, host, tuple(items))


def _fixed(step: Step, limits: Limits, on_host: bool) -> tuple[float, float, float]:
    """Seconds on the chain, and of each direction of the link, that no choice avoids."""
    rates, micro = step.rates, step.table.micro_batches
    up, down = _cost(rates.to_device_bytes_s), _cost(rates.to_host_bytes_s)
    trained, gradients, state = sum(step.trained), sum(step.gradients), sum(step.state)
    chain_s, weights = micro * step.micro_s, sum(step.weights)
    # At the start of a forward pass no activation is there; weights that find no room even then come during it.
    missing = max(0, weights + (gradients if micro > 1 and not on_host else 0) - limits.gpu_bytes) * micro
    if on_host:
        assert rates.host_bytes_s is not None
        touched = sum(step.host_step_bytes(b) for b in range(len(step.weights)))
        return chain_s + touched / rates.host_bytes_s, max(missing, trained) * up, gradients * down
    # After the last gradient, what has no room must come; before the next forward pass, what has none must go.
    arrive = max(0, trained + gradients + state - limits.gpu_bytes) * up
    depart = max(0, trained + state - limits.gpu_bytes) * down
    crossing = max(arrive, depart) if rates.duplex else arrive + depart
    return chain_s + max(step.update_s, crossing if rates.has_link else 0.0), missing * up, 0.0


def _activations(step: Step, block: int, up: float, down: float, micro: int, link: bool) -> tuple[_Option, ...]:
    saved, kept, again = step.saved[block], step.inputs[block], micro * step.forward_s[block]
    options = [_Option(gpu=saved)]
    recomputable = step.table.blocks[block].recomputable
    if recomputable:
        options.append(_Option(chain_s=again, gpu=kept))
    if link:
        options.append(_Option(up_s=micro * saved * up, down_s=micro * saved * down, host=saved))
        if recomputable:
            options.append(_Option(again, micro * kept * up, micro * kept * down, host=kept))
    return tuple(options)


def _stay_or_go(nbytes: float, up_s: float, down_s: float, rates: Rates) -> tuple[_Option, ...]:
    stay = _Option(gpu=nbytes)
    return (stay, _Option(up_s=up_s, down_s=down_s, host=nbytes)) if rates.has_link else (stay,)


def _has_room(program: _Program) -> bool:
    """Whether both memories together hold the least that there is; what only the GPU can hold, it must."""
    least = sum(min(option.gpu + option.host for option in options) for options in program.items)
    only_gpu = sum(min(option.gpu for option in options) for options in program.items)
    room = program.gpu_room + max(0.0, program.host_room)
    return program.host_room >= 0 and only_gpu <= program.gpu_room and least <= room


def _all_state_fits(step: Step, limits: Limits) -> bool:
    return sum(step.trained) + sum(step.gradients) + sum(step.state) <= limits.gpu_bytes


# ── prices ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _priced(program: _Program, duplex: bool) -> tuple[float, Array]:
    """The best bound that the search finds, and its prices: chain, up, down, GPU memory, host memory."""
    options = _by_item(program.items)
    scale = _scale(program)
    axes = 4 if duplex else 3
    centre, reach = np.full(axes, 0.5), 0.5
    best, prices = -math.inf, np.zeros(5)
    for _ in range(ZOOMS):
        points = POINTS if axes == 3 else POINTS - 2
        lines = [np.clip(np.linspace(c - reach, c + reach, points), 0.0, 1.0) for c in centre]
        grid = np.stack([axis.ravel() for axis in np.meshgrid(*lines, indexing="ij")])
        tried = _prices(grid, scale, duplex)
        values = _dual(program, options, tried)
        at = int(values.argmax())
        if values[at] > best:
            best, prices, centre = float(values[at]), tried[:, at], grid[:, at]
        reach *= NARROWER
    return best, prices


def _prices(grid: Array, scale: tuple[float, float], duplex: bool) -> Array:
    """Points of the unit cube as prices. Chain's and link's add up to one; memory's are cubed, to be fine near 0."""
    if duplex:
        link, share, gpu, host = grid
        up, down = link * share, link * (1 - share)
    else:
        link, gpu, host = grid
        up = down = link
    return np.stack([1 - link, up, down, gpu**3 * scale[0], host**3 * scale[1]])


def _scale(program: _Program) -> tuple[float, float]:
    """The dearest that a byte can be: what the costliest alternative for it costs."""
    dearest = 0.0
    for options in program.items:
        stay = max(option.gpu for option in options)
        for option in options:
            for freed in (stay - option.gpu, stay - option.host, stay - option.gpu - option.host):
                if freed > 0:
                    dearest = max(dearest, (option.chain_s + option.up_s + option.down_s) / freed)
    return dearest, dearest


def _by_item(items: Iterable[tuple[_Option, ...]]) -> list[tuple[int, Array]]:
    """Equal things are looked at once, with how often they occur."""
    counted: dict[tuple[_Option, ...], int] = {}
    for options in items:
        counted[options] = counted.get(options, 0) + 1
    rows = [
        (many, np.array([[o.chain_s, o.up_s, o.down_s, o.gpu, o.host] for o in options]))
        for options, many in counted.items()
    ]
    return rows


def _dual(program: _Program, items: list[tuple[int, Array]], prices: Array) -> Array:
    """For each column of prices: everything at its cheapest, less what the rooms are worth."""
    rooms = np.array([program.gpu_room, program.host_room])
    fixed = np.array([program.chain_s, program.up_s, program.down_s])
    total: Array = fixed @ prices[:3] - rooms @ prices[3:]
    for many, options in items:
        total = total + many * (options @ prices).min(axis=0)
    return total


def _named(step: Step, stepping: Stepping, prices: Array, program: _Program) -> str:
    """What the bound comes from."""
    chain, up, down = (float(price) for price in prices[:3])
    if max(up, down) > chain:
        chosen = [_cheapest(options, prices) for options in program.items]
        to_gpu = program.up_s + sum(option.up_s for option in chosen)
        return "link to gpu" if to_gpu >= program.down_s + sum(option.down_s for option in chosen) else "link to host"
    computed = step.table.micro_batches * step.micro_s
    update = program.chain_s - computed
    if update > computed and update > step.update_s:
        return "host memory" if stepping is Stepping.HOST else "link to gpu"
    blocks = step.table.blocks
    work = [block.forward for block in blocks] + [block.backward for block in blocks]
    in_memory = step.update_s
    in_memory += step.table.micro_batches * sum(step.rates.seconds(w) for w in work if step.rates.bound_by_memory(w))
    return "gpu memory" if 2 * in_memory > computed + step.update_s else "compute"


def _cheapest(options: tuple[_Option, ...], prices: Array) -> _Option:
    return min(options, key=lambda o: float(np.dot([o.chain_s, o.up_s, o.down_s, o.gpu, o.host], prices)))


def _others(figures: Sequence[int], at: int) -> list[tuple[int, float]]:
    """Those that are not zero, without that of block `at`."""
    return [(block, float(figure)) for block, figure in enumerate(figures) if block != at and figure]


def _cost(bytes_s: float | None) -> float:
    """Seconds for a byte."""
    return 0.0 if bytes_s is None else 1.0 / bytes_s
