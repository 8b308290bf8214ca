"""The loop: window after window, one optimizer step each; what is due is done between two windows and changes nothing.

Validation comes before a checkpoint of the same step: what a checkpoint says is done, is done. So a run that was killed
at any moment and resumed ends with the same files as one that was not.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from supertuner.core.errors import ModelError, NotFinite, OutOfStep, SuperTunerError, TrainError
from supertuner.core.events import Noted, Warned
from supertuner.models.objective.diffusion import noise_seed
from supertuner.optim.schedule import change_text, window_samples
from supertuner.runs.requests import Request, Requests
from supertuner.sinks import training
from supertuner.step.batch import StepBatch
from supertuner.step.window import WindowResult, train_window
from supertuner.train.checkpoint.async_saver import Saver
from supertuner.train.checkpoint.save_job import Answer
from supertuner.train.dataloader import Window
from supertuner.train.loss_log import LossRecord
from supertuner.train.out_of_memory import fitting, release
from supertuner.train.run import Run
from supertuner.train.signals import Signals
from supertuner.train.validation.validate import validate

RATES_EVERY_STEPS = 10
"""How often the rates of single weights are counted, where they have their own: it reads them all."""
LESS_MEMORY = 'lower train.batch_size, set train.gradient_checkpointing: true, or model.base_weights: "int8"'


@dataclass(frozen=True, slots=True)
class Ending:
    """How the loop ended."""

    stopped_by: str | None
    """The signal that stopped it; None: all steps are done."""
    seconds: float


def train(run: Run) -> Ending:
    """Train from the run's step to its end, or until a signal asks to stop."""
    begun = time.perf_counter()
    settings = run.config.validation
    with Signals() as signals, _requests(run) as requests, Saver(run) as saver, run.feed() as feed:
        run.sink.emit(
            training.began(
                step=run.step, steps=run.course.total_steps, samples=run.samples, samples_total=run.course.total_samples
            )
        )
        if run.step == 0 and settings.at_start:
            validate(run)
        for window in feed:
            _train(run, window)
            saver.settle()
            last = run.step == run.course.total_steps
            if _due(run.step, settings.every_steps) or (last and settings.at_end):
                _validate(run)
            asked = _asked(run, requests, signals)
            if _due(run.step, run.config.checkpoints.every_steps) or last or asked.stop:
                saver.save()
            _serve(run, saver, requests, asked)
            if asked.stop and not last:
                saver.wait()
                return _ended(run, begun, asked.stop)
        saver.wait()
    return _ended(run, begun, None)


def _train(run: Run, window: Window) -> None:
    """One optimizer step, logged and reported."""
    plan, trainee, begun = window.plan, run.trainees[window.plan.expert], time.perf_counter() - window.waited_s
    if run.course.changes_at(plan.step):
        size = window_samples(plan.positions.start, run.course.ramp)  # the last window may be shorter than that
        text = change_text(size, run.config.train.batch_size, run.parallel.ranks)
        run.sink.emit(Noted("ramp", text))
    rate = trainee.optimizer.base_rate * run.factor(plan.step)
    with fitting(f"step {plan.step + 1} does", lambda: run.memory.remedy(LESS_MEMORY)):
        result = train_window(
            trainee,
            (_placed(run, batch) for batch in window),
            samples=len(plan.positions),
            rate=rate,
            rules=run.rules,
            reduction=run.parallel.reduction,
            micro_batches=plan.batches,
            seed=noise_seed(run.config.run.seed, plan.share.start),
        )
    run.step += 1
    expert, samples = trainee.expert.name, plan.positions.stop
    run.losses.append(LossRecord(run.step, samples, len(plan.positions), expert, result.loss, result.grad_norm, rate))
    took_s = time.perf_counter() - begun  # what is reported takes time of its own, and may wait for somebody
    run.sink.emit(
        training.stepped(
            step=run.step,
            samples=samples,
            samples_in_window=len(plan.positions),
            loss=result.loss,
            grad_norm=result.grad_norm,
            rate=rate,
            expert=expert,
            seconds=took_s,
            waited_s=window.waited_s,
        )
    )
    run.memory.after_step(run.step, run.sink)
    if run.acts is not None:
        if refusal := run.memory.new_refusal():
            run.acts.refused(refusal)
        run.acts.after_window(expert, len(plan.positions), took_s - window.waited_s)
    if _due(run.step, RATES_EVERY_STEPS) or run.step == run.course.total_steps:
        _report_rates(run)
    _judge(run, result)


def _report_rates(run: Run) -> None:
    spreads = {trainee.expert.name: trainee.optimizer.spread() for trainee in run.trainees}
    figures = {expert: spread.figures() for expert, spread in spreads.items() if spread is not None}
    if figures:
        run.sink.emit(training.measured_rates(run.step, figures))


