"""A forecast in words: one line that says whether a run fits, and the page that `supertuner estimate` prints. Pure.

Every page says that its figures are modelled. Lines are plain text in columns, for terminals, pipes and run folders.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from supertuner.core.types import GIB, JSON, MIB, bytes_text
from supertuner.plan.forecast.model import Change, Fit, Forecast, Judged, Timing, room_text
from supertuner.plan.forecast.storage import together
from supertuner.sinks.figures import duration_text

CLASSES = (
    "frozen weights",
    "idle experts",
    "encoders",
    "trained weights",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "batch",
)
_SHORT = {
    "frozen weights": "frozen",
    "idle experts": "idle",
    "trained weights": "trained",
    "gradients": "gradients",
    "optimizer state": "state",
    "activations": "activations",
    "temporaries": "temporary",
    "batch": "batch",
}


def verdict(forecast: Forecast) -> str:
    """The one line: does it fit, by how much, how long does it take."""
    judged = forecast.judged
    planned = any(phase.name == judged.phase and phase.planned is not None for phase in forecast.phases)
    return "; ".join([_fit_text(judged, forecast.room.title, planned), *_time_text(forecast)])


def _fit_text(judged: Judged, machine: str, planned: bool) -> str:
    need, have = bytes_text(judged.need_bytes), judged.have_bytes
    at = f"{judged.phase} {'takes by its plan' if planned else 'needs'} {need}"
    if have is None or judged.spare_bytes is None:
        return f"modelled: {at} of {judged.where}, and how much {machine} has is not known"
    of = f"of {bytes_text(have)} {judged.where}"
    if judged.fit is Fit.DOES_NOT:
        return f"modelled: does not fit {machine}: {at} {of}, {bytes_text(-judged.spare_bytes)} too much"
    spare = f"{bytes_text(judged.spare_bytes)} to spare"
    if judged.fit is Fit.TIGHT:
        return f"modelled: fits {machine} tightly: {at} {of}, {spare}, and the driver's own share comes on top"
    return f"modelled: fits {machine}: {at} {of}, {spare}"


def _time_text(forecast: Forecast) -> Iterator[str]:
    if forecast.timing is None or forecast.judged.fit is Fit.DOES_NOT:
        return
    least = forecast.timing.paces[0]
    total = "" if least.total_s is None else f", the run at least {hours(least.total_s)}"
    yield f"a step takes at least {duration(least.step_s)}{total}"


def change_text(change: Change) -> str:
    """`train.gradient_checkpointing=true (41.2 GiB, ×1.33 time: each block's forward pass twice)`."""
    about = "" if change.exact else "about "
    size = "" if change.gpu_bytes is None else f"{about}{bytes_text(change.gpu_bytes)}, "
    time = "" if change.time is None else f"×{change.time:.2f} time, "
    return f"{change.what} ({size}{time}{change.price})"


def page(forecast: Forecast) -> list[str]:
    """Everything, for people."""
    lines = [
        f"{forecast.model}: {forecast.settings}",
        f"{room_text(forecast.room)} ({forecast.room.source})",
        "",
        verdict(forecast),
        "",
        *_phases(forecast),
        "",
        *_stored(forecast),
    ]
    lines += ["", *_timing(forecast.timing, forecast.why_no_timing, forecast.judged.fit is Fit.DOES_NOT)]
    if any(not plan.does_nothing for plan in forecast.plans.values()):
        lines += ["", *_plans(forecast)]
    if forecast.changes:
        heading = "what would make it fit" if forecast.judged.fit is Fit.DOES_NOT else "what would make it faster"
        lines += ["", *_changes(forecast.changes, heading)]
    notes = dict.fromkeys([*forecast.notes, *(note for phase in forecast.phases for note in phase.notes)])
    lines += ["", *(f"note: {note}" for note in notes), "modelled throughout: nothing here was measured on a GPU"]
    return lines


def _phases(forecast: Forecast) -> list[str]:
    """A table: phases down, classes across; in GiB, or in MiB where all is small."""
    shown = [name for name in CLASSES if any(phase.gpu.get(name) for phase in forecast.phases)]
    shown += sorted({name for phase in forecast.phases for name in phase.gpu if name not in CLASSES})
    most = max((phase.gpu_bytes for phase in forecast.phases), default=0)
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    where = "host" if forecast.room.on_cpu else "GPU"
    reserved = any(phase.reserved_bytes is not None for phase in forecast.phases)
    head = [f"{where} memory, {name}", "peak", *(["reserved"] if reserved else []), *(_SHORT.get(c, c) for c in shown)]
    rows = [head]
    for phase in forecast.phases:
        row = [phase.name + ("" if phase.certain else " *"), _number(sum(phase.gpu.values()), unit)]
        if reserved:
            row.append("" if phase.reserved_bytes is None else _number(phase.reserved_bytes, unit))
        rows.append(row + [_number(phase.gpu.get(one, 0), unit) for one in shown])
        if phase.plan is not None and phase.planned is not None and not phase.plan.does_nothing:
            rows.append(["  by its plan", _number(phase.planned.gpu_peak_bytes, unit)])
    certain = all(phase.certain for phase in forecast.phases)
    return [*columns(rows), *([] if certain else ["  * convolutions: what cuDNN takes for itself is not known here"])]


def _stored(forecast: Forecast) -> list[str]:
    rows = [["beside the GPU", "", "", ""]]
    rows += [[part.what, _size(part.nbytes), part.where, part.how] for part in forecast.stored]
    extra: dict[str, int] = {}
    for phase in forecast.phases:
        for what, nbytes in phase.host.items():
            extra[what] = max(extra.get(what, 0), nbytes)
    rows += [[what, _size(nbytes), "memory", ""] for what, nbytes in extra.items()]
    most = max((phase.host_bytes for phase in forecast.phases), default=0)
    for where, more in (("memory", most), ("disk", 0)):
        nbytes, whole = together(forecast.stored, "memory" if where == "memory" else "disk")
        least = "" if whole else "at least "
        rows.append([f"{where} together", least + bytes_text(nbytes + more), where, "at the fullest" if more else ""])
    return columns(rows, right={1})


def _timing(timing: Timing | None, why: str, missing: bool) -> list[str]:
    """Down what takes time, across how much of the machine's published rates kernels reach."""
    if timing is None:
        return [f"time: {why}"]
    paces = timing.paces
    rows = [["time, if it fitted" if missing else "time", *(_share(pace.compute_share) for pace in paces)]]
    plural = "es" if timing.micro_batches != 1 else ""
    of = f"a step of {timing.window} samples in {timing.micro_batches} micro-batch{plural}"
    rows.append([of, *(duration(pace.step_s) for pace in paces)])
    rows.append([f"its bound ({paces[0].bounded_by})", *(duration(pace.bound_s) for pace in paces)])
    rows.append(["samples a second", *(f"{timing.window / pace.step_s:.3g}" for pace in paces)])
    if timing.steps is not None and timing.samples is not None:
        grows = f", windows of {timing.first_window} to {timing.window}" if timing.first_window < timing.window else ""
        run = f"training: {timing.steps:,} steps, {timing.samples:,} samples{grows}"
        rows.append([run, *(_hours(pace.training_s) for pace in paces)])
        rows.append(["encoding for the caches", *(_hours(pace.encoding_s) for pace in paces)])
        rows.append(["samples at validations", *(_hours(pace.sampling_s) for pace in paces)])
        rows.append(["the machine, together", *(_hours(pace.total_s) for pace in paces)])
    return [*columns(rows), *(f"  not in it: {what}" for what in timing.left_out)]


