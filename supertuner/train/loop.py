"""The training loop: one optimizer step per window; validations, checkpoints and requests come between two windows.

Nothing between windows changes the run. The validation of a step comes before its checkpoint, so whatever a checkpoint
counts as done is done. Therefore a run that was killed at any moment and resumed ends with the same files as one that
was not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from supertuner.core.errors import CollectiveError, ModelError, NonFiniteError, SuperTunerError, TrainError
from supertuner.core.events import NoteEvent, WarningEvent
from supertuner.core.interrupts import interrupts_win, raise_lost_interrupt
from supertuner.memory.out_of_memory import explain_out_of_memory, releasing_new_objects
from supertuner.models.objective.diffusion import noise_seed
from supertuner.optim.schedule import ramp_change_text, window_samples
from supertuner.runs.requests import RequestInbox, RunRequest
from supertuner.sinks import training_events as training
from supertuner.step.batch import StepBatch
from supertuner.step.train_step import WindowResult, train_window
from supertuner.train.checkpoint.async_saver import CheckpointSaver, SavedCallback
from supertuner.train.export.export import RunExporter
from supertuner.train.run.dataloader import TrainingWindow
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.signals import TrainingSignals
from supertuner.train.validation.validate import validate

RATES_EVERY_STEPS = 10
"""For optimizers with a learning rate per weight: how often their spread is reported, which reads all of them."""
STOPPED_BY_CALLBACK: Final = "callback"
CALLBACK_STOP: Final = 1 << 10
"""Stands for a stop by a callback among the numbers of signals that ranks exchange; larger than any of them."""
OUT_OF_MEMORY_REMEDY = 'lower train.batch_size, set train.gradient_checkpointing: true, or model.base_weights: "int8"'


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How the loop ended."""

    stopped_by: str | None
    """The name of the signal that stopped it, or "callback"; None: all steps are done."""
    seconds: float


def train(
    run: TrainingRun, *, should_stop: Callable[[], bool] | None = None, on_saved: SavedCallback | None = None
) -> TrainingOutcome:
    """Train from the run's step to its last one, or until a signal or `should_stop` requests a stop.

    `should_stop` is called after each window; True on any rank saves a checkpoint and stops all ranks. `on_saved` is
    called with the step and the path of each checkpoint of the run, by the training thread.
    """
    started_s = time.perf_counter()
    settings = run.config.validation
    with (
        TrainingSignals(announces=run.process_group.local_rank == 0) as signals,
        _open_requests(run) as requests,
        CheckpointSaver(run, on_saved, RunExporter(run).collect) as saver,
        run.dataloader() as loader,
        interrupts_win(),
    ):
        steps, samples, total = run.schedule.total_steps, run.samples_consumed, run.schedule.total_samples
        begin = training.train_begin_event(step=run.step, steps=steps, samples=samples, samples_total=total)
        run.context.sink.emit(begin)
        if run.step == 0 and settings.at_start:
            with releasing_new_objects(run.device):
                validate(run)
        for window in loader:
            _train_step(run, window)
            saver.report_if_finished()
            last = run.step == run.schedule.total_steps
            if _is_due(run.step, settings.every_steps) or (last and settings.at_end):
                _validate_or_warn(run)
            raise_lost_interrupt()
            stop_number = signals.stop_number or (CALLBACK_STOP if should_stop is not None and should_stop() else 0)
            requested = _collect_requests(run, requests, signals, stop_number)
            if _is_due(run.step, run.config.checkpoints.every_steps) or last or requested.stop:
                saver.save()
            _serve_requests(run, saver, requests, requested)
            if requested.stop and not last:
                saver.wait()
                return _finish(run, started_s, requested.stop)
        saver.wait()
    return _finish(run, started_s, None)