def _placed(run: Run, batch: StepBatch) -> StepBatch:
    """The batch where the step computes. What lies in unified memory is on its way there, and was counted; a copy gets
    its hints here."""
    placed = batch.to(run.device)
    if placed is not batch:
        run.memory.about_to_use(placed)
    return placed


def _judge(run: Run, result: WindowResult) -> None:
    """Losses that are no numbers: each is told with its samples, and too many in a row end the run."""
    if result.finite or result.overflowed:
        run.nonfinite = 0
        return
    run.nonfinite += 1
    most = run.config.train.max_nonfinite
    suspects = _suspects(run, result)
    what = f"step {run.step}: loss {result.loss}, gradient norm {result.grad_norm}; samples: {suspects}"
    if run.nonfinite >= most:
        raise NotFinite(
            f"{what}; {run.nonfinite} windows in a row were not finite (train.max_nonfinite), and none of them changed "
            "a weight. Look at these samples, lower the learning rate, or resume from an earlier checkpoint"
        )
    run.sink.emit(Warned("train", f"{what}; the window is left out ({run.nonfinite} in a row, {most} end the run)"))


def _suspects(run: Run, result: WindowResult) -> str:
    """The samples of all processes that may have spoilt a window, by name."""
    said = run.parallel.gather(",".join(map(str, (int(result.guilty), *result.suspects))).encode())
    found = [[int(number) for number in one.decode().split(",")] for one in said]
    guilty = [position for one in found if one[0] for position in one[1:]] or [p for one in found for p in one[1:]]
    return ", ".join(map(run.maker.name, guilty[:8])) + (" …" if len(guilty) > 8 else "")


def _validate(run: Run) -> None:
    """A validation that is due. One that cannot be made is told: what was trained since the last checkpoint is not
    lost for it. (Before the first step it ends the run, which has nothing to lose then.)"""
    try:
        validate(run)
    except (TrainError, ModelError) as error:
        run.sink.emit(Warned(f"validation of step {run.step}", f"left out: {error}"))
    release(run.device)  # only now does nothing hold what a failed one had loaded


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for from outside since the last window, of whichever process."""

    stop: str | None
    validate: bool
    pending: tuple[Request, ...]
    kinds: tuple[str, ...]
    """Of the requests: those of the first process, which answers them. All do what they ask for."""


def _asked(run: Run, requests: Requests | None, signals: Signals) -> _Asked:
    """Looked at once: what comes from here on counts after the next window."""
    pending = () if requests is None else tuple(requests.pending())
    own = [signals.number, int(signals.take_validate()), len(pending)]
    if not run.parallel.agree([int(any(own))])[0]:  # as nearly always; one number travels faster than three
        return _Asked(None, False, (), ())
    number, validation, count = run.parallel.agree(own)
    kinds: tuple[str, ...] = tuple(request.kind for request in pending)
    if count and run.parallel.ranks > 1:
        said = run.parallel.told(",".join(kinds).encode() if requests is not None else None)
        kinds = tuple(said.decode().split(","))
    return _Asked(Signals.name_of(number), bool(validation), pending, kinds)


def _serve(run: Run, saver: Saver, requests: Requests | None, asked: _Asked) -> None:
    """What was asked for from outside. A request that fails is answered so; it does not end the run."""
    if asked.validate:
        try:
            validate(run, asked=True)
        except OutOfStep:
            raise
        except SuperTunerError as error:
            run.sink.emit(Warned("SIGUSR1", str(error)))
    for number, kind in enumerate(asked.kinds):
        request = None if requests is None else asked.pending[number]
        done = f"{kind} of step {run.step}"
        if kind == "checkpoint":
            saver.ask(None if requests is None or request is None else _answer_later(requests, request, done))
            continue
        try:
            path = validate(run, asked=True)
        except OutOfStep:
            raise
        except SuperTunerError as error:
            run.sink.emit(Warned(f"request {kind}", str(error)))
            if requests is not None and request is not None:
                requests.refuse(request, str(error))
        else:
            if requests is not None and request is not None:
                requests.answer(request, done, path)
        release(run.device)


def _answer_later(requests: Requests, request: Request, done: str) -> Answer:
    """A checkpoint that was asked for is written while training goes on: who asked is told once it is on disk."""
    requests.take(request)

    def answer(made: Path | None, why: str) -> None:
        if made is None:
            requests.refuse(request, why)
        else:
            requests.answer(request, done, made)

    return answer


def _requests(run: Run) -> AbstractContextManager[Requests | None]:
    """Those of people to the run; the first process answers them."""
    return Requests(run.folder, run.sink) if run.parallel.rank == 0 else nullcontext(None)


def _due(step: int, every: int | None) -> bool:
    return every is not None and every > 0 and step % every == 0


def _ended(run: Run, begun: float, stopped_by: str | None) -> Ending:
    seconds = time.perf_counter() - begun
    run.sink.emit(training.ended(step=run.step, samples=run.samples, seconds=seconds))
    return Ending(stopped_by, seconds)
