"""The plans of a run at work: each expert under its own, looked at between windows, and made anew where they no longer
hold. Every decision is told with its reason; none of them changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from supertuner.core.events import Decided, Noted, Sink, Warned
from supertuner.core.types import bytes_text
from supertuner.plan.placement.plan import Fate, Plan, Residence, Stepping
from supertuner.plan.placement.planner import Planned
from supertuner.plan.placement.replan import Basis, Distance, Observed, drift
from supertuner.step.window import Trainee
from supertuner.train.offload.apply import LEAST_SENT_BYTES, Acting, act
from supertuner.train.offload.expert_swap import Guest, Turns
from supertuner.train.offload.host_buffers import Homes
from supertuner.train.offload.optimizer_state import HOST
from supertuner.train.offload.transfer import Carrier, Counters

Replan = Callable[[str, Basis, Observed], Planned | None]
"""(expert, what its plan rests on, what was seen) → a plan from that; None: none can be made here."""


@dataclass(slots=True)
class _Watched:
    """One expert since it was last looked at."""

    basis: Basis
    distance: Distance
    every: int
    """Windows until it is looked at: more of them each time that planning anew changed nothing."""
    windows: int = 0
    samples: int = 0
    seconds: float = 0.0
    counters: Counters = field(default_factory=Counters)
    entered: bool = False
    """Whether training has just come to it from another expert: its first whole window is looked at."""
    met: bool = False
    """Whether its plan was made anew when training came to it; from then on it is compared like any other."""

    def taken(self) -> Observed:
        seen = Observed(self.windows, self.samples, self.seconds, self.counters)
        self.windows, self.samples, self.seconds, self.counters = 0, 0, 0.0, Counters()
        return seen


class Acts:
    """All experts of a run that are under a plan."""

    def __init__(
        self,
        trainees: Sequence[Trainee],
        planned: Mapping[str, Planned],
        carrier: Carrier,
        sink: Sink,
        *,
        every: int = 0,
        replan: Replan | None = None,
        least_sent_bytes: int = LEAST_SENT_BYTES,
    ) -> None:
        """Every so many windows of an expert its plan is looked at; 0: never."""
        self._carrier, self._sink, self._every, self._replan = carrier, sink, every, replan
        self._least = least_sent_bytes
        self._trainees = {one.expert.name: one for one in trainees}
        self.actings: dict[str, Acting] = {}
        self._watched: dict[str, _Watched] = {}
        self.turns = Turns()
        self._last: str | None = None
        self._wrong: str | None = None
        self._in_turn = len(planned) > 1 and all(one.plan.idle_at_home for one in planned.values())
        for name, one in planned.items():
            self._begin(name, one)

    def after_window(self, expert: str, samples: int, seconds: float) -> None:
        """A window of an expert took so long. Between two windows: nothing computes."""
        watched = self._watched.get(expert)
        changed = self._last is not None and self._last != expert
        self._last = expert
        if watched is None or not self._every:
            self._carrier.take()  # they would pile up
            return
        if changed:  # copies of the change are no part of a window
            self._carrier.take()
            watched.entered = True
            return
        watched.windows, watched.samples, watched.seconds = (
            watched.windows + 1, watched.samples + samples, watched.seconds + seconds
        )  # fmt: skip
        _add(watched.counters, self._carrier.take())
        if watched.windows >= watched.every or watched.entered or self._wrong is not None:
            self._look(expert, watched)

    def state_home(self, expert: str) -> torch.device | None:
        """Where what an optimizer remembers is read to; None: beside its weights."""
        acting = self.actings.get(expert)
        return None if acting is None or acting.plan.stepping is Stepping.GPU else HOST

    def refused(self, reason: str) -> None:
        """Something that a plan counted on was refused: it is looked at after this window."""
        self._wrong = reason

    def _look(self, expert: str, watched: _Watched) -> None:
        seen, wrong = watched.taken(), self._wrong
        came, self._wrong, watched.entered = watched.entered and not watched.met, None, False
        watched.met |= came
        old = self.actings[expert].plan
        may_drift = self._replan is not None and not old.does_nothing  # where all stays, no plan is faster
        reason = wrong or (drift(watched.basis, seen) if may_drift else None)
        if reason is None and came and may_drift:
            reason = f"training came to {expert}"
        watched.basis = watched.basis.learnt(seen)
        if reason is None:
            self._follow(expert, watched, seen)
            return
        planned = None if self._replan is None else self._replan(expert, watched.basis, seen)
        if planned is None:
            self._sink.emit(Warned(f"plan.{expert}", f"{reason}; no other plan can be made here, so it stays"))
            watched.basis = Basis(seen.to_device_bytes_s, seen.to_host_bytes_s, seen.waiting, None, seen.sample_s)
        elif _same(planned.plan, old):
            self._sink.emit(Noted(f"plan.{expert}", f"{reason}; made anew, it comes out the same"))
            self._watched[expert] = _Watched(planned.basis, watched.distance, 2 * watched.every, met=watched.met)
        else:
            self._change(expert, planned, reason)

    def _follow(self, expert: str, watched: _Watched, seen: Observed) -> None:
        watched.distance, why = watched.distance.after(seen)
        if why is not None:
            watched.basis = replace(watched.basis, sample_s=None)  # another time is expected now
            self.actings[expert].fetch_ahead(watched.distance.ahead)
            self._sink.emit(Decided(f"plan.{expert}.ahead", watched.distance.ahead, why))

    def _change(self, expert: str, planned: Planned, reason: str) -> None:
        self.turns.drop(expert)
        self.actings[expert].take_off()
        met = self._watched[expert].met
        self._begin(expert, planned, reason, self.actings[expert].homes)
        self._watched[expert].met = met

    def _begin(self, expert: str, planned: Planned, reason: str | None = None, homes: Homes | None = None) -> None:
        plan, guest = planned.plan, self._in_turn and planned.plan.idle_at_home
        acting = act(
            self._trainees[expert], plan, self._carrier, here=not guest, homes=homes, least_sent_bytes=self._least
        )
        self.actings[expert] = acting
        if guest:
            self.turns.add(expert, Guest(acting))
        most = min(planned.most_ahead, len(plan.blocks)) if acting.ring.streamed or acting.sends else plan.ahead
        self._watched[expert] = _Watched(planned.basis, Distance(plan.ahead, most), self._every)
        why = "; ".join((*([reason] if reason else []), *plan.reasons)) or "planned"
        self._sink.emit(Decided(f"plan.{expert}", told(plan), why))
        for line in acting.refused:
            self._sink.emit(Noted(f"plan.{expert}", f"not followed: {line}"))
        if acting.ring.streamed:
            slots, host = bytes_text(acting.ring.nbytes), bytes_text(acting.homes.host.nbytes)
            self._sink.emit(Noted(f"plan.{expert}", f"{slots} of slots on the device, {host} of host memory"))


def told(plan: Plan) -> str:
    """A plan in one line."""
    if plan.does_nothing:
        return "everything stays on the device"
    parts = []
    streamed = sum(block.weights is Residence.STREAMED for block in plan.blocks)
    if streamed:
        parts.append(f"weights of {streamed} blocks streamed, {plan.ahead} ahead")
    for fate, word in ((Fate.SEND, "sent"), (Fate.RECOMPUTE, "recomputed")):
        count = sum(block.activations is fate for block in plan.blocks)
        if count:
            parts.append(f"activations of {count} blocks {word}")
    parts.append(f"optimizer: {plan.stepping}")
    if plan.idle_at_home:
        parts.append("idle experts in host memory")
    return "; ".join(parts)


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans do the same."""
    rows = [[(block.name, block.weights, block.activations) for block in plan.blocks] for plan in (one, other)]
    return rows[0] == rows[1] and replace(one, blocks=(), modelled=None, reasons=(), machine="") == replace(
        other, blocks=(), modelled=None, reasons=(), machine=""
    )


def _add(total: Counters, more: Counters) -> None:
    for name in Counters.__slots__:
        setattr(total, name, getattr(total, name) + getattr(more, name))