def _train_step(run: TrainingRun, window: TrainingWindow) -> None:
    """Do one optimizer step, log it and report it."""
    plan, started_s = window.plan, time.perf_counter() - window.waited_s
    expert_state = run.expert_states[plan.expert_index]
    if run.schedule.window_size_changes_at(plan.step):
        size = window_samples(plan.positions.start, run.schedule.ramp)  # the last window may be shorter
        text = ramp_change_text(size, run.config.train.batch_size, run.process_group.world_size)
        run.context.sink.emit(NoteEvent("ramp", text))
    rate = expert_state.optimizer.base_learning_rate * run.lr_factor(plan.step)
    remedy = partial(run.memory.out_of_memory_remedy, OUT_OF_MEMORY_REMEDY)
    with explain_out_of_memory(f"step {plan.step + 1} does", remedy):
        result = train_window(
            expert_state,
            (_move_to_device(run, batch) for batch in window),
            samples=len(plan.positions),
            learning_rate=rate,
            options=replace(run.step_options, reduction=run.process_group.reduction),
            micro_batches=plan.local_batches,
            seed=noise_seed(run.config.run.seed, plan.local_positions.start),
        )
    run.step += 1
    expert, samples = expert_state.expert.name, plan.positions.stop
    record = training.StepRecord(run.step, samples, len(plan.positions), expert, result.loss, result.grad_norm, rate)
    run.loss_log.append(record)
    took_s = time.perf_counter() - started_s  # before reporting, which takes time itself
    run.context.sink.emit(training.train_step_event(record, seconds=took_s, waited_s=window.waited_s))
    run.memory.after_step(run.step, run.context.sink)
    if run.offload is not None:
        if refusal := run.memory.new_refusal():
            run.offload.note_refusal(refusal)
        run.offload.after_window(expert, len(plan.positions), took_s - window.waited_s)
    if _is_due(run.step, RATES_EVERY_STEPS) or run.step == run.schedule.total_steps:
        _report_rates(run)
    _check_finite(run, result)


def _report_rates(run: TrainingRun) -> None:
    spreads = {state.expert.name: state.optimizer.learning_rate_spread() for state in run.expert_states}
    figures = {expert: spread.figures() for expert, spread in spreads.items() if spread is not None}
    if figures:
        run.context.sink.emit(training.train_rates_event(run.step, figures))


def _move_to_device(run: TrainingRun, batch: StepBatch) -> StepBatch:
    """The batch on the device. One in unified memory has its hints already; a copy gets them here."""
    placed = batch.to(run.device)
    if placed is not batch:
        run.memory.hint_batch(placed)
    return placed


def _check_finite(run: TrainingRun, result: WindowResult) -> None:
    """Warn of a window that is not finite, naming its samples; NonFiniteError after `train.max_nonfinite` in a row."""
    if result.finite or result.overflowed:
        run.nonfinite_windows = 0
        return
    run.nonfinite_windows += 1
    limit = run.config.train.max_nonfinite
    suspects = _suspects_text(run, result)
    description = f"step {run.step}: loss {result.loss}, gradient norm {result.grad_norm}; samples: {suspects}"
    if run.nonfinite_windows >= limit:
        problem = "windows in a row were not finite (train.max_nonfinite), and none of them changed a weight"
        remedy = "Check these samples, lower the learning rate, or resume from an earlier checkpoint"
        raise NonFiniteError(f"{description}; {run.nonfinite_windows} {problem}. {remedy}")
    text = f"{description}; the window is skipped ({run.nonfinite_windows} in a row, {limit} end the run)"
    run.context.sink.emit(WarningEvent("train", text))


def _suspects_text(run: TrainingRun, result: WindowResult) -> str:
    """Names of the samples, over all ranks, that may have caused the window to be not finite."""
    own_report = ",".join(map(str, (int(result.has_nonfinite_loss), *result.suspect_positions)))
    messages = run.process_group.all_gather(own_report.encode())
    reports = [[int(number) for number in message.decode().split(",")] for message in messages]
    # Ranks with a loss that is not finite come first; if there is none, the gradients overflowed somewhere.
    suspects = [position for has_nonfinite, *positions in reports if has_nonfinite for position in positions]
    suspects = suspects or [position for _, *positions in reports for position in positions]
    return ", ".join(map(run.collator.sample_name, suspects[:8])) + (" …" if len(suspects) > 8 else "")


