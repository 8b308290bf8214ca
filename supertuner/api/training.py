"""Trains a run from its configuration to its exported files, and summarizes the result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from supertuner.api.callbacks import CallbackSink, TrainingCallback
from supertuner.api.session import RunSession, open_session
from supertuner.config.sources.environment import current_environment
from supertuner.config.sources.launcher import read_launcher_environment
from supertuner.config.sources.load import LoadedConfig
from supertuner.core.durable import write_json
from supertuner.core.errors import SuperTunerError
from supertuner.core.events import NoteEvent, Sink, TeeSink, WarningEvent
from supertuner.core.types import JSON
from supertuner.data.staging.arena_lookup import require_paths
from supertuner.runs.loss_files import LOSSES_FILE, read_losses
from supertuner.sinks.training_events import StepRecord

LOSS_CURVE_FILE = "loss_curve.png"
FORECAST_FILE = "forecast.json"
"""In the run's folder: the forecast that was made before training began; all its figures are modelled."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of one training session."""

    run_dir: Path
    steps: int
    samples: int
    seconds: float
    stopped_by: str | None
    """The signal that stopped it early, or "callback"; None if it ran to its end."""
    adapters: tuple[Path, ...]
    """The exported files, one per expert; folders of whole experts after a full fine-tuning. Empty if a signal stopped
    the run."""
    loss_curve: Path | None
    memory_lines: tuple[str, ...]
    """Summary of memory, one line each: hints by outcome, overflowed bytes."""
    hint_counts: Mapping[str, int] = field(default_factory=dict)
    """Residency hints of this session by outcome."""
    hub_lines: tuple[str, ...] = ()
    """What was pushed to the Hugging Face hub, or why nothing was, one line each; empty without
    `exports.push_to_hub`."""

    @property
    def losses(self) -> list[StepRecord]:
        """The steps of the whole run, earlier sessions included, read from its `losses.jsonl`."""
        return read_losses(self.run_dir / LOSSES_FILE)

    def to_dict(self) -> dict[str, JSON]:
        """Everything but the losses as JSON values."""
        return {
            "run_dir": str(self.run_dir),
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self.seconds,
            "stopped_by": self.stopped_by,
            "adapters": [str(path) for path in self.adapters],
            "loss_curve": None if self.loss_curve is None else str(self.loss_curve),
            "memory": list(self.memory_lines),
            "hints": dict(self.hint_counts),
            "hub": list(self.hub_lines),
        }


def train(
    config: LoadedConfig,
    *,
    callbacks: Sequence[TrainingCallback] = (),
    resume: str | None = None,
    force: bool = False,
    show_progress: bool = True,
) -> TrainingResult:
    """Train as configured: stage and cache the data, train, validate, save checkpoints, and export.

    A run that has a checkpoint is resumed from its last one; the result is bit for bit that of an uninterrupted run.
    Ctrl-C and SIGTERM save a checkpoint and stop after the current window if this is called from the main thread.

    Args:
        config: The configuration, from `load_config`.
        callbacks: They see steps, validations and checkpoints, and may stop the run.
        resume: Overrides `checkpoints.resume`: "latest", "never", or the path of a checkpoint.
        force: Train even if the forecast says that the run does not fit into memory.
        show_progress: Show progress, decisions and warnings on the console.

    Raises:
        SuperTunerError: An error of its tree: ConfigError, SourceError, ModelError, TrainError and others.
    """
    require_paths(config)
    launcher = read_launcher_environment(current_environment())
    with open_session(config, launcher, show_progress=show_progress) as run_session:
        return train_in_session(run_session, callbacks=callbacks, resume=resume, force=force)


def train_in_session(
    run_session: RunSession,
    *,
    callbacks: Sequence[TrainingCallback] = (),
    resume: str | None = None,
    force: bool = False,
    extra_sink: Sink | None = None,
) -> TrainingResult:
    """Like `train`, in an open session. `extra_sink` receives every event, including those of single steps."""
    result = _train_to_end(run_session, callbacks, resume, force, extra_sink)
    # Only now, when everything is on disk and no other rank waits: an upload takes long, and may fail.
    return push_result(run_session, result)


