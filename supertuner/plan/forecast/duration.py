"""The length of a run from the times of its parts: windows of growing size, validations, mean steps. Pure arithmetic.

The time of a step on a machine comes from `timing.py`. Disks, decoding and the start of a machine are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from supertuner.config.settings.run_config import RunConfig
from supertuner.config.settings.validation import ValidationSettings
from supertuner.optim.schedule import TrainingSchedule, accumulation_steps
from supertuner.plan.sample_requests import PROMPTS_FROM_CAPTIONS


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a window of an expert: for each micro-batch, and once for the update."""

    micro_batch_s: float
    update_s: float

    def window_s(self, micro_batches: float) -> float:
        return micro_batches * self.micro_batch_s + self.update_s


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The windows of one size in a run."""

    samples: int
    count: int
    micro_batches: int
    """Micro-batches per process if all samples of a window have one shape; more otherwise."""


def group_windows(schedule: TrainingSchedule, batch_size: int) -> tuple[WindowGroup, ...]:
    """The run's windows by size, in order; the last one may be short."""
    steps = schedule.total_steps
    last_samples = len(schedule.window_at(steps - 1)) if steps else 0
    counts: list[tuple[int, int]] = []  # (samples, windows)
    for span, end in zip(schedule.spans, [*(after.first_step for after in schedule.spans[1:]), steps], strict=True):
        has_short_last = span.first_step < steps <= end and last_samples < span.window_size
        counts.append((span.window_size, min(end, steps) - span.first_step - has_short_last))
        counts.append((last_samples, int(has_short_last)))
    filled = [(samples, count) for samples, count in counts if count > 0]
    return tuple(WindowGroup(size, count, accumulation_steps(size, batch_size, 1)) for size, count in filled)


def largest_window_micro_batches(config: RunConfig, schedule: TrainingSchedule | None) -> int:
    """Micro-batches of the largest window of the run."""
    if schedule is None:
        return config.train.gradient_accumulation_steps
    return max((one.micro_batches for one in group_windows(schedule, config.train.batch_size)), default=1)


def training_seconds(window_groups: Sequence[WindowGroup], expert_times: Sequence[StepTime]) -> float:
    """The time of all windows. Experts alternate, so each trains its share of every window size."""

    def mean_window_s(group: WindowGroup) -> float:
        return sum(time.window_s(group.micro_batches) for time in expert_times) / len(expert_times)

    return sum(group.count * mean_window_s(group) for group in window_groups)


def mean_step_time(times: Sequence[StepTime], shares: Sequence[float]) -> StepTime:
    """The mean over batches of several shapes, weighted by their shares of the draws."""
    total_share = sum(shares)
    micro = sum(time.micro_batch_s * share for time, share in zip(times, shares, strict=True)) / total_share
    return StepTime(micro, max(time.update_s for time in times))


def interpolate_by_tokens(seconds_by_tokens: Mapping[int, float], tokens: int) -> float:
    """The time of a micro-batch with this many tokens, interpolated from known ones.

    Work is a polynomial of degree 2 in the number of tokens: linear layers contribute degree 1, attention degree 2. The
    Lagrange polynomial through the three nearest sizes is exact; with two sizes, 0 tokens in 0 seconds is the third;
    with one size the time is proportional. Sizes outside the known range are extrapolated.
    """
    points = sorted(seconds_by_tokens.items())
    if tokens in seconds_by_tokens:
        return seconds_by_tokens[tokens]
    if len(points) == 1:
        return points[0][1] * tokens / points[0][0]
    points = points if len(points) >= 3 else [(0, 0.0), *points]
    points = sorted(points, key=lambda point: (abs(point[0] - tokens), point[0]))[:3]
    others = {at: [other for other, _ in points if other != at] for at, _ in points}
    return sum(value * prod((tokens - other) / (at - other) for other in others[at]) for at, value in points)


def validation_count(settings: ValidationSettings, total_steps: int) -> int:
    """Number of validations in a run of this many steps. The last step's counts once, not again as `at_end`."""
    every = settings.every_steps
    during_training = 0 if every is None else total_steps // every
    ends_with_one = every is not None and total_steps % every == 0 and total_steps > 0
    return int(settings.at_start) + during_training + int(settings.at_end and not ends_with_one)


def samples_per_validation(settings: ValidationSettings) -> int:
    """Samples of one validation; an upper limit if the prompts are taken from captions."""
    return (len(settings.prompts) or PROMPTS_FROM_CAPTIONS) * len(settings.seeds)
