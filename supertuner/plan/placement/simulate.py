"""A step of a choice, use by use, on a clock: what is fetched, sent, waited for and computed, and when it is over.

The rules are one set for every choice, plans and baselines alike. At the start of a use, what it and the next `ahead`
uses need is asked for, unless it is there or on its way; the use waits for its own weights and activations. What a
block sends home leaves behind its forward pass, some blocks at once at most. Gradients on their way out still take
their place on the GPU: a use that finds no room waits for the oldest. Copies take the link in the order in which they
are asked for. The update begins when every gradient is there, and between two windows everything is at home, so that
whoever saves it finds it there. Given a clock of the software superchip or a quick one, the same code runs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.memory_needs import Needs
from supertuner.plan.placement.plan import Fate, Stepping

PLAYED: Final = 3
"""Micro-batches of a window that are played; further ones take as long as the last of these."""


class Chip(Protocol):
    """What a step asks of a machine."""

    @property
    def now(self) -> float: ...
    def compute(self, seconds: float) -> None: ...
    def stream(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float: ...
    def wait(self, until: float) -> None: ...
    def hold(self, nbytes: int) -> None:
        """So much of the GPU's memory is in use now."""


@dataclass(frozen=True, slots=True)
class Played:
    """One window."""

    seconds: float
    computing_s: float
    """Of these, the GPU computed."""
    update_s: float
    """Of these, from the last gradient on."""

    @property
    def waiting_s(self) -> float:
        return self.seconds - self.computing_s


def play(
    step: Step, choice: Choice, needs: Needs, gpu_bytes: int, chip: Chip, *, patience_s: float = math.inf
) -> Played | None:
    """One window. None: its passes waited for longer than `patience_s`, and nobody wants to know the rest."""
    return _Player(step, choice, needs, gpu_bytes, chip).window(patience_s)


