"""Staging all datasets of a configuration, and what became of it in words."""

from __future__ import annotations

from supertuner.core.types import bytes_text
from supertuner.data.opened import stagers
from supertuner.data.staging.result import StageResult
from supertuner.tools.session import Session, life_of


def stage_all(work: Session) -> list[StageResult]:
    """Stage every dataset, or find that nothing changed."""
    life = life_of(work.config)
    found = stagers(work.config, work.host, work.sink, work.console, life)
    return [stager.stage(dataset, place) for stager, dataset, place in found]


def summary(result: StageResult) -> str:
    """One dataset in a few lines, for people."""
    what = f"{result.files} {result.kind} file{'s' if result.files != 1 else ''}"
    how = f"reused: {result.why_reused}" if result.reused else f"staged in {result.seconds:.2f} s"
    rate = "" if result.reused else f", {bytes_text(result.nbytes / max(result.seconds, 1e-9))}/s"
    lines = [
        f"{result.dataset}: {what}, {bytes_text(result.nbytes)}, {how}{rate}",
        f"  arena {result.arena} in {result.home}, {bytes_text(result.stored_bytes)}",
    ]
    if result.set_aside:
        count = len(result.set_aside)
        lines.append(f"  {count} file{'s' if count != 1 else ''} set aside; the run's set_aside.jsonl says why")
    return "\n".join(lines)
