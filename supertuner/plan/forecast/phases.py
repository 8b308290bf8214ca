"""The memory of each phase of a known run, by class, at its fullest moment: encoding, training, samples."""

from __future__ import annotations

from dataclasses import replace

from supertuner.core.types import MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan import sample_requests as sample_plan
from supertuner.plan.forecast.model import Phase
from supertuner.plan.forecast.run_model import Expertise, KnownRun
from supertuner.plan.placement.timeline import IDLE
from supertuner.plan.trace.caching_allocator import reserved
from supertuner.plan.trace.record import Kind, Trace

ENCODERS = "encoders"
WAITING = "the expert that waits"


def phases(run: KnownRun) -> tuple[Phase, ...]:
    """In the order of the run. Encoders come one after the other, before any denoiser is loaded."""
    found = [_phase(run, run.tracing.text()), _phase(run, run.tracing.media(run.largest), certain=False)]
    found += [_training(run, one) for one in run.experts]
    if validates(run):
        found.append(_sampling(run))
    return tuple(found)


def validates(run: KnownRun) -> bool:
    settings = run.config.validation
    return settings.at_start or settings.at_end or settings.every_steps is not None


def sample_size(run: KnownRun) -> Bucket:
    """As validation says, and where it does not, that of the bucket with the most pixels."""
    settings = run.config.validation
    size = sample_plan.largest(run.buckets)
    width, height = settings.width or size.width, settings.height or size.height
    frames = settings.frames or size.frames
    kind = MediaKind.VIDEO if frames > 1 else MediaKind.IMAGE
    return Bucket(kind, width, height, frames, channels=3)


def _training(run: KnownRun, one: Expertise) -> Phase:
    certain = not run.tracing.convolves(one.expert)
    phase = _phase(run, one.traced, idle_bytes=one.steps.table.idle_bytes, certain=certain)
    if run.micro_batches > 1:
        gradients = sum(block.gradient_bytes for block in one.steps.table.blocks)
        phase = _more(phase, Kind.GRADIENT.text, max(0, gradients - phase.gpu.get(Kind.GRADIENT.text, 0)))
    return replace(_more(phase, ENCODERS, run.encoder_bytes), plan=one.steps.plan)


def _sampling(run: KnownRun) -> Phase:
    """At a validation everything is on the GPU at once, but for an expert that waits in host memory by the plan."""
    phase = _phase(run, run.tracing.sampling(sample_size(run)).trace, certain=False)
    plans = [one.steps.plan for one in run.experts if one.steps.plan is not None]
    if not any(plan.idle_at_home for plan in plans):
        return phase
    waits = min(one.steps.table.idle_bytes for one in run.experts)
    return replace(_more(phase, Kind.FROZEN.text, -min(waits, phase.gpu[Kind.FROZEN.text])), host={WAITING: waits})


def _more(phase: Phase, name: str, nbytes: int) -> Phase:
    """The phase with so much more of a class."""
    if not nbytes:
        return phase
    taken = None if phase.reserved_bytes is None else phase.reserved_bytes + nbytes
    return replace(phase, gpu={**phase.gpu, name: phase.gpu.get(name, 0) + nbytes}, reserved_bytes=taken)


def _phase(run: KnownRun, trace: Trace, *, idle_bytes: int = 0, certain: bool = True) -> Phase:
    """At its fullest moment; and what the allocator has of the GPU by then, giving back what it can if it must."""
    at = trace.by_kind(trace.peak()[1])
    gpu = {kind.text: nbytes for kind, nbytes in at.items() if nbytes} | ({IDLE: idle_bytes} if idle_bytes else {})
    notes, taken = trace.notes, None
    if not run.room.on_cpu:
        has = run.room.gpu_bytes
        found = reserved(trace, limit_bytes=None if has is None else max(0, has - idle_bytes))
        if not found.fits:
            found = reserved(trace)
        elif found.retries:
            notes = (*notes, f"{trace.phase}: the allocator gives memory back {found.retries} times to find room")
        taken = found.reserved_bytes + idle_bytes
    return Phase(trace.phase, gpu, taken, notes=notes, certain=certain)
