"""Lists the baselines of a folder: a table row for each readable one, and the problem of each unreadable one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from supertuner.core.errors import BaselineError
from supertuner.sinks.jsonlines import readable_time
from supertuner.tools.baseline import peer_ratios as ratios
from supertuner.tools.baseline.baseline_report import code_text
from supertuner.tools.baseline.store import BASELINE_FILE, RATIOS_FILE, Baseline, load_baseline, require_config_file
from supertuner.tools.baseline.tables import format_amount, markdown_table


def list_baselines(folder: Path) -> tuple[list[str], list[str]]:
    """(lines of the tables of readable baselines, one problem per unreadable baseline)."""
    baselines: list[Baseline] = []
    ratio_baselines: list[tuple[str, ratios.PeerRatios]] = []
    problems = []
    entries = sorted(folder.iterdir()) if folder.exists() else []
    for path in entries:
        if not path.is_dir() or path.name.startswith("."):  # a dot: a capture that is still being written
            continue
        try:
            if (path / BASELINE_FILE).exists():
                baseline = load_baseline(path)
                require_config_file(path)
                baselines.append(baseline)
            if (path / RATIOS_FILE).exists():
                ratio_baselines.append((path.name, ratios.load_ratios(path / RATIOS_FILE)))
            elif not (path / BASELINE_FILE).exists():
                problems.append(f"{path} has no {BASELINE_FILE} and no {RATIOS_FILE}; capture it again, or remove it")
        except BaselineError as error:
            problems.append(str(error))
    tables = [part for part in (_baseline_table(baselines), _ratio_table(ratio_baselines)) if part]
    return [line for at, part in enumerate(tables) for line in ([""] if at else []) + part], problems


def _baseline_table(baselines: Sequence[Baseline]) -> list[str]:
    rows = []
    for baseline in baselines:
        step = statistics.median([step.seconds for job in baseline.jobs for step in job.steps_after_first])
        speed = statistics.median([job.samples_per_s for job in baseline.jobs])
        resident = max(job.peaks.get("process.resident", 0) for job in baseline.jobs)
        figures = [format_amount(speed, "samples/s"), format_amount(step, "s"), format_amount(resident, "bytes")]
        when, steps = readable_time(baseline.captured_at), f"{len(baseline.jobs)} × {baseline.steps:,}"
        rows.append([baseline.name, when, steps, *figures, code_text(baseline)])
    heads = ["baseline", "captured", "steps", "throughput", "step", "peak resident", "code"]
    return markdown_table(heads, rows) if rows else []


def _ratio_table(ratio_baselines: Sequence[tuple[str, ratios.PeerRatios]]) -> list[str]:
    rows = []
    for name, stored in ratio_baselines:
        figures = (stored.figures.get(figure) for figure in ratios.COMPARED_FIGURES)
        texts = ["–" if interval is None else f"{interval.ratio:.3f}" for interval in figures]
        rows.append([name, readable_time(stored.captured_at), f"{stored.rounds} × {stored.steps:,}", *texts])
    return markdown_table(["ratios to a peer", "captured", "steps", *ratios.COMPARED_FIGURES], rows) if rows else []