class _Player:
    def __init__(self, step: Step, choice: Choice, needs: Needs, gpu_bytes: int, chip: Chip) -> None:
        self._step, self._choice, self._needs, self._gpu_bytes, self._chip = step, choice, needs, gpu_bytes, chip
        self._made = step.leaving_gradients(choice)
        self._leaving: deque[tuple[float, int]] = deque()
        """On their way home: when they will have left, and how many bytes."""
        self._slots: dict[int, float] = {}
        """Blocks whose weights are in a slot, or will be then."""
        self._flying: deque[tuple[int, float]] = deque()
        """Blocks whose activations are on their way home, and when they will have arrived."""
        self._gone: set[int] = set()
        """Blocks whose activations are with the host only."""
        self._back: dict[int, float] = {}
        self._home_s = 0.0
        """When the last gradient that leaves will have arrived."""
        self._computed = 0.0

    def window(self, patience_s: float = math.inf) -> Played | None:
        begin, before = self._chip.now, self._computed
        latest = begin - before + patience_s  # the clock, less what was computed
        table, count = self._step.table, len(self._step.weights)
        played = min(table.micro_batches, PLAYED)
        passes = [*((b, False) for b in range(count)), *((b, True) for b in reversed(range(count)))]
        uses, ends, last = passes * played, [begin], self._computed
        for number in range(len(uses)):
            if number and number % len(passes) == 0:
                ends.append(self._chip.now)
                last = self._computed
            self._use(uses, number, first=number < len(passes))
            if self._chip.now - self._computed > latest:
                return None
        ends.append(self._chip.now)
        rest = table.micro_batches - played
        extra, extra_computed = rest * (ends[-1] - ends[-2]), rest * (self._computed - last)
        self._slots.clear()
        begin_update = self._chip.now
        self._update()
        seconds = self._chip.now - begin + extra
        return Played(seconds, self._computed - before + extra_computed, self._chip.now - begin_update)

    # ── forward and backward ─────────────────────────────────────────────────────────────────────────────────────

    def _use(self, uses: list[tuple[int, bool]], number: int, first: bool) -> None:
        step, choice, chip = self._step, self._choice, self._chip
        block, backward = uses[number]
        if block == 0 and not backward:
            self._flying.clear()
            self._gone.clear()
        need = self._needs.backward[block] if backward else self._needs.forward[block]
        self._make_room(need)
        for other, back in uses[number : number + choice.ahead + 1]:
            if choice.streamed[other] and other not in self._slots:
                self._slots[other] = chip.stream(step.travels[other], True)
            if back and other in self._gone and other not in self._back:
                self._back[other] = chip.stream(step.saved[other], True)
        if choice.streamed[block]:
            chip.wait(self._slots[block])
        if backward:
            if block in self._gone:
                chip.wait(self._back.pop(block))
                self._gone.discard(block)
            again = step.forward_s[block] if choice.fates[block] is Fate.RECOMPUTE else 0.0
            self._compute(again + step.backward_s[block])
        else:
            self._compute(step.forward_s[block])
        if choice.streamed[block] and all(other != block for other, _ in uses[number + 1 : number + choice.ahead + 1]):
            del self._slots[block]
        self._send_home(block, backward, first)

    def _send_home(self, block: int, backward: bool, first: bool) -> None:
        step, choice = self._step, self._choice
        if not backward and choice.fates[block] is Fate.SEND:
            self._flying.append((block, self._chip.stream(step.saved[block], False)))
            while len(self._flying) > choice.at_once:
                gone, until = self._flying.popleft()
                self._chip.wait(until)
                self._gone.add(gone)
        if backward and self._made[block]:
            if not first:  # what is at home comes to be added to
                self._chip.wait(self._chip.stream(self._made[block], True))
            self._home_s = self._leave(self._made[block])

    def _leave(self, nbytes: int) -> float:
        gone = self._chip.stream(nbytes, False)
        self._leaving.append((gone, nbytes))
        return gone

    def _make_room(self, need: int) -> None:
        leaving, chip = self._leaving, self._chip
        flying = sum(nbytes for _, nbytes in leaving) if leaving else 0
        while leaving and (leaving[0][0] <= chip.now or need + flying > self._gpu_bytes):
            until, nbytes = leaving.popleft()
            chip.wait(until)
            flying -= nbytes
        chip.hold(need + flying)

    def _compute(self, seconds: float) -> None:
        self._computed += seconds
        self._chip.compute(seconds)

    # ── the update ───────────────────────────────────────────────────────────────────────────────────────────────

    def _update(self) -> None:
        if self._choice.stepping is Stepping.HOST:
            self._update_on_host()
            return
        self._make_room(self._needs.update)
        if any(self._needs.pieces):
            self._chip.wait(self._home_s)
            self._update_by_pieces()
        else:
            self._compute(self._step.update_s)

    def _update_on_host(self) -> None:
        """When the last gradient is there; weights that live on the GPU come there anew."""
        step, chip = self._step, self._chip
        resident = sum(step.trained) - sum(step.returning(self._choice))
        chip.wait(self._home_s)
        chip.wait(chip.now + step.host_step_s)
        chip.wait(chip.stream(resident, True))

    def _update_by_pieces(self) -> None:
        """Each piece comes while the one before is stepped, and goes home while the next is; gradients do not go."""
        step, chip, pieces = self._step, self._chip, self._needs.pieces
        leaving = step.leaving_gradients(self._choice)
        order = [b for b in range(len(pieces)) if step.trained[b]]
        sent, coming = 0.0, chip.stream(pieces[order[0]], True)
        for number, block in enumerate(order):
            here = coming
            if number + 1 < len(order):
                coming = chip.stream(pieces[order[number + 1]], True, sent)
            chip.wait(here)
            self._compute(step.update_s * step.shares[block])
            sent = chip.stream(pieces[block] - leaving[block], False)
        chip.wait(sent)
