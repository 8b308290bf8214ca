"""How long a run takes, from what its parts take: windows that grow, encoding once, samples now and then. Pure.

Everything here multiplies and adds. What a step takes on a machine is the plan's matter; how fast disks are, how long
decoding takes and what a machine needs to start is nobody's, and is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from supertuner.config.settings.tree import RunConfig
from supertuner.config.settings.validation import ValidationSettings
from supertuner.optim.schedule import Course, accumulation

PROMPTS_TAKEN = 4
"""Where no prompt is given, at most so many captions are sampled; `plan/sample_requests.py` takes them."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a window of an expert takes: so much for each micro-batch, and so much once."""

    micro_batch_s: float
    update_s: float

    def window_s(self, micro_batches: float) -> float:
        return micro_batches * self.micro_batch_s + self.update_s


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one size in a run."""

    samples: int
    count: int
    micro_batches: int
    """For each process, if all samples of a window are of one shape; more where they are not."""


def windows(course: Course, batch_size: int, processes: int = 1) -> tuple[Windows, ...]:
    """The run's windows by size, in order; the last one may be short."""
    found = []
    steps = course.total_steps
    short = len(course.window_of(steps - 1)) if steps else 0
    for number, part in enumerate(course.stretches):
        end = course.stretches[number + 1].step if number + 1 < len(course.stretches) else steps
        count = min(end, steps) - part.step
        last = part.step < steps <= end and short < part.size
        if count - last > 0:
            found.append(Windows(part.size, count - last, accumulation(part.size, batch_size, processes)))
        if last:
            found.append(Windows(short, 1, accumulation(short, batch_size, processes)))
    return tuple(found)


def largest_window(config: RunConfig, course: Course | None, processes: int = 1) -> int:
    """Micro-batches of the largest window that the run comes to."""
    batch = config.train.batch_size
    if course is None:
        return config.train.gradient_accumulation_steps
    return max((one.micro_batches for one in windows(course, batch, processes)), default=1)


def training_s(parts: Sequence[Windows], experts: Sequence[StepTime]) -> float:
    """All windows; experts take turns, so each has its share of every size."""
    each = [sum(time.window_s(part.micro_batches) for time in experts) / len(experts) for part in parts]
    return sum(part.count * seconds for part, seconds in zip(parts, each, strict=True))


def mean_time(times: Sequence[StepTime], shares: Sequence[float]) -> StepTime:
    """Of batches of several shapes, drawn so often."""
    whole = sum(shares)
    micro = sum(time.micro_batch_s * share for time, share in zip(times, shares, strict=True)) / whole
    return StepTime(micro, max(time.update_s for time in times))


def between(times: Mapping[int, float], tokens: int) -> float:
    """What a micro-batch of so many tokens takes, from what others take.

    Work is a polynomial of second degree in the number of tokens: linear layers are of the first, attention is of the
    second. Through three sizes it is exact, through two and zero it is close, and of one it is taken to be in
    proportion. Sizes beyond the known ones are continued.
    """
    points = sorted(times.items())
    if tokens in times:
        return times[tokens]
    if len(points) == 1:
        return points[0][1] * tokens / points[0][0]
    points = points if len(points) >= 3 else [(0, 0.0), *points]
    points = sorted(points, key=lambda point: (abs(point[0] - tokens), point[0]))[:3]
    return sum(
        value * prod((tokens - other) / (at - other) for other, _ in points if other != at) for at, value in points
    )


def validations(settings: ValidationSettings, total_steps: int) -> int:
    """How often samples are made."""
    every = settings.every_steps
    inside = 0 if every is None else total_steps // every
    ends_with_one = every is not None and total_steps % every == 0 and total_steps > 0
    return int(settings.at_start) + inside + int(settings.at_end and not ends_with_one)


def samples_each(settings: ValidationSettings) -> int:
    """Samples of one validation; at most, where prompts are taken from captions."""
    return (len(settings.prompts) or PROMPTS_TAKEN) * len(settings.seeds)
