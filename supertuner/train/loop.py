"""The loop: window after window, one optimizer step each; what is due is done between two windows and changes nothing.

Validation comes before a checkpoint of the same step: what a checkpoint says is done, is done. So a run that was killed
at any moment and resumed ends with the same files as one that was not.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from supertuner.core.errors import CollectiveError, ModelError, NonFiniteError, SuperTunerError, TrainError
from supertuner.core.events import NoteEvent, WarningEvent
from supertuner.models.objective.diffusion import noise_seed
from supertuner.optim.schedule import ramp_change_text, window_samples
from supertuner.runs.requests import RequestInbox, RunRequest
from supertuner.sinks import training_events as training
from supertuner.step.batch import StepBatch
from supertuner.step.window import WindowResult, train_window
from supertuner.train.checkpoint.async_saver import CheckpointSaver
from supertuner.train.checkpoint.save_job import SaveCallback
from supertuner.train.run.dataloader import TrainingWindow
from supertuner.train.run.loss_log import LossRecord
from supertuner.memory.out_of_memory import explain_out_of_memory, release_unused_memory
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.signals import TrainingSignals
from supertuner.train.validation.validate import validate

RATES_EVERY_STEPS = 10
"""How often the rates of single weights are counted, where they have their own: it reads them all."""
OUT_OF_MEMORY_REMEDY = 'lower train.batch_size, set train.gradient_checkpointing: true, or model.base_weights: "int8"'


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How the loop ended."""

    stopped_by: str | None
    """The signal that stopped it; None: all steps are done."""
    seconds: float


def train(run: TrainingRun) -> TrainingOutcome:
    """Train from the run's step to its end, or until a signal asks to stop."""
    started_s = time.perf_counter()
    settings = run.config.validation
    with (
        TrainingSignals() as signals,
        _open_requests(run) as requests,
        CheckpointSaver(run) as saver,
        run.dataloader() as loader,
    ):
        run.sink.emit(
            training.train_begin_event(
                step=run.step,
                steps=run.schedule.total_steps,
                samples=run.samples_consumed,
                samples_total=run.schedule.total_samples,
            )
        )
        if run.step == 0 and settings.at_start:
            validate(run)
        for window in loader:
            _train_step(run, window)
            saver.report_if_finished()
            last = run.step == run.schedule.total_steps
            if _is_due(run.step, settings.every_steps) or (last and settings.at_end):
                _validate_or_warn(run)
            requested = _collect_requests(run, requests, signals)
            if _is_due(run.step, run.config.checkpoints.every_steps) or last or requested.stop:
                saver.save()
            _serve_requests(run, saver, requests, requested)
            if requested.stop and not last:
                saver.wait()
                return _finish(run, started_s, requested.stop)
        saver.wait()
    return _finish(run, started_s, None)


def _train_step(run: TrainingRun, window: TrainingWindow) -> None:
    """One optimizer step, logged and reported."""
    plan, expert_state, started_s = (
        window.plan,
        run.expert_states[window.plan.expert_index],
        time.perf_counter() - window.waited_s,
    )
    if run.schedule.window_size_changes_at(plan.step):
        size = window_samples(plan.positions.start, run.schedule.ramp)  # the last window may be shorter than that
        text = ramp_change_text(size, run.config.train.batch_size, run.process_group.world_size)
        run.sink.emit(NoteEvent("ramp", text))
    rate = expert_state.optimizer.base_learning_rate * run.lr_factor(plan.step)
    with explain_out_of_memory(
        f"step {plan.step + 1} does", lambda: run.memory.out_of_memory_remedy(OUT_OF_MEMORY_REMEDY)
    ):
        result = train_window(
            expert_state,
            (_move_to_device(run, batch) for batch in window),
            samples=len(plan.positions),
            learning_rate=rate,
            options=run.step_options,
            reduction=run.process_group.reduction,
            micro_batches=plan.local_batches,
            seed=noise_seed(run.config.run.seed, plan.local_positions.start),
        )
    run.step += 1
    expert, samples = expert_state.expert.name, plan.positions.stop
    run.loss_log.append(LossRecord(run.step, samples, len(plan.positions), expert, result.loss, result.grad_norm, rate))
    took_s = time.perf_counter() - started_s  # what is reported takes time of its own, and may wait for somebody
    run.sink.emit(
        training.train_step_event(
            step=run.step,
            samples=samples,
            samples_in_window=len(plan.positions),
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            expert=expert,
            seconds=took_s,
            waited_s=window.waited_s,
        )
    )
    run.memory.after_step(run.step, run.sink)
    if run.offload is not None:
        if refusal := run.memory.new_refusal():
            run.offload.note_refusal(refusal)
        run.offload.after_window(expert, len(plan.positions), took_s - window.waited_s)
    if _is_due(run.step, RATES_EVERY_STEPS) or run.step == run.schedule.total_steps:
        _report_rates(run)
    _check_finite(run, result)


def _report_rates(run: TrainingRun) -> None:
    spreads = {trainee.expert.name: trainee.optimizer.learning_rate_spread() for trainee in run.expert_states}
    figures = {expert: spread.figures() for expert, spread in spreads.items() if spread is not None}
    if figures:
        run.sink.emit(training.train_rates_event(run.step, figures))


def _move_to_device(run: TrainingRun, batch: StepBatch) -> StepBatch:
    """The batch where the step computes. What lies in unified memory is on its way there, and was counted; a copy gets
    its hints here."""
    placed = batch.to(run.device)
    if placed is not batch:
        run.memory.hint_batch(placed)
    return placed


