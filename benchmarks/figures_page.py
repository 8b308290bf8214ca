"""The tables of docs/benchmarks.md: pure functions of the recorded figures, and of which of them are outdated.

The page has pairs of markers, `<!-- figures: training -->` and `<!-- end -->`. What is between them is generated; the
rest is written by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from benchmarks.harness import ClaimRow
from benchmarks.recorded_figures import BENCHMARKS, ROOT, Recording

PAGE: Final = ROOT / "docs" / "benchmarks.md"
OUTDATED: Final = "**older than its code**"
RECORDINGS: Final = "recordings"
_REGION: Final = re.compile(r"(<!-- figures: ([a-z]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def render_page(page: str, recordings: Mapping[str, Recording], outdated: Collection[str]) -> str:
    """The page with its tables made again."""

    def region(found: re.Match[str]) -> str:
        begin, section, _, end = found.groups()
        lines = recordings_table(recordings, outdated) if section == RECORDINGS else _section(section)
        return begin + "\n" + "\n".join(lines) + "\n\n" + end

    def _section(section: str) -> list[str]:
        names = [name for name, benchmark in BENCHMARKS.items() if benchmark.section == section]
        assert names, f"no benchmark has the section {section}, which docs/benchmarks.md names"
        return claims_table({name: recordings[name] for name in names if name in recordings}, outdated)

    return _REGION.sub(region, page)


def claims_table(recordings: Mapping[str, Recording], outdated: Collection[str]) -> list[str]:
    """One row per claim with a goal."""
    lines = ["| claim | figure (lowest to highest) | goal | | measured at |", "|---|---|---|---|---|"]
    for name, recording in recordings.items():
        mark = f", {OUTDATED}" if name in outdated else ""
        place = f"`{recording.commit}` (`{name}`){mark}"
        lines += [f"| {row.name} | {_cells(row)} | {place} |" for row in recording.claims if not math.isnan(row.limit)]
    return lines


def recordings_table(recordings: Mapping[str, Recording], outdated: Collection[str]) -> list[str]:
    """One row per benchmark: when, where and with which versions its figures were measured."""
    lines = [
        "| benchmark | measured at | date | seconds | CPUs used by other programs | |",
        "|---|---|---|---|---|---|",
    ]
    for name in BENCHMARKS:
        if name not in recordings:
            lines.append(f"| `{name}` | not recorded yet | | | | |")
            continue
        one = recordings[name]
        others = "unknown" if one.other_cpus is None else f"{one.other_cpus:g}"
        mark = OUTDATED if name in outdated else ""
        lines.append(f"| `{name}` | `{one.commit}` | {one.date} | {one.seconds:.0f} | {others} | {mark} |")
    return [*lines, "", *_conditions(recordings)]


def _conditions(recordings: Mapping[str, Recording]) -> Iterator[str]:
    """The machines and versions, each with the benchmarks that were measured with them."""
    groups: dict[str, list[str]] = {}
    for name, one in recordings.items():
        versions = ", ".join(f"{package} {version}" for package, version in one.versions.items())
        groups.setdefault(f"{one.machine}; {versions}", []).append(f"`{name}`")
    for text, names in groups.items():
        yield f"- {', '.join(names)}: {text}."


def _cells(row: ClaimRow) -> str:
    """The cells figure, goal and verdict."""
    goal = f"{'≤' if row.at_most else '≥'} {row.limit:.3g} {row.unit}"
    if math.isnan(row.ratio):
        return f"| {goal} | not measured: {row.note}"
    spread = f" ({row.spread[0]:.3g} to {row.spread[1]:.3g})" if row.spread else ""
    verdict = "met" if row.met else "**missed**"
    return f"{row.ratio:.3g} {row.unit}{spread} | {goal} | {verdict}{'; ' + row.note if row.note else ''}"
