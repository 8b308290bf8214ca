"""A baseline as a Markdown report: measured figures first, then settings, machine and versions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence

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
        *(f"Memory: {line}." for line in dict.fromkeys(line for job in baseline.jobs for line in job.memory)),
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
    step_times = [[step.seconds for step in job.steps_after_first] for job in jobs]
    shares = {"median": 0.5, "10th percentile": 0.1, "90th percentile": 0.9, "99th percentile": 0.99, "longest": 1.0}
    yield _row("throughput", "samples/s", [job.samples_per_s for job in jobs])
    for name, share in shares.items():
        yield _row(f"step, {name}", "s", [quantile(times, share) for times in step_times])
    yield _row("share of a step spent waiting for data", "%", [100 * data_wait_share(job) for job in jobs])
    for name, cold in (("start, data ready", False), ("start, with data encoding", True)):
        if starts := [job.start.first_step_s for job in jobs if job.start.cold is cold]:
            yield _row(name, "s", starts)
    if baseline.cold_start_s is not None:
        yield ["start, preparation run", format_amount(baseline.cold_start_s, "s"), "–", "–"]
    peaks = {kind: [job.peaks.get(kind, 0) for job in jobs] for job in jobs for kind in job.peaks}
    for kind, sizes in sorted(peaks.items(), key=lambda item: -max(item[1])):
        yield _row(f"peak {kind}", "bytes", sizes)


def _row(name: str, unit: str, values: Sequence[float]) -> list[str]:
    return [name, *(format_amount(value, unit) for value in (statistics.median(values), min(values), max(values)))]


def data_wait_share(job: MeasuredJob) -> float:
    """The share of step time that a job spent waiting for batches."""
    return sum(step.waited_s for step in job.steps_after_first) / sum(step.seconds for step in job.steps_after_first)


def _losses_line(baseline: Baseline) -> str:
    losses = [step.loss for step in baseline.jobs[0].steps]
    finite = [loss for loss in losses if loss is not None]
    if not finite:
        return "Losses: all are NaN or infinite, from step 1 on."
    last = finite[-10:]
    text = f"Losses: {finite[0]:.4f} at first, {statistics.fmean(last):.4f} on average over the last {len(last)}"
    if None in losses:
        count, first = losses.count(None), losses.index(None) + 1
        text += f"; {count} of {len(losses)} are NaN or infinite, first at step {first}"
    if len(baseline.jobs) < 2:
        return f"{text}."
    comparison = compare_losses(baseline.jobs[:1], baseline.jobs[1:], baseline.precision)
    return f"{text}; between repeats {comparison.likeness}: {comparison.words} (log {baseline.jobs[0].losses[:16]})."


def _details(baseline: Baseline, files: Sequence[str]) -> Iterator[str]:
    if hints := [[outcome, f"{count:,}"] for outcome, count in baseline.jobs[-1].hints.items()]:
        yield from ["", "## Residency hints", "", *markdown_table(["outcome", "hints"], hints)]
    yield from ["", "## Loss", "", *_loss_table(baseline.jobs[0])]
    settings = json.dumps(baseline.config, indent=2, ensure_ascii=False).splitlines()
    yield from ["", "## Settings of the configuration", "", "```json", *settings, "```"]
    facts = {name: value for name, value in baseline.machine.items() if value not in (None, [])}
    machine = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in facts.items()]
    yield from ["", "## Machine", "", *markdown_table(["fact", "value"], machine)]
    if baseline.environment:
        yield from ["", *markdown_table(["variable", "value"], list(baseline.environment.items()))]
    versions = list(baseline.jobs[0].versions.items())
    yield from ["", "## Versions", "", *markdown_table(["package", "version"], versions)]
    yield from ["", "## Notes", "", *(f"- {note}" for note in baseline.notes)]
    if files:
        yield f"- other files in this folder: baseline.json, steps.jsonl (every step), config.json, {', '.join(files)}"


def _loss_table(job: MeasuredJob) -> list[str]:
    every = max(1, len(job.steps) // LOSSES_SHOWN)
    chosen = [*job.steps[::every][:LOSSES_SHOWN], job.steps[-1]]
    rows = [[str(step.step), "none" if step.loss is None else f"{step.loss:.6f}", step.expert] for step in chosen]
    return markdown_table(["step", "loss", "expert"], rows)
