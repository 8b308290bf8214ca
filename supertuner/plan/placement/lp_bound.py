"""The best mixture of ways to run a step as a linear program, bounded from below by prices. Pure.

A window has three phases, one after the other: from its forward passes to the moment that is looked at, from there to
the last gradient, and the update. In each, computing and copying go on side by side, so a phase takes at least as long
as either. Every thing (activations of a block, weights, state, …) is treated in one of several ways, or in shares of
them, and each way costs computing or copying in a phase and a place in one of two memories. Put a price on a second of
each and on a byte of each memory: everything at its cheapest, less what the memories are worth, is no more than what
the best mixture takes (weak duality). So any prices give a bound. The best prices are a linear program themselves;
what its solver says is only a guess of them, and the bound is worked out from the guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from supertuner.plan.placement.simplex import Array, most

GB: Final = 1e9
"""Bytes are counted in these, so that prices are neither huge nor tiny."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to treat one thing: seconds of a phase and bytes of a memory that it costs."""

    first_link_s: float = 0.0
    second_work_s: float = 0.0
    second_link_s: float = 0.0
    update_up_s: float = 0.0
    update_down_s: float = 0.0
    gpu: float = 0.0
    host: float = 0.0
    late: float = 0.0
    """Of the GPU's memory, in the update."""


Thing: TypeAlias = tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What no way avoids, the rooms, and the things."""

    first_work_s: float
    first_link_s: float
    second_work_s: float
    second_link_s: float
    update_s: float
    """The optimizer's work, on the GPU or on the host."""
    arrive_s: float
    """To the GPU in the update at least: what cannot have been there before it. At least that, or what ways bring."""
    depart_s: float
    """Home in the update at least: what cannot stay after it."""
    gpu_room: float
    host_room: float
    late_room: float
    """On the GPU in the update, for what stays there between windows."""
    things: tuple[Thing, ...]

    @property
    def feasible(self) -> bool:
        """Whether the memories hold the least that there is. True does not say that there is a plan."""
        least = sum(min(way.gpu + way.host for way in thing) for thing in self.things)
        on_gpu = sum(min(way.gpu for way in thing) for thing in self.things)
        late = sum(min(way.late for way in thing) for thing in self.things)
        both = self.gpu_room + self.host_room
        return self.host_room >= 0 and on_gpu <= self.gpu_room and least <= both and late <= self.late_room


@dataclass(frozen=True, slots=True)
class Priced:
    """The bound, and how long each phase of the best mixture takes."""

    seconds: float
    phases_s: tuple[float, ...]
    by_link: tuple[bool, ...]
    """Of each phase, whether copying is what it takes its time for."""


LIMITS: Final = ("first work", "first link", "second work", "second link", "update work",
                 "arrive and depart", "arrive and sent", "brought and depart", "brought and sent")  # fmt: skip
"""What each phase takes at least as long as: two of the first phase, two of the second, five of the update."""
ROOMS: Final = 3
PHASES: Final = (slice(0, 2), slice(2, 4), slice(4, 9))


def priced(program: Program) -> Priced:
    counted = _counted(program.things)
    prices, phases_s = _guess(program, counted)
    for phase in PHASES:  # a phase counts once, whatever the solver's last digits say
        prices[phase] /= max(1.0, float(prices[phase].sum()))
    total = float(_fixed(program) @ prices)
    costs = _matrix() @ prices
    for many, ways in counted:
        total += many * float((ways @ costs).min())
    by_link = tuple(bool(prices[phase][0] < 0.5) for phase in PHASES)
    return Priced(max(total, 0.0), tuple(float(one) for one in phases_s), by_link)


def _fixed(program: Program) -> Array:
    """By price: seconds that every schedule spends, and what the rooms are worth."""
    arrive, depart = program.arrive_s, program.depart_s
    update = [program.update_s, arrive + depart, arrive, depart, 0.0]
    phases = [program.first_work_s, program.first_link_s, program.second_work_s, program.second_link_s]
    rooms = [-program.gpu_room / GB, -program.host_room / GB, -program.late_room / GB]
    return np.array([*phases, *update, *rooms])


def _counted(things: tuple[Thing, ...]) -> list[tuple[int, Array]]:
    """Equal things once, with how often they occur; a row for each way."""
    found: dict[Thing, int] = {}
    for thing in things:
        found[thing] = found.get(thing, 0) + 1
    return [(many, np.array([_costs(way) for way in thing])) for thing, many in found.items()]


def _costs(way: Way) -> list[float]:
    seconds = [way.first_link_s, way.second_work_s, way.second_link_s, way.update_up_s, way.update_down_s]
    return [*seconds, way.gpu / GB, way.host / GB, way.late / GB]


def _matrix() -> Array:
    """From a way's costs to the prices that they are paid at."""
    found = np.zeros((8, len(LIMITS) + ROOMS))
    for cost, paid in enumerate(((1,), (2,), (3,), (7, 8), (6, 8), (9,), (10,), (11,))):
        found[cost, list(paid)] = 1.0
    return found


def _guess(program: Program, things: list[tuple[int, Array]]) -> tuple[Array, Array]:
    """The best prices: as large a sum as can be, no thing above the cheapest of its ways, each phase counted once. And
    what it is worth to count a phase: how long it takes."""
    prices, count = len(LIMITS) + ROOMS, len(things)
    gain = np.concatenate([_fixed(program), [float(many) for many, _ in things]])
    rows = np.zeros((len(PHASES) + sum(len(ways) for _, ways in things), prices + count))
    for number, phase in enumerate(PHASES):
        rows[number, phase] = 1.0
    at = len(PHASES)
    for number, (_, ways) in enumerate(things):
        rows[at : at + len(ways), :prices] = -ways @ _matrix()
        rows[at : at + len(ways), prices + number] = 1.0
        at += len(ways)
    limits = np.zeros(len(rows))
    limits[: len(PHASES)] = 1.0
    found, worth = most(gain, rows, limits)
    return found[:prices], worth[: len(PHASES)]
