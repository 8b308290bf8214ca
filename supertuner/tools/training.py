"""A training run from its configuration to its exported files, and what became of it in words."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from supertuner.config.sources.environment import current
from supertuner.config.sources.launcher import launched
from supertuner.config.sources.load import Loaded
from supertuner.core.durable import write_json
from supertuner.core.events import Noted, Sink, Together
from supertuner.core.types import JSON
from supertuner.tools.session import Session, session

CURVE = "loss_curve.png"
FORECAST = "forecast.json"
"""In the run's folder: what was forecast before it began, all of it modelled."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a call of `train` did."""

    run: Path
    steps: int
    samples: int
    seconds: float
    stopped_by: str | None
    """The signal that stopped it before its end."""
    exports: tuple[Path, ...]
    curve: Path | None
    memory: tuple[str, ...]
    """What became of the memory engine, a line each: hints by outcome, what overflowed."""
    hints: Mapping[str, int] = field(default_factory=dict)
    """Residency hints of this session by outcome."""


def train(loaded: Loaded, *, resume: str | None = None, anyway: bool = False) -> Trained:
    """Train what the configuration says, going on from the run's last checkpoint if it has one. `anyway`: even if it
    cannot fit into memory."""
    with session(loaded, launched(current())) as work:
        return train_in(work, resume=resume, anyway=anyway)


def train_in(work: Session, *, resume: str | None = None, anyway: bool = False, also: Sink | None = None) -> Trained:
    """The same within a session that is open already. `also` gets everything that is reported, each step included."""
    with work.console.phase("loading libraries"):
        from supertuner.distributed.process_group import in_turn
        from supertuner.distributed.same_config import require_alike, words_of
        from supertuner.distributed.setup import open_parallel
        from supertuner.distributed.watchdog.heartbeat import MarkedProgress, MarkedSink, Pulse
        from supertuner.plan.forecast.preflight import before_training
        from supertuner.plan.forecast.report import as_json
        from supertuner.tools.curve import draw_curve
        from supertuner.train.export.export import export
        from supertuner.train.loop import train as run_loop
        from supertuner.train.loss_log import LOSSES
        from supertuner.train.setup import Outside, device_of, open_run
    config, folder = work.config, work.path
    device = device_of(config.train.device, work.launched)
    pulse = Pulse()
    progress = MarkedProgress(work.console, pulse)
    with ExitStack() as opened:
        parallel = opened.enter_context(open_parallel(config.parallel, work.launched, device, pulse))
        require_alike(parallel, words_of(config))
        with in_turn(parallel):
            known = before_training(
                config,
                device,
                host=work.host,
                sink=work.sink,
                progress=progress,
                anyway=anyway,
                shared_out=parallel.sharing is not None,
            )
        if config.parallel.strategy == "fsdp" and parallel.sharing is None:
            work.sink.emit(Noted("parallel.strategy", '"fsdp" has no effect: one process has all weights anyway'))
        if known is not None and work.launched.first:
            write_json(folder / FORECAST, as_json(known.forecast))
        planning = None if known is None else known.planning
        reports = with_reports(work, opened)
        sink = MarkedSink(reports if also is None else Together(reports, also), pulse)
        outside = Outside(sink, progress, work.host)
        run = opened.enter_context(
            open_run(config, folder.name, folder, outside, resume=resume, parallel=parallel, planning=planning)
        )
        ending = run_loop(run)
        exports = () if ending.stopped_by else tuple(export(run))
        curve = None
        if work.launched.first and (folder / LOSSES).stat().st_size:  # none: there was nothing left to do
            draw_curve(folder / LOSSES, curve := folder / CURVE)
        memory = tuple(run.memory.lines())
        hints = run.memory.tally.by_status()
        return Trained(folder, run.step, run.samples, ending.seconds, ending.stopped_by, exports, curve, memory, hints)


def with_reports(work: Session, opened: ExitStack) -> Sink:
    """The session's sink, and the reports that the configuration asks for."""
    from supertuner.sinks.training import Thinned, WithoutSteps

    if work.folder is None:
        return work.sink
    settings = work.config.report
    sinks: list[Sink] = [work.console, WithoutSteps(work.folder)]  # losses.jsonl has the steps
    if settings.tensorboard:
        from supertuner.sinks.tensorboard import TensorBoard

        board = opened.enter_context(TensorBoard(work.path / "tensorboard"))
        sinks.append(Thinned(board, settings.every_steps))
    if settings.wandb is not None:
        from supertuner.sinks.wandb import Wandb

        resolved: dict[str, JSON] = work.config.model_dump(mode="json")
        wandb = opened.enter_context(Wandb(settings.wandb, work.path.name, work.path, resolved))
        sinks.append(Thinned(wandb, settings.every_steps))
    return Together(*sinks)


def summary(trained: Trained) -> str:
    """Where everything is, for people."""
    run = trained.run
    how = f"stopped by {trained.stopped_by} after" if trained.stopped_by else "trained"
    lines = [
        f"{how} {trained.steps} steps, {trained.samples} samples; {trained.seconds:.1f} s in this session",
        f"  run          {run}",
        f"  losses       {run / 'losses.jsonl'}",
    ]
    if trained.curve is not None:
        lines.append(f"  loss curve   {trained.curve}")
    if (run / "samples").is_dir():
        lines.append(f"  samples      {run / 'samples'}")
    lines.append(f"  checkpoints  {run / 'checkpoints'}")
    lines += [f"  exported     {path}" for path in trained.exports]
    lines += [f"  memory       {line}" for line in trained.memory]
    if trained.stopped_by:
        lines.append("the same command goes on from here")
    return "\n".join(lines)
