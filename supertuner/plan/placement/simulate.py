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

from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.memory_needs import MemoryNeeds
from supertuner.plan.placement.plan import ActivationPolicy, OptimizerPlacement

SIMULATED_MICRO_BATCHES: Final = 3
"""Micro-batches of a window that are played; further ones take as long as the last of these."""


class SimulatedMachine(Protocol):
    """What a step asks of a machine."""

    @property
    def now(self) -> float: ...
    def compute(self, seconds: float) -> None: ...
    def start_copy(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float: ...
    def wait_until(self, time_s: float) -> None: ...
    def set_gpu_bytes_in_use(self, nbytes: int) -> None:
        """So much of the GPU's memory is in use now."""


@dataclass(frozen=True, slots=True)
class SimulatedWindow:
    """One window."""

    seconds: float
    compute_s: float
    """Of these, the GPU computed."""
    update_s: float
    """Of these, from the last gradient on."""

    @property
    def waiting_s(self) -> float:
        return self.seconds - self.compute_s


def simulate_window(
    step: TimedStep,
    choice: PlacementChoice,
    memory_needs: MemoryNeeds,
    gpu_bytes: int,
    machine: SimulatedMachine,
    *,
    max_waiting_s: float = math.inf,
) -> SimulatedWindow | None:
    """One window. None: its passes waited for longer than `patience_s`, and nobody wants to know the rest."""
    return _WindowSimulator(step, choice, memory_needs, gpu_bytes, machine).simulate(max_waiting_s)


class _WindowSimulator:
    def __init__(
        self,
        step: TimedStep,
        choice: PlacementChoice,
        memory_needs: MemoryNeeds,
        gpu_bytes: int,
        machine: SimulatedMachine,
    ) -> None:
        self._step, self._choice, self._needs, self._gpu_bytes, self._machine = (
            step,
            choice,
            memory_needs,
            gpu_bytes,
            machine,
        )
        self._offloaded_gradients = step.offloaded_gradient_bytes(choice)
        self._gradients_in_flight: deque[tuple[float, int]] = deque()
        """On their way home: when they will have left, and how many bytes."""
        self._slot_ready_s: dict[int, float] = {}
        """Blocks whose weights are in a slot, or will be then."""
        self._sends_in_flight: deque[tuple[int, float]] = deque()
        """Blocks whose activations are on their way home, and when they will have arrived."""
        self._on_host_only: set[int] = set()
        """Blocks whose activations are with the host only."""
        self._fetch_ready_s: dict[int, float] = {}
        self._gradients_on_host_s = 0.0
        """When the last gradient that leaves will have arrived."""
        self._compute_s = 0.0

    def simulate(self, max_waiting_s: float = math.inf) -> SimulatedWindow | None:
        begin, compute_before = self._machine.now, self._compute_s
        latest_waiting = begin - compute_before + max_waiting_s  # the clock, less what was computed
        table, count = self._step.table, len(self._step.weight_bytes)
        simulated = min(table.micro_batches, SIMULATED_MICRO_BATCHES)
        passes = [*((b, False) for b in range(count)), *((b, True) for b in reversed(range(count)))]
        uses, ends, last = passes * simulated, [begin], self._compute_s
        for number in range(len(uses)):
            if number and number % len(passes) == 0:
                ends.append(self._machine.now)
                last = self._compute_s
            self._run_use(uses, number, first=number < len(passes))
            if self._machine.now - self._compute_s > latest_waiting:
                return None
        ends.append(self._machine.now)
        not_simulated = table.micro_batches - simulated
        extra, extra_computed = not_simulated * (ends[-1] - ends[-2]), not_simulated * (self._compute_s - last)
        self._slot_ready_s.clear()
        begin_update = self._machine.now
        self._update()
        seconds = self._machine.now - begin + extra
        return SimulatedWindow(
            seconds, self._compute_s - compute_before + extra_computed, self._machine.now - begin_update
        )

    # ── forward and backward ─────────────────────────────────────────────────────────────────────────────────────

    def _run_use(self, uses: list[tuple[int, bool]], number: int, first: bool) -> None:
        step, choice, machine = self._step, self._choice, self._machine
        block, backward = uses[number]
        if block == 0 and not backward:
            self._sends_in_flight.clear()
            self._on_host_only.clear()
        need = self._needs.backward_bytes[block] if backward else self._needs.forward_bytes[block]
        self._make_room(need)
        for upcoming, upcoming_backward in uses[number : number + choice.ahead + 1]:
            if choice.streamed[upcoming] and upcoming not in self._slot_ready_s:
                self._slot_ready_s[upcoming] = machine.start_copy(step.streamable_bytes[upcoming], True)
            if upcoming_backward and upcoming in self._on_host_only and upcoming not in self._fetch_ready_s:
                self._fetch_ready_s[upcoming] = machine.start_copy(step.saved_bytes[upcoming], True)
        if choice.streamed[block]:
            machine.wait_until(self._slot_ready_s[block])
        if backward:
            if block in self._on_host_only:
                machine.wait_until(self._fetch_ready_s.pop(block))
                self._on_host_only.discard(block)
            recompute_s = step.forward_s[block] if choice.activations[block] is ActivationPolicy.RECOMPUTE else 0.0
            self._compute(recompute_s + step.backward_s[block])
        else:
            self._compute(step.forward_s[block])
        if choice.streamed[block] and all(other != block for other, _ in uses[number + 1 : number + choice.ahead + 1]):
            del self._slot_ready_s[block]
        self._send_to_host(block, backward, first)

    def _send_to_host(self, block: int, backward: bool, first: bool) -> None:
        step, choice = self._step, self._choice
        if not backward and choice.activations[block] is ActivationPolicy.SEND:
            self._sends_in_flight.append((block, self._machine.start_copy(step.saved_bytes[block], False)))
            while len(self._sends_in_flight) > choice.max_sends_in_flight:
                sent_block, until = self._sends_in_flight.popleft()
                self._machine.wait_until(until)
                self._on_host_only.add(sent_block)
        if backward and self._offloaded_gradients[block]:
            if not first:  # what is at home comes to be added to
                self._machine.wait_until(self._machine.start_copy(self._offloaded_gradients[block], True))
            self._gradients_on_host_s = self._send_gradients(self._offloaded_gradients[block])

    def _send_gradients(self, nbytes: int) -> float:
        done_s = self._machine.start_copy(nbytes, False)
        self._gradients_in_flight.append((done_s, nbytes))
        return done_s

    def _make_room(self, need: int) -> None:
        in_flight, machine = self._gradients_in_flight, self._machine
        in_flight_bytes = sum(nbytes for _, nbytes in in_flight) if in_flight else 0
        while in_flight and (in_flight[0][0] <= machine.now or need + in_flight_bytes > self._gpu_bytes):
            until, nbytes = in_flight.popleft()
            machine.wait_until(until)
            in_flight_bytes -= nbytes
        machine.set_gpu_bytes_in_use(need + in_flight_bytes)

    def _compute(self, seconds: float) -> None:
        self._compute_s += seconds
        self._machine.compute(seconds)

    # ── the update ───────────────────────────────────────────────────────────────────────────────────────────────

    def _update(self) -> None:
        if self._choice.optimizer is OptimizerPlacement.HOST:
            self._update_on_host()
            return
        self._make_room(self._needs.update_bytes)
        if any(self._needs.update_piece_bytes):
            self._machine.wait_until(self._gradients_on_host_s)
            self._update_by_pieces()
        else:
            self._compute(self._step.update_s)

    def _update_on_host(self) -> None:
        """When the last gradient is there; weights that live on the GPU come there anew."""
        step, machine = self._step, self._machine
        resident = sum(step.trained_bytes) - sum(step.streamed_trained_bytes(self._choice))
        machine.wait_until(self._gradients_on_host_s)
        machine.wait_until(machine.now + step.host_step_s)
        machine.wait_until(machine.start_copy(resident, True))

    def _update_by_pieces(self) -> None:
        """Each piece comes while the one before is stepped, and goes home while the next is; gradients do not go."""
        step, machine, pieces = self._step, self._machine, self._needs.update_piece_bytes
        offloaded_gradients = step.offloaded_gradient_bytes(self._choice)
        order = [b for b in range(len(pieces)) if step.trained_bytes[b]]
        sent_s, next_ready_s = 0.0, machine.start_copy(pieces[order[0]], True)
        for number, block in enumerate(order):
            ready_s = next_ready_s
            if number + 1 < len(order):
                next_ready_s = machine.start_copy(pieces[order[number + 1]], True, sent_s)
            machine.wait_until(ready_s)
            self._compute(step.update_s * step.update_shares[block])
            sent_s = machine.start_copy(pieces[block] - offloaded_gradients[block], False)
        machine.wait_until(sent_s)
