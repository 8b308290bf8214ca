"""Which baselines a folder holds: a line for each that can be read, and what is wrong with each that cannot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from supertuner.core.errors import BaselineError
from supertuner.sinks.jsonlines import people_time
from supertuner.tools.baseline import ratios
from supertuner.tools.baseline.report import code_text
from supertuner.tools.baseline.store import BASELINE, RATIOS, Baseline, load, require_config
from supertuner.tools.baseline.tables import amount, table


def listed(folder: Path) -> tuple[list[str], list[str]]:
    """(lines for those that can be read, a problem for each that cannot)."""
    times: list[Baseline] = []
    multiples: list[tuple[str, ratios.Ratios]] = []
    problems = []
    entries = sorted(folder.iterdir()) if folder.exists() else []
    for path in entries:
        if not path.is_dir() or path.name.startswith("."):  # a capture that is being written
            continue
        try:
            if (path / BASELINE).exists():
                found = load(path)
                require_config(path)
                times.append(found)
            if (path / RATIOS).exists():
                multiples.append((path.name, ratios.load(path / RATIOS)))
            elif not (path / BASELINE).exists():
                problems.append(f"{path} holds no {BASELINE} and no {RATIOS}; capture it again, or remove it")
        except BaselineError as error:
            problems.append(str(error))
    tables = [part for part in (_times(times), _ratios(multiples)) if part]
    return [line for at, part in enumerate(tables) for line in ([""] if at else []) + part], problems


def _times(baselines: Sequence[Baseline]) -> list[str]:
    rows = []
    for one in baselines:
        step = statistics.median([step.seconds for job in one.jobs for step in job.steps[1:] or job.steps])
        speed = statistics.median([job.samples_per_s for job in one.jobs])
        resident = max(job.peaks.get("process.resident", 0) for job in one.jobs)
        figures = [amount(speed, "samples/s"), amount(step, "s"), amount(resident, "bytes")]
        rows.append(
            [one.name, people_time(one.captured_at), f"{len(one.jobs)} × {one.steps:,}", *figures, code_text(one)]
        )
    heads = ["baseline", "captured", "steps", "throughput", "step", "peak resident", "code"]
    return table(heads, rows) if rows else []


def _ratios(found: Sequence[tuple[str, ratios.Ratios]]) -> list[str]:
    rows = [
        [name, people_time(one.made_at), f"{one.rounds} × {one.steps:,}"]
        + [f"{one.figures[figure].ratio:.3f}" if figure in one.figures else "–" for figure in ratios.KEPT]
        for name, one in found
    ]
    return table(["ratios to a peer", "captured", "steps", *ratios.KEPT], rows) if rows else []
