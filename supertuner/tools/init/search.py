"""The search of `supertuner init`: forecasts of a few settings, from the best to the cheapest; the first that fits.

    1  batches of 1 sample, activations kept, 16-bit weights     fits: the largest batch that still keeps them
    2  the same with gradient checkpointing, or a plan that recomputes, streams or offloads
    3  8-bit base weights as well
    4  smaller samples as well: what the forecast of 3 suggests
    5  1 to 4 without samples during training, if only these do not fit: they need encoders and denoisers together

The number of samples per optimizer step is always the same. Pure, but for `forecast`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from supertuner.config.settings.values import parse_text
from supertuner.core.types import JSON
from supertuner.plan.forecast.results import TIGHT_SHARE, FitStatus, PhaseForecast, RunForecast, judge_phase
from supertuner.plan.forecast.storage import total_storage
from supertuner.plan.placement.plan import ActivationPolicy, MemoryPlan, OptimizerPlacement, WeightPlacement

SettingValues: TypeAlias = Mapping[str, JSON]
"""Path of a setting → its value."""
BATCH, ACCUMULATION = "train.batch_size", "train.gradient_accumulation_steps"
CHECKPOINTING, BASE_WEIGHTS = "train.gradient_checkpointing", "model.base_weights"
NO_SAMPLES: SettingValues = {"validation.at_end": False, "validation.every_steps": None}
SIZE_SETTINGS = ("datasets[0].resolution", "datasets[0].frames")
PER_SAMPLE_CLASSES = ("activations", "temporaries", "batch")
"""Classes of tensors that grow with the batch."""


@dataclass(frozen=True, eq=False, slots=True)
class SettingsTrial:
    """Settings and their forecast."""

    settings: SettingValues
    forecast: RunForecast

    @property
    def fits(self) -> bool:
        return self.forecast.verdict.fit is FitStatus.FITS

    @property
    def keeps_activations(self) -> bool:
        """It fits, and nothing is recomputed or streamed: a step costs no more time than it must."""
        plans = [phase.plan for phase in self.forecast.phases if phase.plan_estimate is not None and phase.plan]
        return self.fits and all(_computes_once(plan) for plan in plans)


def search_settings(
    forecast: Callable[[SettingValues], RunForecast], window: int, given: Collection[str]
) -> tuple[SettingsTrial | None, list[SettingsTrial]]:
    """The first settings that fit, or None, and everything that was forecast.

    `window` is the number of samples per optimizer step, unless the user gives a batch size. Settings in `given` are
    the user's, and are not changed.
    """
    trials: list[SettingsTrial] = []

    def trial(settings: SettingValues) -> SettingsTrial:
        free = {name: value for name, value in settings.items() if name not in given}
        trials.append(SettingsTrial(free, forecast(free)))
        return trials[-1]

    window = 1 if BATCH in given else window
    base: SettingValues = {BASE_WEIGHTS: "as_computed", CHECKPOINTING: False, BATCH: 1, ACCUMULATION: window}
    smallest = trial(base)
    if smallest.keeps_activations:
        for batch in _larger_batches(smallest.forecast, window):
            if (larger := trial({**base, BATCH: batch, ACCUMULATION: window // batch})).keeps_activations:
                return larger, trials
        return smallest, trials
    checkpointed = {**base, CHECKPOINTING: True}
    for weights in ("as_computed", "int8"):
        if (last := trial({**checkpointed, BASE_WEIGHTS: weights})).fits:
            return last, trials
    for size in _smaller_samples(last.forecast, given):
        if (last := trial({**checkpointed, BASE_WEIGHTS: "int8", **size})).fits:
            return last, trials
    for one in [one for one in trials if _only_samples_lack_memory(one.forecast)]:
        if (last := trial({**one.settings, **NO_SAMPLES})).fits:
            return last, trials
    # "Fits tightly" is better than nothing: the best of these, in the order of the search.
    return next((one for one in trials if one.forecast.fits), None), trials


def _larger_batches(forecast: RunForecast, window: int) -> list[int]:
    """Batches that divide the window, largest first, and fit if activations grow in proportion to the batch. A trace of
    one that does not fit would take seconds for nothing."""
    limit = forecast.capacity.host_bytes if forecast.capacity.on_cpu else forecast.capacity.gpu_limit_bytes

    def is_likely(batch: int) -> bool:
        needs = [predicted_bytes(phase, batch) for phase in training_phases(forecast)]
        return limit is not None and max(needs) <= TIGHT_SHARE * limit

    return [batch for batch in range(window, 1, -1) if window % batch == 0 and is_likely(batch)]


def _smaller_samples(forecast: RunForecast, given: Collection[str]) -> list[SettingValues]:
    """Changes of resolution or frames that fit according to the forecast's own suggestions."""
    changes = [change.what.partition("=") for change in forecast.changes if change.fits]
    return [{name: parse_text(value)} for name, _, value in changes if name in SIZE_SETTINGS and name not in given]


def _only_samples_lack_memory(forecast: RunForecast) -> bool:
    """Whether every phase fits but the last one, which generates samples."""
    stored = total_storage(forecast.stored, "memory")[0]

    def has_room(phase: PhaseForecast) -> bool:
        verdicts = judge_phase(phase, forecast.capacity, stored)
        return all(verdict.fit is not FitStatus.DOES_NOT_FIT for verdict in verdicts)

    *others, last = forecast.phases
    return last not in training_phases(forecast) and not has_room(last) and all(map(has_room, others))


def _computes_once(plan: MemoryPlan) -> bool:
    """Idle experts may wait in host memory: that costs milliseconds for each switch."""
    return plan.stepping is OptimizerPlacement.GPU and all(
        block.weights is WeightPlacement.GPU and block.activations is ActivationPolicy.KEEP for block in plan.blocks
    )


def training_phases(forecast: RunForecast) -> list[PhaseForecast]:
    return [phase for phase in forecast.phases if phase.name.startswith("train ")]


def predicted_bytes(phase: PhaseForecast, batch: int) -> int:
    """The peak of a phase, whose forecast is for a batch of 1, with a larger batch."""
    return phase.gpu_bytes + (batch - 1) * sum(phase.gpu.get(name, 0) for name in PER_SAMPLE_CLASSES)
