"""The peak memory of each phase of a run, by class of tensor: encoding, training of each expert, sampling."""

from __future__ import annotations

from dataclasses import replace

from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan import sample_requests as sample_plan
from supertuner.plan.forecast.results import PhaseForecast
from supertuner.plan.forecast.run_model import ExpertForecast, RunModel
from supertuner.plan.forecast.timeline import IDLE_EXPERTS
from supertuner.plan.trace.caching_allocator import simulate_allocator
from supertuner.plan.trace.execution_trace import ExecutionTrace, TensorKind

ENCODERS = "encoders"
WAITING_EXPERT = "the expert that waits"
"""A key of `RunForecast.to_dict`."""


def forecast_phases(run: RunModel) -> tuple[PhaseForecast, ...]:
    """The phases in the order of the run. Encoders run one after the other, before a denoiser is loaded."""
    text = _phase_at_peak(run, run.traces.text_trace())
    media = _phase_at_peak(run, run.traces.media_trace(run.largest_bucket), certain=False)
    settings = run.config.validation
    makes_samples = settings.at_start or settings.at_end or settings.every_steps is not None
    training = (_training_phase(run, one) for one in run.experts)
    return (text, media, *training, *([_sampling_phase(run)] if makes_samples else []))


def validation_bucket(run: RunModel) -> Bucket:
    """The size of validation samples: `validation.width`, `height` and `frames`, or that of the largest bucket."""
    settings = run.config.validation
    size = sample_plan.largest_sample_size(run.buckets)
    width, height = settings.width or size.width, settings.height or size.height
    frames = settings.frames or size.frames
    kind = MediaKind.VIDEO if frames > 1 else MediaKind.IMAGE
    return Bucket(kind, width, height, frames, channels=3)


def _training_phase(run: RunModel, training: ExpertForecast) -> PhaseForecast:
    certain, table = not run.traces.is_convolutional(training.expert), training.steps.table
    phase = _phase_at_peak(run, training.trace, idle_bytes=table.idle_bytes, certain=certain)
    if run.micro_batches > 1:
        gradients, label = sum(block.gradient_bytes for block in table.blocks), TensorKind.GRADIENT.label
        phase = _add_bytes(phase, label, max(0, gradients - phase.gpu.get(label, 0)))
    return replace(_add_bytes(phase, ENCODERS, run.encoder_bytes), plan=training.steps.plan)


def _sampling_phase(run: RunModel) -> PhaseForecast:
    """At a validation everything is on the GPU at once, except an expert that the plan keeps in host memory."""
    phase = _phase_at_peak(run, run.traces.sampling_trace(validation_bucket(run)), certain=False)
    plans = [one.steps.plan for one in run.experts if one.steps.plan is not None]
    if not any(plan.idle_at_home for plan in plans):
        return phase
    idle_bytes, label = min(one.steps.table.idle_bytes for one in run.experts), TensorKind.FROZEN.label
    return replace(_add_bytes(phase, label, -min(idle_bytes, phase.gpu[label])), host={WAITING_EXPERT: idle_bytes})


def _add_bytes(phase: PhaseForecast, class_name: str, nbytes: int) -> PhaseForecast:
    """The phase with `nbytes` more of a class."""
    if not nbytes:
        return phase
    gpu = {**phase.gpu, class_name: phase.gpu.get(class_name, 0) + nbytes}
    reserved = phase.reserved_bytes
    return replace(phase, gpu=gpu, reserved_bytes=None if reserved is None else reserved + nbytes)


def _phase_at_peak(run: RunModel, trace: ExecutionTrace, *, idle_bytes: int = 0, certain: bool = True) -> PhaseForecast:
    """The phase at its peak, and what the caching allocator reserves for it within the GPU's memory.

    If that does not fit, the reservation without a limit is reported.
    """
    live_bytes = trace.live_bytes_by_kind(trace.peak()[1])
    by_class = {**{kind.label: nbytes for kind, nbytes in live_bytes.items()}, IDLE_EXPERTS: idle_bytes}
    gpu = {name: nbytes for name, nbytes in by_class.items() if nbytes}
    notes, reserved_bytes = trace.notes, None
    if not run.capacity.on_cpu:
        gpu_bytes = run.capacity.gpu_bytes
        peaks = simulate_allocator(trace, limit_bytes=None if gpu_bytes is None else max(0, gpu_bytes - idle_bytes))
        if not peaks.fits:
            peaks = simulate_allocator(trace)
        elif peaks.retries:
            notes += (f"{trace.phase}: the allocator releases cached memory {peaks.retries} times to fit",)
        reserved_bytes = peaks.reserved_bytes + idle_bytes
    return PhaseForecast(trace.phase, gpu, reserved_bytes, notes=notes, certain=certain)