def _train_to_end(
    run_session: RunSession,
    callbacks: Sequence[TrainingCallback],
    resume: str | None,
    force: bool,
    extra_sink: Sink | None,
) -> TrainingResult:
    """Train until the files of the run are complete; all that is opened for it is closed at the end."""
    with run_session.console.phase("loading libraries"):
        from supertuner.arena.run_context import RunContext
        from supertuner.distributed.process_group import rank_zero_first
        from supertuner.distributed.same_start import require_same_config, settings_to_compare
        from supertuner.distributed.torch_process_group import open_process_group
        from supertuner.distributed.watchdog.heartbeat import Heartbeat, HeartbeatProgress, HeartbeatSink
        from supertuner.plan.forecast.preflight import preflight_check
        from supertuner.runs.loss_curve import draw_curve
        from supertuner.train.export.export import RunExporter
        from supertuner.train.loop import STOPPED_BY_CALLBACK
        from supertuner.train.loop import train as run_loop
        from supertuner.train.run_checks import select_device
        from supertuner.train.setup import open_run
    config, run_dir = run_session.config, run_session.run_dir
    device = select_device(config.train.device, run_session.launcher)
    pulse = Heartbeat()
    progress = HeartbeatProgress(run_session.console, pulse)
    with ExitStack() as stack:
        process_group = stack.enter_context(open_process_group(config.parallel, run_session.launcher, device, pulse))
        require_same_config(process_group, settings_to_compare(config))
        with rank_zero_first(process_group):
            if config.push_repository is not None and run_session.launcher.is_main_process:
                from supertuner.train.export.hub_push import check_access

                check_access(config.push_repository, run_session.sink)
            run_model = preflight_check(
                config,
                device,
                host=run_session.host,
                sink=run_session.sink,
                progress=progress,
                force=force,
                sharded=process_group.sharder is not None,
            )
        if config.parallel.strategy == "fsdp" and process_group.sharder is None:
            run_session.sink.emit(
                NoteEvent("parallel.strategy", '"fsdp" has no effect: a single process holds all weights')
            )
        if run_model is not None and run_session.launcher.is_main_process:
            write_json(run_dir / FORECAST_FILE, run_model.forecast.to_dict())
        planning = None if run_model is None else run_model.planner
        reports = open_report_sinks(run_session, stack)
        callback_sink = CallbackSink(callbacks)
        observers = [callback_sink] if extra_sink is None else [extra_sink, callback_sink]
        sink = HeartbeatSink(TeeSink(reports, *observers), pulse)
        context = RunContext(run_dir, sink, progress, run_session.host)
        run = stack.enter_context(
            open_run(config, context, resume=resume, process_group=process_group, planner=planning)
        )
        ending = run_loop(run, should_stop=callback_sink.should_stop, on_saved=callback_sink.checkpoint_saved)
        finished = ending.stopped_by in (None, STOPPED_BY_CALLBACK)
        adapters = tuple(RunExporter(run).finish()) if finished else ()
        curve = None
        # The loss log is empty if the run was complete before this session.
        if run_session.launcher.is_main_process and (run_dir / LOSSES_FILE).stat().st_size:
            draw_curve(run_dir / LOSSES_FILE, curve := run_dir / LOSS_CURVE_FILE)
        memory = tuple(run.memory.summary_lines())
        hints = run.memory.hint_tally.by_status()
        return TrainingResult(
            run_dir, run.step, run.samples_consumed, ending.seconds, ending.stopped_by, adapters, curve, memory, hints
        )


def push_result(run_session: RunSession, result: TrainingResult) -> TrainingResult:
    """Push the adapter of a finished run to `exports.push_to_hub`, on rank 0. A push that fails is a warning: it must
    not cost the result of the training."""
    from supertuner.api.adapters import push, push_summary

    repository = run_session.config.push_repository
    if repository is None or not result.adapters or not run_session.launcher.is_main_process:
        return result
    source = f"{result.run_dir}@{result.steps}"
    run_session.sink.emit(NoteEvent("exports.push_to_hub", f"pushing step {result.steps} to {repository}"))
    try:
        lines = push_summary(push(source, repository)).splitlines()
    except (SuperTunerError, OSError, KeyboardInterrupt) as error:
        reason = "stopped by Ctrl-C" if isinstance(error, KeyboardInterrupt) else str(error)
        later = f"push it later: supertuner adapter push {shlex.quote(source)} {repository}"
        run_session.sink.emit(WarningEvent("exports.push_to_hub", f"not pushed: {reason}; {later}"))
        lines = [f"NOT PUSHED to {repository}: {reason}", later]
    else:
        run_session.sink.emit(NoteEvent("exports.push_to_hub", "; ".join(lines)))
    return replace(result, hub_lines=tuple(lines))


def open_report_sinks(run_session: RunSession, stack: ExitStack) -> Sink:
    """The session's sink together with the configured reports (TensorBoard, W&B)."""
    from supertuner.sinks.training_events import EveryNStepsSink, WithoutStepsSink

    if run_session.run_folder is None:
        return run_session.sink
    settings = run_session.config.report
    # The event log omits single steps, because losses.jsonl has them.
    sinks: list[Sink] = [run_session.console, WithoutStepsSink(run_session.run_folder)]
    if settings.tensorboard:
        from supertuner.sinks.tensorboard import TensorBoardSink

        tensorboard = stack.enter_context(TensorBoardSink(run_session.run_dir / "tensorboard"))
        sinks.append(EveryNStepsSink(tensorboard, settings.every_steps))
    if settings.wandb is not None:
        from supertuner.sinks.wandb import WandbSink

        resolved: dict[str, JSON] = run_session.config.model_dump(mode="json")
        wandb = stack.enter_context(WandbSink(settings.wandb, run_session.run_dir.name, run_session.run_dir, resolved))
        sinks.append(EveryNStepsSink(wandb, settings.every_steps))
    return TeeSink(*sinks)


def training_summary(result: TrainingResult) -> str:
    """The result as text, with the paths of all files."""
    run_dir = result.run_dir
    how = f"stopped by {result.stopped_by} after" if result.stopped_by else "trained"
    lines = [
        f"{how} {result.steps} steps, {result.samples} samples; {result.seconds:.1f} s in this session",
        f"  run          {run_dir}",
        f"  losses       {run_dir / 'losses.jsonl'}",
    ]
    if result.loss_curve is not None:
        lines.append(f"  loss curve   {result.loss_curve}")
    if (run_dir / "samples").is_dir():
        lines.append(f"  samples      {run_dir / 'samples'}")
    lines.append(f"  checkpoints  {run_dir / 'checkpoints'}")
    lines += [f"  exported     {path}" for path in result.adapters]
    lines += [f"  memory       {line}" for line in result.memory_lines]
    lines += [f"  hub          {line}" for line in result.hub_lines]
    if result.stopped_by:
        lines.append("the same command resumes from here")
    return "\n".join(lines)