def _validate_or_warn(run: TrainingRun) -> None:
    """Do a scheduled validation; a failure causes a warning, so that no training is lost.

    (Before the first step a failure ends the run, which has nothing to lose then.)
    """
    with releasing_new_objects(run.device):  # around the `except` block, whose error keeps loaded models alive
        try:
            validate(run)
        except (TrainError, ModelError) as error:
            run.context.sink.emit(WarningEvent(f"validation of step {run.step}", f"skipped: {error}"))


@dataclass(frozen=True, slots=True)
class _ControlRequests:
    """What signals and request files asked for since the last window, on any rank."""

    stop: str | None
    validate: bool
    pending: tuple[RunRequest, ...]
    kinds: tuple[str, ...]
    """The kind of each request: rank 0 receives and answers the requests, all ranks carry them out."""


def _collect_requests(
    run: TrainingRun, requests: RequestInbox | None, signals: TrainingSignals, stop_number: int
) -> _ControlRequests:
    """Read signals and requests once: later ones count after the next window."""
    pending = () if requests is None else tuple(requests.pending())
    own_flags = [stop_number, int(signals.pop_validate_request()), len(pending)]
    (any_flag,) = run.process_group.all_reduce_max([int(any(own_flags))])
    if not any_flag:  # nearly always; a single value is the cheapest collective
        return _ControlRequests(None, False, (), ())
    number, validation, count = run.process_group.all_reduce_max(own_flags)
    kinds: tuple[str, ...] = tuple(request.kind for request in pending)
    if count and run.process_group.world_size > 1:
        kinds_text = run.process_group.broadcast(",".join(kinds).encode() if requests is not None else None)
        kinds = tuple(kinds_text.decode().split(","))
    stop = None
    if number:
        stop = STOPPED_BY_CALLBACK if number == CALLBACK_STOP else signal.Signals(number).name
    return _ControlRequests(stop, bool(validation), pending, kinds)


def _serve_requests(
    run: TrainingRun, saver: CheckpointSaver, requests: RequestInbox | None, requested: _ControlRequests
) -> None:
    """Carry out requests. One that fails is answered with its error, and does not end the run."""
    if requested.validate:
        _validate_on_request(run, "SIGUSR1")
    for number, kind in enumerate(requested.kinds):
        answer = None
        if requests is not None:
            answer = partial(_answer, requests, requested.pending[number], f"{kind} of step {run.step}")
        if kind == "checkpoint":
            if requests is not None:  # it is answered once the checkpoint is on disk; training goes on meanwhile
                requests.defer(requested.pending[number])
            saver.save_on_request(answer)
            continue
        path, reason = _validate_on_request(run, f"request {kind}")
        if answer is not None:
            answer(path, reason)


def _validate_on_request(run: TrainingRun, source: str) -> tuple[Path | None, str]:
    """Validate; returns the folder of the samples, or None and the reason of the failure."""
    with releasing_new_objects(run.device):
        try:
            return validate(run, on_request=True), ""
        except CollectiveError:
            raise
        except SuperTunerError as error:
            run.context.sink.emit(WarningEvent(source, str(error)))
            return None, str(error)


def _answer(requests: RequestInbox, request: RunRequest, done: str, path: Path | None, reason: str) -> None:
    if path is None:
        requests.refuse(request, reason)
    else:
        requests.answer(request, done, path)


def _open_requests(run: TrainingRun) -> AbstractContextManager[RequestInbox | None]:
    """The inbox of requests to the run, on rank 0, which answers them; None on other ranks."""
    return RequestInbox(run.context.run_dir, run.context.sink) if run.process_group.rank == 0 else nullcontext(None)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and every > 0 and step % every == 0


def _finish(run: TrainingRun, started_s: float, stopped_by: str | None) -> TrainingOutcome:
    seconds = time.perf_counter() - started_s
    run.context.sink.emit(training.train_end_event(step=run.step, samples=run.samples_consumed, seconds=seconds))
    return TrainingOutcome(stopped_by, seconds)
