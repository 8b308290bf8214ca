"""Why the search of `supertuner init` chose what it chose, from the figures of its forecasts. Pure."""

from __future__ import annotations

from supertuner.core.types import bytes_text
from supertuner.plan.forecast.results import FitStatus, RunForecast
from supertuner.tools.init.search import (
    ACCUMULATION,
    BASE_WEIGHTS,
    BATCH,
    CHECKPOINTING,
    SIZE_SETTINGS,
    SettingsTrial,
    predicted_bytes,
    training_phases,
)
from supertuner.tools.init.settings import ChosenSetting


def search_reasons(chosen: SettingsTrial, trials: list[SettingsTrial]) -> list[ChosenSetting]:
    """The settings that the search decided, and the plan, with reasons."""
    settings = [ChosenSetting(name, value, _reason(name, chosen, trials)) for name, value in chosen.settings.items()]
    return [*settings, ChosenSetting("plan.act", "auto", _plan_reason(chosen.forecast))]


def _reason(name: str, chosen: SettingsTrial, trials: list[SettingsTrial]) -> str:
    reasons = {BATCH: _batch_reason, CHECKPOINTING: _checkpointing_reason, BASE_WEIGHTS: _weights_reason}
    if name in reasons:
        return reasons[name](chosen, trials)
    if name == ACCUMULATION:
        return "micro-batches per optimizer step"
    what = "smaller than your files" if name in SIZE_SETTINGS else "no samples during training"
    return f"{what}: {_shortage(trials, chosen)}"


def _batch_reason(chosen: SettingsTrial, trials: list[SettingsTrial]) -> str:
    batch, window = chosen.settings.get(BATCH), chosen.settings.get(ACCUMULATION)
    need = f"a step takes {_training_text(chosen.forecast)}, modelled"
    if window == 1:
        return f"{need}; larger batches would also enlarge the optimizer step"
    next_batch = 2 * batch if isinstance(batch, int) else 2
    smallest = trials[0].forecast
    predicted = max(predicted_bytes(phase, next_batch) for phase in training_phases(smallest))
    if not chosen.keeps_activations:
        return f"{need}; the smallest batch, because activations are not all kept"
    return f"{need}; a batch of {next_batch} would take about {bytes_text(predicted)} with all activations kept"


def _checkpointing_reason(chosen: SettingsTrial, trials: list[SettingsTrial]) -> str:
    kept = max(phase.all_on_gpu_bytes for phase in training_phases(trials[0].forecast))
    if not chosen.settings.get(CHECKPOINTING):
        return "memory suffices to keep all activations, which is fastest"
    return (
        f"with all weights and activations on the GPU, a step would take {bytes_text(kept)}, modelled; a plan decides "
        "for each block whether it is recomputed, and without a plan all blocks are"
    )


def _weights_reason(chosen: SettingsTrial, trials: list[SettingsTrial]) -> str:
    if chosen.settings.get(BASE_WEIGHTS) != "int8":
        return "16 bits fit; 8 bits would be slower and slightly less precise"
    return f"8 bits, because with 16 bits {_shortage(trials, chosen, BASE_WEIGHTS)}"


def _shortage(trials: list[SettingsTrial], chosen: SettingsTrial, name: str | None = None) -> str:
    """What the forecast before `chosen` lacked; with `name`, the last forecast with another value of that setting."""
    before = [
        one for one in trials[: trials.index(chosen)] if name is None or one.settings.get(name) != chosen.settings[name]
    ]
    verdict = before[-1].forecast.verdict
    have = bytes_text(verdict.have_bytes or 0)
    fit = "only just fits" if verdict.fit is FitStatus.TIGHT else "does not fit"
    return f"{verdict.phase} {fit}: {bytes_text(verdict.need_bytes)} of {have} {verdict.where}, modelled"


def _training_text(forecast: RunForecast) -> str:
    fullest = max(training_phases(forecast), key=lambda phase: phase.gpu_bytes)
    limit = forecast.capacity.host_bytes if forecast.capacity.on_cpu else forecast.capacity.gpu_limit_bytes
    of = "" if limit is None else f" of {bytes_text(limit)}"
    return f"{bytes_text(fullest.gpu_bytes)}{of}"


def _plan_reason(forecast: RunForecast) -> str:
    """What the plan does, in the planner's own words."""
    followed = [phase.plan for phase in forecast.phases if phase.plan_estimate is not None and phase.plan is not None]
    moving = dict.fromkeys(plan.reasons for plan in followed if not plan.keeps_all_on_gpu)
    lines = [f"- {reason}" for reasons in moving for reason in reasons]
    if not lines:
        return "the plan moves nothing between GPU and host memory on this machine"
    return "\n".join(["what the plan does on this machine, modelled:", *lines])
