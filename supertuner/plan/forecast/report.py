"""A forecast as text: the page that `supertuner estimate` prints. Pure.

Every page says that its figures are modelled. Lines are plain text in columns, for terminals, pipes and run folders.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from supertuner.core.types import GIB, MIB, bytes_text
from supertuner.plan.forecast import results
from supertuner.plan.forecast.results import FitStatus, RunForecast, RunTiming, SuggestedChange
from supertuner.plan.forecast.storage import StorageLocation, total_storage
from supertuner.plan.placement.plan import PlanEstimate

COLUMN_HEADINGS = {
    "frozen weights": "frozen", "idle experts": "idle", "encoders": "encoders", "trained weights": "trained",
    "gradients": "gradients", "optimizer state": "state", "activations": "activations", "temporaries": "temporary",
    "batch": "batch",
}  # fmt: skip
"""Classes of tensors in the order of the table's columns."""


def change_text(change: SuggestedChange) -> str:
    """`train.gradient_checkpointing=true (41.2 GiB, ×1.33 time: each block's forward pass twice)`."""
    about = "" if change.exact else "about "
    size = "" if change.gpu_bytes is None else f"{about}{bytes_text(change.gpu_bytes)}, "
    time = "" if change.time is None else f"×{change.time:.2f} time, "
    return f"{change.what} ({size}{time}{change.price})"


def report_lines(forecast: RunForecast) -> list[str]:
    """The whole page."""
    does_not_fit = forecast.verdict.fit is FitStatus.DOES_NOT_FIT
    machine = f"{results.capacity_text(forecast.capacity)} ({forecast.capacity.source})"
    lines = [f"{forecast.model}: {forecast.settings}", machine, "", results.verdict_text(forecast)]
    lines += ["", *_phase_table(forecast), "", *_storage_table(forecast)]
    lines += ["", *_timing_table(forecast.timing, forecast.why_no_timing, does_not_fit)]
    if any(not plan.keeps_all_on_gpu for plan in forecast.plans.values()):
        lines += ["", *_plan_lines(forecast)]
    if forecast.changes:
        heading = f"changes that would make it {'fit' if does_not_fit else 'faster'}"
        lines += ["", *_change_table(forecast.changes, heading)]
    notes = dict.fromkeys([*forecast.notes, *(note for phase in forecast.phases for note in phase.notes)])
    lines += ["", *(f"note: {note}" for note in notes), "modelled throughout: nothing here was measured on a GPU"]
    return lines


def _phase_table(forecast: RunForecast) -> list[str]:
    """One row per phase, one column per class of tensor; in GiB, or in MiB if everything is below 1 GiB."""
    classes = [name for name in COLUMN_HEADINGS if any(phase.gpu.get(name) for phase in forecast.phases)]
    classes += sorted({name for phase in forecast.phases for name in phase.gpu if name not in COLUMN_HEADINGS})
    unit, unit_name = (GIB, "GiB") if forecast.peak_bytes >= GIB else (MIB, "MiB")
    where = "host" if forecast.capacity.on_cpu else "GPU"
    reserved = any(phase.reserved_bytes is not None for phase in forecast.phases)
    head = [f"{where} memory, {unit_name}", "peak", *(["reserved"] if reserved else [])]
    rows = [head + [COLUMN_HEADINGS.get(name, name) for name in classes]]
    for phase in forecast.phases:
        row = [phase.name + ("" if phase.certain else " *"), _size_cell(sum(phase.gpu.values()), unit)]
        if reserved:
            row.append("" if phase.reserved_bytes is None else _size_cell(phase.reserved_bytes, unit))
        rows.append(row + [_size_cell(phase.gpu.get(one, 0), unit) for one in classes])
        if phase.plan is not None and phase.plan_estimate is not None and not phase.plan.keeps_all_on_gpu:
            by_plan = [_size_cell(phase.allocated_bytes, unit), _size_cell(phase.gpu_bytes, unit)]
            rows.append(["  by its plan", *by_plan[: 2 if reserved else 1]])
    lines = align_columns(rows)
    if not all(phase.certain for phase in forecast.phases):
        lines.append("  * convolutions: the workspaces of cuDNN are not known without the GPU")
    return lines


def _storage_table(forecast: RunForecast) -> list[str]:
    rows = [["host memory and disk", "", "", ""]]
    rows += [[part.what, _size_text(part.nbytes), part.where, part.how] for part in forecast.stored]
    extra: dict[str, int] = {}
    for phase in forecast.phases:
        for what, nbytes in phase.host.items():
            extra[what] = max(extra.get(what, 0), nbytes)
    rows += [[what, _size_text(nbytes), "memory", ""] for what, nbytes in extra.items()]
    most = max((phase.host_bytes for phase in forecast.phases), default=0)
    totals: tuple[tuple[StorageLocation, int], ...] = (("memory", most), ("disk", 0))
    for where, more in totals:
        nbytes, is_complete = total_storage(forecast.stored, where)
        prefix = "" if is_complete else "at least "
        rows.append([f"{where} in total", prefix + bytes_text(nbytes + more), where, "at the peak" if more else ""])
    return align_columns(rows, right_aligned={1})


