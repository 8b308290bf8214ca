"""The peak memory of each phase of a run, by class of tensor: encoding, loading, training of each expert, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan import sample_requests as sample_plan
from supertuner.plan.forecast.loading_memory import (
    LOADED_COPIES,
    UNKNOWN_FILES,
    encoder_host_bytes,
    expert_loading,
    with_loading_host_bytes,
)
from supertuner.plan.forecast.results import ENCODERS, PhaseForecast
from supertuner.plan.forecast.run_model import ExpertForecast, RunModel
from supertuner.plan.forecast.timeline import IDLE_EXPERTS
from supertuner.plan.trace.caching_allocator import simulate_allocator
from supertuner.plan.trace.execution_trace import ExecutionTrace, TensorKind
from supertuner.plan.trace.loading_phase import LOADING

WAITING_EXPERT = "the expert that waits"
"""A key of `RunForecast.to_dict`."""


def forecast_phases(run: RunModel) -> tuple[PhaseForecast, ...]:
    """The phases in the order of the run. Encoders run one after the other, before a denoiser is loaded."""
    text_trace, media_trace = run.traces.text_trace(), run.traces.media_trace(run.largest_bucket)
    loading_text = encoder_host_bytes(run, "text_encoder", text_trace)
    loading_vae = encoder_host_bytes(run, "vae", media_trace)
    text = with_loading_host_bytes(_phase_at_peak(run, text_trace), loading_text)
    media = with_loading_host_bytes(_phase_at_peak(run, media_trace, certain=False), loading_vae)
    settings = run.config.validation
    makes_samples = settings.at_start or settings.at_end or settings.every_steps is not None
    training = (_training_phase(run, one) for one in run.experts)
    phases = (text, media, _loading_phase(run), *training)
    if not makes_samples:
        return phases
    return (*phases, with_loading_host_bytes(_sampling_phase(run), max(loading_text, loading_vae)))


def validation_bucket(run: RunModel) -> Bucket:
    """The size of validation samples: `validation.width`, `height` and `frames`, or that of the largest bucket."""
    settings = run.config.validation
    size = sample_plan.largest_sample_size(run.buckets)
    width, height = settings.width or size.width, settings.height or size.height
    frames = settings.frames or size.frames
    kind = MediaKind.VIDEO if frames > 1 else MediaKind.IMAGE
    return Bucket(kind, width, height, frames, channels=3)


def _loading_phase(run: RunModel) -> PhaseForecast:
    """Experts are loaded one after the other; each stays in the memory where its plan wants it."""
    fullest = PhaseForecast(LOADING, {}, None if run.capacity.on_cpu else 0)
    host_bytes = gpu_resident = host_resident = 0
    experts = [expert_loading(run, one) for one in run.experts]
    for one in experts:
        if one.to_host:
            host_bytes = max(host_bytes, host_resident + one.bytes_in_one_memory)
            host_resident += one.resident_bytes
            continue
        more = {IDLE_EXPERTS: gpu_resident, LOADED_COPIES: one.host_bytes_in_pool if run.capacity.on_cpu else 0}
        phase = _phase_at_peak(run, one.trace, more, windows=1)
        fullest = max(fullest, phase, key=lambda one: one.all_on_gpu_bytes)
        gpu_resident += one.resident_bytes
        if not run.capacity.on_cpu:
            on_host = one.host_bytes_in_pool if run.capacity.one_pool else one.host_bytes_to_gpu
            host_bytes = max(host_bytes, host_resident + on_host)
    notes = () if all(one.files_here for one in experts) else (UNKNOWN_FILES,)
    return with_loading_host_bytes(replace(fullest, notes=(*fullest.notes, *notes)), host_bytes)


def _training_phase(run: RunModel, training: ExpertForecast) -> PhaseForecast:
    table, more = training.steps.table, {IDLE_EXPERTS: training.steps.table.idle_bytes, ENCODERS: run.encoder_bytes}
    if run.micro_batches > 1:  # gradients of earlier micro-batches, which a trace of one micro-batch does not have
        at_peak = training.trace.live_bytes_by_kind(training.trace.peak()[1])[TensorKind.GRADIENT]
        more[TensorKind.GRADIENT.label] = max(0, sum(block.gradient_bytes for block in table.blocks) - at_peak)
    phase = _phase_at_peak(run, training.trace, more, certain=not run.traces.is_convolutional(training.expert))
    return replace(phase, plan=training.steps.plan)


def _sampling_phase(run: RunModel) -> PhaseForecast:
    """At a validation everything is on the GPU at once, except an expert that the plan keeps in host memory."""
    phase = _phase_at_peak(run, run.traces.sampling_trace(validation_bucket(run)), certain=False)
    plans = [one.steps.plan for one in run.experts if one.steps.plan is not None]
    if not any(plan.idle_at_home for plan in plans):
        return phase
    label = TensorKind.FROZEN.label
    idle_bytes = min(*(one.steps.table.idle_bytes for one in run.experts), phase.gpu[label])
    reserved = None if phase.reserved_bytes is None else phase.reserved_bytes - idle_bytes
    gpu = {**phase.gpu, label: phase.gpu[label] - idle_bytes}
    return replace(phase, gpu=gpu, reserved_bytes=reserved, host={WAITING_EXPERT: idle_bytes})


def _phase_at_peak(
    run: RunModel,
    trace: ExecutionTrace,
    more: Mapping[str, int] | None = None,
    *,
    certain: bool = True,
    windows: int = 2,
) -> PhaseForecast:
    """The phase at its peak, and what the caching allocator reserves for it within the GPU's memory.

    If that does not fit, the reservation without a limit is reported. `more`: bytes by class that are on the GPU
    beside those of the trace. `windows`: how often the trace is repeated.
    """
    more = more or {}
    by_class = {kind.label: nbytes for kind, nbytes in trace.live_bytes_by_kind(trace.peak()[1]).items()}
    gpu = {name: by_class.get(name, 0) + more.get(name, 0) for name in (*by_class, *(more.keys() - by_class.keys()))}
    notes, reserved_bytes, beside = trace.notes, None, sum(more.values())
    if not run.capacity.on_cpu:
        limit = run.capacity.gpu_limit_bytes
        if limit is not None:
            limit = max(0, limit - run.stored_bytes_in_pool - beside)
        peaks = simulate_allocator(trace, limit_bytes=limit, windows=windows)
        if not peaks.fits:
            peaks = simulate_allocator(trace, windows=windows)
        elif peaks.retries:
            notes += (f"{trace.phase}: the allocator releases cached memory {peaks.retries} times to fit",)
        reserved_bytes = peaks.reserved_bytes + beside
    gpu = {name: nbytes for name, nbytes in gpu.items() if nbytes}
    return PhaseForecast(trace.phase, gpu, reserved_bytes, notes=notes, certain=certain)
