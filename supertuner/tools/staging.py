"""Stages all datasets of a configuration, and summarizes the result."""

from __future__ import annotations

from supertuner.api.session import RunSession, arena_lifetime
from supertuner.core.types import bytes_text
from supertuner.data.corpus_loader import dataset_stagers
from supertuner.data.staging.result import StageResult


def stage_all_datasets(run_session: RunSession) -> list[StageResult]:
    """Stage every dataset; an unchanged dataset reuses its arena."""
    stagers = dataset_stagers(run_session.config, run_session.context, arena_lifetime(run_session.config))
    return [stager.stage(dataset, place) for stager, dataset, place in stagers]


def stage_summary(result: StageResult) -> str:
    """The result of one dataset in a few lines."""
    files_text = f"{result.files} {result.kind} file{'s' if result.files != 1 else ''}"
    how = f"reused: {result.reuse_reason}" if result.reused else f"staged in {result.seconds:.2f} s"
    rate = "" if result.reused else f", {bytes_text(result.nbytes / max(result.seconds, 1e-9))}/s"
    lines = [
        f"{result.dataset}: {files_text}, {bytes_text(result.nbytes)}, {how}{rate}",
        f"  arena {result.arena} in {result.home}, {bytes_text(result.stored_bytes)}",
    ]
    if result.set_aside:
        count = len(result.set_aside)
        lines.append(f"  {count} file{'s' if count != 1 else ''} set aside; see the run's set_aside.jsonl")
    return "\n".join(lines)
