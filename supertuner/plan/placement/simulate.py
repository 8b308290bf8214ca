"""Simulates one window of a step under a placement, pass by pass: what is fetched, sent, waited for and computed, when.

The same rules hold for every placement, for plans and baselines alike; `train/offload` follows them on a GPU:

- A use is one pass (forward or backward) of one block. At its start, fetches are started for everything that it and the
  next `ahead` uses need, unless it is on the GPU or on its way. Then the use waits for its own weights and activations.
- Activations that are sent leave after the block's forward pass. A bounded number of blocks sends at once: one more has
  to wait for the oldest, whose GPU memory is then free.
- Gradients on their way to the host still occupy GPU memory. A use that does not fit beside them waits for the oldest.
- Copies use the link in the order in which they were started.
- The update begins when all gradients have arrived. At the end of a window everything is at its permanent place, so
  that checkpoints can read it there.

The machine is a parameter: a fast clock (`fast_simulate.py`) and the emulated superchip (`benchmarks/plan_replay.py`)
run the same code.
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
"""Micro-batches of a window that are simulated. The schedule repeats from then on: each further one takes as long as
the last of these."""


class SimulatedMachine(Protocol):
    """The operations that a simulated step needs."""

    @property
    def now(self) -> float:
        """Seconds since the start of the clock."""

    def compute(self, seconds: float) -> None: ...
    def start_copy(self, nbytes: int, to_gpu: bool, after: float = 0.0) -> float:
        """Queue a copy on the link, not before the time `after`. Returns the time at which it will be done."""

    def wait_until(self, time_s: float) -> None:
        """Advance the clock to this time, unless it is past."""

    def set_gpu_bytes_in_use(self, nbytes: int) -> None:
        """Report the GPU memory in use. May raise if it exceeds the machine's."""


@dataclass(frozen=True, slots=True)
class SimulatedWindow:
    """Modelled times of one window."""

    seconds: float
    compute_s: float
    """Time in which the GPU computed."""
    update_s: float
    """Time of the update, from the last backward pass on."""

    @property
    def waiting_s(self) -> float:
        return self.seconds - self.compute_s


def simulate_window(
    step: TimedStep,
    choice: PlacementChoice,
    needs: MemoryNeeds,
    gpu_bytes: int,
    machine: SimulatedMachine,
    *,
    max_waiting_s: float = math.inf,
) -> SimulatedWindow | None:
    """The times of one window; None: its passes waited longer than `max_waiting_s`, and the simulation stopped."""
    return _WindowSimulator(step, choice, needs, gpu_bytes, machine).simulate(max_waiting_s)


class _WindowSimulator:
    def __init__(
        self, step: TimedStep, choice: PlacementChoice, needs: MemoryNeeds, gpu_bytes: int, machine: SimulatedMachine
    ) -> None:
        self._step, self._choice, self._needs = step, choice, needs
        self._gpu_bytes, self._machine = gpu_bytes, machine
        self._offloaded_gradients = step.offloaded_gradient_bytes(choice)
        self._gradients_in_flight: deque[tuple[float, int]] = deque()
        """Gradients on their way to the host: arrival time and bytes, oldest first."""
        self._slot_ready_s: dict[int, float] = {}
        """Block with weights in a slot of the ring → time at which they have arrived."""
        self._sends_in_flight: deque[tuple[int, float]] = deque()
        """Blocks whose activations are on their way to the host, and their arrival times, oldest first."""
        self._on_host_only: set[int] = set()
        """Blocks whose activations are in host memory and no longer on the GPU."""
        self._fetch_ready_s: dict[int, float] = {}
        """Block whose activations are being fetched → time at which they have arrived."""
        self._gradients_on_host_s = 0.0
        """Time at which the last gradient that was sent has arrived."""
        self._compute_s = 0.0

    def simulate(self, max_waiting_s: float) -> SimulatedWindow | None:
        begin = self._machine.now
        latest_waiting = begin + max_waiting_s  # upper limit of (clock - time computed)
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
        end = self._machine.now
        return SimulatedWindow(end - begin + extra, self._compute_s + extra_computed, end - begin_update)

    # ── forward and backward ─────────────────────────────────────────────────────────────────────────────────────

    def _run_use(self, uses: list[tuple[int, bool]], number: int, first: bool) -> None:
        """One pass of one block. `uses` are (block, is backward); `first`: it belongs to the first micro-batch."""
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
        # The slot is free for another block, unless this one is used again within the prefetch distance (the last block
        # of the forward pass is the first of the backward pass).
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
            if not first:  # gradients of earlier micro-batches are fetched, to add these to them
                self._machine.wait_until(self._machine.start_copy(self._offloaded_gradients[block], True))
            self._gradients_on_host_s = self._machine.start_copy(self._offloaded_gradients[block], False)
            self._gradients_in_flight.append((self._gradients_on_host_s, self._offloaded_gradients[block]))

    def _make_room(self, need: int) -> None:
        """Waits for gradients on their way to the host, oldest first, until `need` bytes fit beside the rest."""
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
        """The CPU steps when the last gradient has arrived; weights that stay on the GPU are then copied there."""
        step, machine = self._step, self._machine
        resident = sum(step.trained_bytes) - sum(step.streamed_trained_bytes(self._choice))
        machine.wait_until(self._gradients_on_host_s)
        machine.wait_until(machine.now + step.host_step_s)
        machine.wait_until(machine.start_copy(resident, True))

    def _update_by_pieces(self) -> None:
        """A piece arrives while the one before it is stepped, and leaves while the next one is. Gradients do not
        return.

        The next piece's fetch starts after the piece before the current one has been sent: both use the link.
        """
        step, machine, pieces = self._step, self._machine, self._needs.update_piece_bytes
        order = [b for b in range(len(pieces)) if step.trained_bytes[b]]
        sent_s, next_ready_s = 0.0, machine.start_copy(pieces[order[0]], True)
        for number, block in enumerate(order):
            ready_s = next_ready_s
            if number + 1 < len(order):
                next_ready_s = machine.start_copy(pieces[order[number + 1]], True, sent_s)
            machine.wait_until(ready_s)
            self._compute(step.update_s * step.update_shares[block])
            sent_s = machine.start_copy(pieces[block] - self._offloaded_gradients[block], False)
        machine.wait_until(sent_s)
