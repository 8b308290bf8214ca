"""A baseline as a Markdown report: measured figures first, then settings, machine and versions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from supertuner.core.types import JSON
from supertuner.sinks.jsonlines import readable_time
from supertuner.tools.baseline.confidence_interval import quantile
from supertuner.tools.baseline.loss_comparison import compare_losses
from supertuner.tools.baseline.record import MeasuredJob
from supertuner.tools.baseline.store import Baseline
from supertuner.tools.baseline.tables import format_amount, markdown_table

LOSSES_SHOWN = 5


def baseline_report(baseline: Baseline, files: Sequence[str] = ()) -> str:
    """The whole report; `files` are the additional files in the baseline's folder."""
    return "\n".join([*baseline_summary(baseline), *_details(baseline, files)]) + "\n"


def baseline_summary(baseline: Baseline) -> list[str]:
    """The measured figures: the part that the console shows."""
    count, when = len(baseline.jobs), readable_time(baseline.captured_at)
    title = f"{count} × {baseline.steps:,} steps" if count > 1 else f"{baseline.steps:,} steps, once"
    return [
        f"# Baseline {baseline.name}",
        "",
        f"{title}, captured {when}: {machine_text(baseline.machine)}; {code_text(baseline)}.",
        "",
        *markdown_table(["figure", "median", "lowest", "highest"], list(_figure_rows(baseline))),
        "",
        _losses_line(baseline),
        *(_unique_memory_lines(line for job in baseline.jobs for line in job.memory)),
    ]


def machine_text(machine: Mapping[str, JSON]) -> str:
    gpus = machine.get("gpus")
    names = [str(name) for name in gpus] if isinstance(gpus, Sequence) and not isinstance(gpus, str) else []
    cpu = machine.get("cpu") or machine.get("arch") or "an unknown CPU"
    return f"{', '.join(names) or 'no GPU'}; {machine.get('cpus')} CPUs ({cpu})"


def code_text(baseline: Baseline) -> str:
    version = baseline.jobs[0].versions.get("supertuner", "?")
    if baseline.commit is None:
        return f"SuperTuner {version}"
    changed = ", with uncommitted changes" if baseline.commit.endswith("+") else ""
    return f"SuperTuner {version} at {baseline.commit[:10]}{changed}"


def _figure_rows(baseline: Baseline) -> Iterator[list[str]]:
    jobs = baseline.jobs

    def row(name: str, unit: str, of: Callable[[MeasuredJob], float]) -> list[str]:
        values = [of(job) for job in jobs]
        return [name, *(format_amount(value, unit) for value in (statistics.median(values), min(values), max(values)))]

    def steps(share: float) -> Callable[[MeasuredJob], float]:
        return lambda job: quantile([step.seconds for step in job.steps[1:] or job.steps], share)

    yield row("throughput", "samples/s", lambda job: job.samples_per_s)
    yield row("step, median", "s", steps(0.5))
    for share in (0.1, 0.9, 0.99):
        yield row(f"step, {100 * share:.0f}th percentile", "s", steps(share))
    yield row("step, longest", "s", steps(1.0))
    yield row("share of a step spent waiting for data", "%", lambda job: 100 * data_wait_share(job))
    for cold in (False, True):
        starts = [job.start.first_step_s for job in jobs if job.start.cold is cold]
        if starts:
            name = "start, with data encoding" if cold else "start, data ready"
            yield [
                name,
                *(format_amount(value, "s") for value in (statistics.median(starts), min(starts), max(starts))),
            ]
    if baseline.cold_start_s is not None:
        yield ["start, preparation run", format_amount(baseline.cold_start_s, "s"), "–", "–"]
    kinds = dict.fromkeys(kind for job in jobs for kind in job.peaks)
    for kind in sorted(kinds, key=lambda kind: -max(job.peaks.get(kind, 0) for job in jobs)):
        yield row(f"peak {kind}", "bytes", lambda job, kind=kind: job.peaks.get(kind, 0))  # type: ignore[misc]


def data_wait_share(job: MeasuredJob) -> float:
    """The share of step time that a job spent waiting for batches."""
    counted = job.steps[1:] or job.steps
    return sum(step.waited_s for step in counted) / sum(step.seconds for step in counted)


def _losses_line(baseline: Baseline) -> str:
    losses = [step.loss for step in baseline.jobs[0].steps]
    finite_losses = [loss for loss in losses if loss is not None]
    if not finite_losses:
        return "Losses: all are NaN or infinite, from step 1 on."
    last = statistics.fmean(finite_losses[-10:])
    text = f"Losses: {finite_losses[0]:.4f} at first, {last:.4f} on average over the last {len(finite_losses[-10:])}"
    if None in losses:
        not_finite_text = f"{losses.count(None)} of {len(losses)} are NaN or infinite, first at step"
        text = f"{text}; {not_finite_text} {losses.index(None) + 1}"
    if len(baseline.jobs) < 2:
        return f"{text}."
    comparison = compare_losses(baseline.jobs[:1], baseline.jobs[1:], baseline.precision)
    return f"{text}; between repeats {comparison.likeness}: {comparison.words} (log {baseline.jobs[0].losses[:16]})."


def _details(baseline: Baseline, files: Sequence[str]) -> Iterator[str]:
    hints = baseline.jobs[-1].hints
    if hints:
        yield from [
            "",
            "## Residency hints",
            "",
            *markdown_table(["outcome", "hints"], [[k, f"{v:,}"] for k, v in hints.items()]),
        ]
    yield from ["", "## Loss", "", *_loss_table(baseline.jobs[0])]
    yield from ["", "## Settings of the configuration", "", *_settings_block(baseline.config)]
    machine = [[name, _value_text(value)] for name, value in baseline.machine.items() if value not in (None, [])]
    yield from ["", "## Machine", "", *markdown_table(["fact", "value"], machine)]
    if baseline.environment:
        yield from ["", *markdown_table(["variable", "value"], [[k, v] for k, v in baseline.environment.items()])]
    versions = [[name, version] for name, version in baseline.jobs[0].versions.items()]
    yield from ["", "## Versions", "", *markdown_table(["package", "version"], versions)]
    yield from ["", "## Notes", "", *(f"- {note}" for note in baseline.notes)]
    if files:
        yield f"- other files in this folder: baseline.json, steps.jsonl (every step), config.json, {', '.join(files)}"


def _loss_table(job: MeasuredJob) -> list[str]:
    every = max(1, len(job.steps) // LOSSES_SHOWN)
    chosen = [*job.steps[::every][:LOSSES_SHOWN], job.steps[-1]]
    rows = [[str(step.step), "none" if step.loss is None else f"{step.loss:.6f}", step.expert] for step in chosen]
    return markdown_table(["step", "loss", "expert"], rows)


def _settings_block(config: Mapping[str, Any]) -> list[str]:
    return ["```json", *json.dumps(config, indent=2, ensure_ascii=False).splitlines(), "```"]


def _value_text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _unique_memory_lines(lines: Iterator[str]) -> list[str]:
    return [f"Memory: {line}." for line in dict.fromkeys(lines)]