def _check_finite(run: TrainingRun, result: WindowResult) -> None:
    """Losses that are no numbers: each is told with its samples, and too many in a row end the run."""
    if result.finite or result.overflowed:
        run.nonfinite_windows = 0
        return
    run.nonfinite_windows += 1
    limit = run.config.train.max_nonfinite
    suspects = _suspects_text(run, result)
    description = f"step {run.step}: loss {result.loss}, gradient norm {result.grad_norm}; samples: {suspects}"
    if run.nonfinite_windows >= limit:
        raise NonFiniteError(
            f"{description}; {run.nonfinite_windows} windows in a row were not finite (train.max_nonfinite), and none of them changed "
            "a weight. Look at these samples, lower the learning rate, or resume from an earlier checkpoint"
        )
    run.sink.emit(
        WarningEvent(
            "train", f"{description}; the window is left out ({run.nonfinite_windows} in a row, {limit} end the run)"
        )
    )


def _suspects_text(run: TrainingRun, result: WindowResult) -> str:
    """The samples of all processes that may have spoilt a window, by name."""
    messages = run.process_group.all_gather(
        ",".join(map(str, (int(result.has_nonfinite_loss), *result.suspect_positions))).encode()
    )
    reports = [[int(number) for number in one.decode().split(",")] for one in messages]
    guilty = [position for one in reports if one[0] for position in one[1:]] or [p for one in reports for p in one[1:]]
    return ", ".join(map(run.collator.sample_name, guilty[:8])) + (" …" if len(guilty) > 8 else "")


def _validate_or_warn(run: TrainingRun) -> None:
    """A validation that is due. One that cannot be made is told: what was trained since the last checkpoint is not
    lost for it. (Before the first step it ends the run, which has nothing to lose then.)"""
    try:
        validate(run)
    except (TrainError, ModelError) as error:
        run.sink.emit(WarningEvent(f"validation of step {run.step}", f"left out: {error}"))
    release_unused_memory(run.device)  # only now does nothing hold what a failed one had loaded


@dataclass(frozen=True, slots=True)
class _ControlRequests:
    """What was asked for from outside since the last window, of whichever process."""

    stop: str | None
    validate: bool
    pending: tuple[RunRequest, ...]
    kinds: tuple[str, ...]
    """Of the requests: those of the first process, which answers them. All do what they ask for."""


def _collect_requests(run: TrainingRun, requests: RequestInbox | None, signals: TrainingSignals) -> _ControlRequests:
    """Looked at once: what comes from here on counts after the next window."""
    pending = () if requests is None else tuple(requests.pending())
    own_flags = [signals.stop_number, int(signals.pop_validate_request()), len(pending)]
    if not run.process_group.all_reduce_max([int(any(own_flags))])[
        0
    ]:  # as nearly always; one number travels faster than three
        return _ControlRequests(None, False, (), ())
    number, validation, count = run.process_group.all_reduce_max(own_flags)
    kinds: tuple[str, ...] = tuple(request.kind for request in pending)
    if count and run.process_group.world_size > 1:
        kinds_text = run.process_group.broadcast(",".join(kinds).encode() if requests is not None else None)
        kinds = tuple(kinds_text.decode().split(","))
    return _ControlRequests(TrainingSignals.signal_name(number), bool(validation), pending, kinds)


def _serve_requests(
    run: TrainingRun, saver: CheckpointSaver, requests: RequestInbox | None, requested: _ControlRequests
) -> None:
    """What was asked for from outside. A request that fails is answered so; it does not end the run."""
    if requested.validate:
        try:
            validate(run, on_request=True)
        except CollectiveError:
            raise
        except SuperTunerError as error:
            run.sink.emit(WarningEvent("SIGUSR1", str(error)))
    for number, kind in enumerate(requested.kinds):
        request = None if requests is None else requested.pending[number]
        done = f"{kind} of step {run.step}"
        if kind == "checkpoint":
            saver.save_on_request(
                None if requests is None or request is None else _answer_later(requests, request, done)
            )
            continue
        try:
            path = validate(run, on_request=True)
        except CollectiveError:
            raise
        except SuperTunerError as error:
            run.sink.emit(WarningEvent(f"request {kind}", str(error)))
            if requests is not None and request is not None:
                requests.refuse(request, str(error))
        else:
            if requests is not None and request is not None:
                requests.answer(request, done, path)
        release_unused_memory(run.device)


def _answer_later(requests: RequestInbox, request: RunRequest, done: str) -> SaveCallback:
    """A checkpoint that was asked for is written while training goes on: who asked is told once it is on disk."""
    requests.defer(request)

    def answer(made: Path | None, why: str) -> None:
        if made is None:
            requests.refuse(request, why)
        else:
            requests.answer(request, done, made)

    return answer


def _open_requests(run: TrainingRun) -> AbstractContextManager[RequestInbox | None]:
    """Those of people to the run; the first process answers them."""
    return RequestInbox(run.folder, run.sink) if run.process_group.rank == 0 else nullcontext(None)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and every > 0 and step % every == 0


def _finish(run: TrainingRun, started_s: float, stopped_by: str | None) -> TrainingOutcome:
    seconds = time.perf_counter() - started_s
    run.sink.emit(training.train_end_event(step=run.step, samples=run.samples_consumed, seconds=seconds))
    return TrainingOutcome(stopped_by, seconds)
