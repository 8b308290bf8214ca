"""The search for a choice that fits and is quick: exact where there are few, structured and improved elsewhere. Pure.

Small steps: every choice is judged. Others: so many blocks streamed, so many recomputed, evenly spread among those that
are alike; of the rest as many kept as there is room for, the last ones, which are needed first, or spread evenly, so
that the link always has work; the others sent. Those numbers are searched for every place of the optimizer and distance
ahead; then single blocks are changed as long as that helps. No choice can be better than the bound, so a search that
comes near it ends. Deterministic: it counts its trials and looks at no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from supertuner.plan.placement.choice import Choice, Step
from supertuner.plan.placement.fast_simulate import Verdict, judge
from supertuner.plan.placement.memory_needs import Needs, needs
from supertuner.plan.placement.plan import Fate, Stepping
from supertuner.plan.placement.simulate import PLAYED
from supertuner.plan.placement.throughput import Limits

FEW: Final = 3000
"""Choices that are all judged."""
ENOUGH: Final = 1.002
"""Times the bound: not worth searching further."""
USES: Final = 240_000
"""Passes through a block that are played at most, in all choices together: some three seconds of one core."""
STARTS: Final = 3
"""Of the coarse grid, the best points that are looked around."""
TRAFFIC_COUNTS: Final = 1e-3
"""Of two choices that take as long, the one that moves less: a second of link is worth this many of the step."""
AHEAD: Final = (1, 2, 3, 0)
NEGLIGIBLE: Final = 0.03
"""Share of the GPU's memory below which nobody sends an optimizer's state away."""


def search(step: Step, limits: Limits, bound_s: float) -> Verdict | None:
    """The best choice that was found; None if none fits."""
    count = len(step.weights)
    for choice in (Choice.nothing(count), replace(Choice.nothing(count), idle_at_home=True)):
        verdict = judge(step, choice, limits)
        if verdict.played is not None and (not choice.idle_at_home or step.rates.has_link):
            return verdict
    if _size(step) <= FEW:
        return _best(step, (judge(step, choice, limits) for choice in _every(step)))
    return _Search(step, limits, bound_s).run()


def worth(step: Step, verdict: Verdict) -> float:
    """What is made small: time, and a little for what is moved."""
    if verdict.played is None:
        return math.inf
    return verdict.seconds + TRAFFIC_COUNTS * link_seconds(step, verdict.choice)


def link_seconds(step: Step, choice: Choice) -> float:
    """How long the link is busy in a window, both ways."""
    rates, micro = step.rates, step.table.micro_batches
    if not rates.has_link:
        return 0.0
    assert rates.to_device_bytes_s is not None and rates.to_host_bytes_s is not None
    sent = sum(s for s, fate in zip(step.saved, choice.fates, strict=True) if fate is Fate.SEND)
    streamed = sum(w for w, away in zip(step.travels, choice.streamed, strict=True) if away)
    gradients, trained = sum(step.leaving_gradients(choice)), sum(step.returning(choice))
    up, down = micro * (sent + 2 * streamed) + (micro - 1) * gradients, micro * (sent + gradients)
    if choice.stepping is Stepping.HOST:
        up += sum(step.trained) - trained
    else:
        state = sum(step.state) if choice.stepping is Stepping.STREAMED else 0
        up, down = up + state + trained + gradients, down + state + trained
    return up / rates.to_device_bytes_s + down / rates.to_host_bytes_s


def least_update_s(step: Step, stepping: Stepping) -> float:
    """What an update takes at least: its work, and the way of the state there and back."""
    if stepping is Stepping.HOST:
        return step.host_step_s
    if stepping is Stepping.GPU or step.rates.duplex:
        return step.update_s
    assert step.rates.to_device_bytes_s is not None and step.rates.to_host_bytes_s is not None
    state = sum(step.state)
    return max(step.update_s, state / step.rates.to_device_bytes_s + state / step.rates.to_host_bytes_s)


def steppings(step: Step, limits: Limits) -> list[Stepping]:
    """Where the optimizer may step. What keeps megabytes stays on the GPU."""
    found = [Stepping.GPU]
    if step.rates.has_link and sum(step.state) + sum(step.gradients) > NEGLIGIBLE * limits.gpu_bytes:
        found.append(Stepping.STREAMED)
        if step.rates.host_bytes_s is not None:
            found.append(Stepping.HOST)
    return found


def spread(members: Sequence[int]) -> list[int]:
    """The same in an order in which every beginning is spread evenly over all: halves, quarters, eighths."""
    bits = max(1, (len(members) - 1).bit_length())
    order = sorted(range(1 << bits), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))
    return [members[number] for number in order if number < len(members)]


def _fates(step: Step, block: int) -> tuple[Fate, ...]:
    fates = [Fate.KEEP]
    if step.saved[block]:
        fates += [Fate.SEND] if step.rates.has_link and step.movable[block] else []
        fates += [Fate.RECOMPUTE] if step.table.blocks[block].recomputable else []
    return tuple(fates)


def _residences(step: Step, block: int) -> tuple[bool, ...]:
    return (False, True) if step.rates.has_link and step.movable[block] and step.travels[block] else (False,)


def _size(step: Step) -> int:
    blocks = math.prod(len(_fates(step, b)) * len(_residences(step, b)) for b in range(len(step.weights)))
    return blocks * len(AHEAD) * len(Stepping)


def _every(step: Step) -> Iterator[Choice]:
    count = len(step.weights)
    moves = step.rates.has_link and any(step.trained)
    places = [stepping for stepping in Stepping if stepping is Stepping.GPU or moves]
    if step.rates.host_bytes_s is None and moves:
        places.remove(Stepping.HOST)
    fates = product(*(_fates(step, b) for b in range(count)))
    for fate in fates:
        for streamed in product(*(_residences(step, b) for b in range(count))):
            for ahead, stepping in product(AHEAD, places):
                yield Choice(streamed, fate, ahead, stepping, step.rates.has_link)


def _best(step: Step, verdicts: Iterator[Verdict]) -> Verdict | None:
    best = min(verdicts, key=lambda verdict: worth(step, verdict), default=None)
    return None if best is None or best.played is None else best


class _Search:
    def __init__(self, step: Step, limits: Limits, bound_s: float) -> None:
        self._step, self._limits, self._bound_s = step, limits, bound_s
        self._left = USES // (2 * len(step.weights) * min(step.table.micro_batches, PLAYED))
        self._known: dict[Choice, Needs] = {}
        self._micro_s = step.micro_s
        self._best: Verdict | None = None
        self._away = _ranked(
            step, lambda b: float(step.travels[b]), [b for b in range(len(step.weights)) if any(_residences(step, b))]
        )
        again = [b for b in range(len(step.weights)) if Fate.RECOMPUTE in _fates(step, b)]
        self._again = _ranked(step, lambda b: (step.saved[b] - step.inputs[b]) / max(step.forward_s[b], 1e-12), again)
        """Blocks in the order in which recomputing them frees most for its time."""

    def run(self) -> Verdict | None:
        """Every place of the optimizer one block ahead; then the best place at other distances; then single blocks."""
        for ahead in AHEAD:
            places = steppings(self._step, self._limits)
            if self._best is not None:
                if ahead == 0:
                    break
                places = [self._best.choice.stepping]
            for stepping, evenly in product(places, (False, True)):
                self._numbers(ahead, stepping, evenly)
                if self._done:
                    return self._best
        self._singles()
        return self._best

    @property
    def _done(self) -> bool:
        near = self._best is not None and self._best.seconds <= ENOUGH * self._bound_s
        return near or self._left <= 0

    def _worth(self, choice: Choice | None) -> float:
        if choice is None:
            return math.inf
        spare_s = self._spare_s(choice)
        if spare_s < 0:
            return math.inf
        self._left -= 1
        verdict = judge(self._step, choice, self._limits, needed=self._needs(choice), patience_s=spare_s)
        value = worth(self._step, verdict)
        if value < (math.inf if self._best is None else worth(self._step, self._best)):
            self._best = verdict
        return value

    def _spare_s(self, choice: Choice) -> float:
        """How much longer than its work it may take and still be better than the best; negative: its work alone, or its
        traffic alone, takes longer."""
        if self._best is None:
            return math.inf
        step = self._step
        again = sum(f for f, fate in zip(step.forward_s, choice.fates, strict=True) if fate is Fate.RECOMPUTE)
        work = step.table.micro_batches * (self._micro_s + again) + least_update_s(step, choice.stepping)
        if not step.rates.duplex and link_seconds(step, choice) > self._best.seconds:
            return -1.0
        return self._best.seconds - work

    def _numbers(self, ahead: int, stepping: Stepping, evenly: bool) -> None:
        """How many blocks are streamed and how many recomputed: a coarse grid, then closer steps around the best."""
        most = (len(self._away), len(self._again))
        tried: dict[tuple[int, int], float] = {}

        def value(at: tuple[int, int]) -> float:
            if at not in tried:
                tried[at] = self._worth(self._made(*at, ahead, stepping, evenly))
            return tried[at]

        stride = [max(1, math.ceil(limit / 4)) for limit in most]
        grid = [sorted({*range(0, limit + 1, by), limit}) for limit, by in zip(most, stride, strict=True)]
        for at in product(*grid):
            value(at)
            if self._done:
                return
        ranked = sorted(tried, key=lambda key: (tried[key], key))
        ends = [next(at for at in ranked if at[1] == end) for end in {0, most[1]}]  # nothing, or all, recomputed
        for start in dict.fromkeys([*ranked[:STARTS], *sorted(ends)]):
            self._closer(start, (stride[0], stride[1]), (most[0], most[1]), value)

    def _closer(
        self,
        at: tuple[int, int],
        stride: tuple[int, int],
        most: tuple[int, int],
        value: Callable[[tuple[int, int]], float],
    ) -> None:
        """From a point of the grid to the best around it, in ever smaller steps."""
        while not self._done:
            near = [
                (at[0] + i * stride[0], at[1] + j * stride[1])
                for i, j in product((-1, 0, 1), repeat=2)
                if 0 <= at[0] + i * stride[0] <= most[0] and 0 <= at[1] + j * stride[1] <= most[1]
            ]
            better = min(near, key=lambda key: (value(key), key))
            if value(better) < value(at):
                at = better
            elif stride == (1, 1):
                return
            else:
                stride = (max(1, stride[0] // 2), max(1, stride[1] // 2))

    def _made(self, away: int, again: int, ahead: int, stepping: Stepping, evenly: bool) -> Choice | None:
        """So many streamed and recomputed; of the others as many kept as fit. None: nothing fits."""
        count = len(self._step.weights)
        streamed, recomputed = set(self._away[:away]), set(self._again[:again])
        others = [b for b in reversed(range(count)) if b not in recomputed]
        if evenly:
            others = others[: ahead + 1] + spread(others[ahead + 1 :])

        def choice(kept: int) -> Choice:
            keep = set(others[:kept])
            fates = tuple(
                Fate.RECOMPUTE if b in recomputed else Fate.KEEP if b in keep or not self._sends(b) else Fate.SEND
                for b in range(count)
            )
            return Choice(tuple(b in streamed for b in range(count)), fates, ahead, stepping, self._step.rates.has_link)

        if not self._fits_gpu(choice(0)):
            return None
        low, high = 0, len(others)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_gpu(choice(middle)):
                low = middle
            else:
                high = middle - 1
        made = choice(low)
        return made if self._needs(made).fit(self._limits, self._step.rates.one_pool) else None

    def _sends(self, block: int) -> bool:
        return Fate.SEND in _fates(self._step, block)

    def _fits_gpu(self, choice: Choice) -> bool:
        return self._needs(choice).gpu <= self._limits.gpu_bytes

    def _needs(self, choice: Choice) -> Needs:
        found = self._known.get(choice)
        if found is None:
            found = self._known[choice] = needs(self._step, choice.settled())
        return found

    def _singles(self) -> None:
        """Change one block at a time, or exchange two, as long as it helps."""
        best = self._best
        while best is not None and not self._done:
            for other in _neighbours(self._step, best.choice):
                self._worth(other if self._fits_gpu(other) else None)
                if self._done or self._best is not best:
                    break
            if self._best is best:
                return
            best = self._best


def _neighbours(step: Step, choice: Choice) -> Iterator[Choice]:
    for b in range(len(step.weights)):
        for fate in _fates(step, b):
            if fate is not choice.fates[b]:
                yield replace(choice, fates=(*choice.fates[:b], fate, *choice.fates[b + 1 :]))
        for away in _residences(step, b):
            if away is not choice.streamed[b]:
                yield replace(choice, streamed=(*choice.streamed[:b], away, *choice.streamed[b + 1 :]))
    for distance in (1, 2, 4, 8, 16):
        for b in range(len(step.weights) - distance):
            yield from _exchanged(step, choice, b, b + distance)


def _exchanged(step: Step, choice: Choice, one: int, other: int) -> Iterator[Choice]:
    fates, streamed = list(choice.fates), list(choice.streamed)
    fates[one], fates[other] = fates[other], fates[one]
    if fates[one] is not fates[other] and fates[one] in _fates(step, one) and fates[other] in _fates(step, other):
        yield replace(choice, fates=tuple(fates))
    streamed[one], streamed[other] = streamed[other], streamed[one]
    if streamed[one] is not streamed[other] and all(True in _residences(step, b) for b in (one, other)):
        yield replace(choice, streamed=tuple(streamed))


def _ranked(step: Step, merit: Callable[[int], float], blocks: Sequence[int]) -> list[int]:
    """Best first; blocks that are alike in an evenly spread order."""
    alike: dict[float, list[int]] = {}
    for block in blocks:
        alike.setdefault(float(f"{merit(block):.3g}"), []).append(block)
    return [block for value in sorted(alike, reverse=True) for block in spread(alike[value])]