def _share(share: float) -> str:
    return "at the peaks" if share == 1.0 else f"at {share:.0%} of them"


def _hours(seconds: float | None) -> str:
    return "not known" if seconds is None else hours(seconds) if seconds else "none"


def _plans(forecast: Forecast) -> list[str]:
    """Phases with the same plan share its lines."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for phase, plan in forecast.plans.items():
        alike.setdefault((plan.fits, plan.modelled, plan.reasons), []).append(phase)
    followed = any(phase.planned is not None for phase in forecast.phases)
    lines = ["where things live, by the plan that it follows" if followed else "where things would live, by a plan"]
    for (_, _, reasons), phases in alike.items():
        assert isinstance(reasons, tuple)
        lines += [f"  {', '.join(phases)}", *(f"    {reason}" for reason in reasons)]
    return lines


def _changes(changes: Sequence[Change], heading: str) -> list[str]:
    rows = [[heading, "GPU peak", "", "time", "price"]]
    for change in changes:
        size = "not known" if change.gpu_bytes is None else ("" if change.exact else "~") + bytes_text(change.gpu_bytes)
        time = "" if change.time is None else "as now" if abs(change.time - 1) < 0.005 else f"×{change.time:.2f}"
        rows.append([change.what, size, "fits" if change.fits else "", time, change.price])
    return columns(rows, right={1, 3})


def as_json(forecast: Forecast) -> dict[str, JSON]:
    """Everything, for programs. Bytes and seconds as they are; None is what is not known."""
    judged, room, timing = forecast.judged, forecast.room, forecast.timing
    machine = {"key": room.machine.key, "title": room.title, "gpu_bytes": room.gpu_bytes, "host_bytes": room.host_bytes}
    return {
        "modelled": True,
        "verdict": verdict(forecast),
        "fits": {Fit.FITS: True, Fit.TIGHT: True, Fit.DOES_NOT: False}.get(judged.fit),
        "judged": {**asdict(judged), "spare_bytes": judged.spare_bytes},
        "model": forecast.model,
        "settings": forecast.settings,
        "machine": {**machine, "one_pool": room.one_pool, "source": room.source},
        "phases": [{**asdict(one), "gpu_peak_bytes": one.gpu_bytes} for one in forecast.phases],
        "stored": [asdict(one) for one in forecast.stored],
        "timing": None if timing is None else asdict(timing),
        "total_s": None if timing is None else timing.paces[0].total_s,
        "why_no_timing": forecast.why_no_timing,
        "plans": {phase: _finite(asdict(plan)) for phase, plan in forecast.plans.items()},
        "changes": [asdict(one) for one in forecast.changes],
        "notes": list(forecast.notes),
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: the time of a plan that does not fit is None."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def duration(seconds: float) -> str:
    """`8.1 ms`, `0.4 s`, `3 min 20 s`, `2 h 05 min`."""
    return f"{seconds * 1000:.2g} ms" if seconds < 0.1 else duration_text(seconds)


def hours(seconds: float) -> str:
    """A run's time in hours, as machines are rented; short ones as they are."""
    return duration(seconds) if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def _number(nbytes: int, unit: int) -> str:
    """In a table of sizes: what is there and rounds to nothing is not shown as nothing."""
    return "-" if not nbytes else f"{nbytes / unit:.1f}" if nbytes >= 0.05 * unit else "<0.1"


def _size(nbytes: int | None) -> str:
    return "not known" if nbytes is None else bytes_text(nbytes)


def columns(rows: Sequence[Sequence[str]], right: Collection[int] | None = None) -> list[str]:
    """Aligned; the first row is the heading, the others are moved in. `right`: columns of numbers; None: all but the
    first."""
    count = max(len(row) for row in rows)
    cells = [[row[0] if number == 0 else f"  {row[0]}", *row[1:]] for number, row in enumerate(rows)]
    cells = [[*row, *[""] * (count - len(row))] for row in cells]
    # A heading of one cell, and a reason, may be longer than any cell: they make no column wider.
    widths = [max((len(row[at]) for row in cells if any(row[1:])), default=0) for at in range(count)]
    numbers = set(range(1, count)) if right is None else set(right)
    lines = []
    for row in cells:
        if not any(row[1:]):
            lines.append(row[0])
            continue
        padded = [
            cell.rjust(width) if at in numbers else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