def _timing_table(timing: RunTiming | None, why_no_timing: str, does_not_fit: bool) -> list[str]:
    """One row per kind of work, one column per share of the machine's published rates that kernels reach."""
    if timing is None:
        return [f"time: {why_no_timing}"]
    paces = timing.paces
    shares = [pace.compute_share for pace in paces]
    headings = ("at peak rates" if share == 1.0 else f"at {share:.0%} of peak" for share in shares)
    rows = [["time, if it did fit" if does_not_fit else "time", *headings]]
    plural = "es" if timing.micro_batches != 1 else ""
    step_text = f"a step of {timing.window} samples in {timing.micro_batches} micro-batch{plural}"
    rows.append([step_text, *(results.step_duration_text(pace.step_s) for pace in paces)])
    rows.append([f"its bound ({paces[0].bounded_by})", *(results.step_duration_text(pace.bound_s) for pace in paces)])
    rows.append(["samples a second", *(f"{timing.window / pace.step_s:.3g}" for pace in paces)])
    if timing.steps is not None and timing.samples is not None:
        grows = f", windows of {timing.first_window} to {timing.window}" if timing.first_window < timing.window else ""
        run = f"training: {timing.steps:,} steps, {timing.samples:,} samples{grows}"
        rows.append([run, *(_duration_cell(pace.training_s) for pace in paces)])
        rows.append(["encoding for the caches", *(_duration_cell(pace.encoding_s) for pace in paces)])
        rows.append(["samples at validations", *(_duration_cell(pace.sampling_s) for pace in paces)])
        rows.append(["the whole run", *(_duration_cell(pace.total_s) for pace in paces)])
    return [*align_columns(rows), *(f"  not included: {what}" for what in timing.left_out)]


def _duration_cell(seconds: float | None) -> str:
    return "not known" if seconds is None else results.run_duration_text(seconds) if seconds else "none"


def _plan_lines(forecast: RunForecast) -> list[str]:
    """The reasons of each plan. Phases with the same plan are listed together."""
    phases_by_plan: dict[tuple[bool, PlanEstimate | None, tuple[str, ...]], list[str]] = {}
    for phase, plan in forecast.plans.items():
        phases_by_plan.setdefault((plan.fits, plan.modelled, plan.reasons), []).append(phase)
    followed = any(phase.plan_estimate is not None for phase in forecast.phases)
    lines = ["where things live, by the plan that the run follows" if followed else "where a plan would put things"]
    for (_, _, reasons), phases in phases_by_plan.items():
        lines += [f"  {', '.join(phases)}", *(f"    {reason}" for reason in reasons)]
    return lines


def _change_table(changes: Sequence[SuggestedChange], heading: str) -> list[str]:
    rows = [[heading, "GPU peak", "", "time", "price"]]
    for change in changes:
        size = "not known" if change.gpu_bytes is None else ("" if change.exact else "~") + bytes_text(change.gpu_bytes)
        time = "" if change.time is None else "as now" if abs(change.time - 1) < 0.005 else f"×{change.time:.2f}"
        rows.append([change.what, size, "fits" if change.fits else "", time, change.price])
    return align_columns(rows, right_aligned={1, 3})


def _size_cell(nbytes: int, unit: int) -> str:
    """A cell of a table of sizes. A size that rounds to 0.0 is shown as `<0.1`, not as nothing."""
    return "-" if not nbytes else f"{nbytes / unit:.1f}" if nbytes >= 0.05 * unit else "<0.1"


def _size_text(nbytes: int | None) -> str:
    return "not known" if nbytes is None else bytes_text(nbytes)


def align_columns(rows: Sequence[Sequence[str]], right_aligned: Collection[int] | None = None) -> list[str]:
    """Rows as aligned lines. The first row is the heading, the others are indented.

    `right_aligned`: numbers of the columns to align right; None: all but the first.
    """
    count = max(len(row) for row in rows)
    cells = [[row[0] if number == 0 else f"  {row[0]}", *row[1:]] for number, row in enumerate(rows)]
    cells = [[*row, *[""] * (count - len(row))] for row in cells]
    # A row with a single cell (a heading, a reason) does not widen its column: it has the line for itself.
    widths = [max((len(row[at]) for row in cells if any(row[1:])), default=0) for at in range(count)]
    numbers = set(range(1, count)) if right_aligned is None else set(right_aligned)
    lines = []
    for row in cells:
        if not any(row[1:]):
            lines.append(row[0])
            continue
        padded = [cell.rjust(widths[at]) if at in numbers else cell.ljust(widths[at]) for at, cell in enumerate(row)]
        lines.append("  ".join(padded).rstrip())
    return lines
