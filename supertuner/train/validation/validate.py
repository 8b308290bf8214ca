"""A validation of a run: held-out loss and samples with the weights that would be exported; the run stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from supertuner.config.settings.tree import RunConfig
from supertuner.core.errors import ModelError, OutOfStep, PeerError, SuperTunerError, TrainError
from supertuner.core.events import Sink
from supertuner.data.batching.batches import Decoders
from supertuner.data.batching.render import caption_of
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.windows import MicroBatch, micro_batches
from supertuner.models.attention import use_backend
from supertuner.models.quantise import quantise
from supertuner.models.spec import Family, Model, Sampler
from supertuner.plan.sample_requests import LOOKED_AT, Captioned, SamplePlan, largest, plan_samples
from supertuner.sinks.training import HeldOut, measured_held_out
from supertuner.train.out_of_memory import fitting, release
from supertuner.train.run import SAMPLES, Run
from supertuner.train.validation import held_out_loss as held_out
from supertuner.train.validation.sample_images import (
    Weights,
    evaluated,
    folder_name,
    made_ahead,
    make_samples,
    undisturbed,
)

ASKED = "asked"
"""Below `samples`, what somebody asked for while the run went on: no part of its result."""


def validate(run: Run, *, asked: bool = False) -> Path:
    """Measure the held-out loss, make samples; the folder of the samples. Where each process has the whole model, the
    first does it, and the others wait at their next window; else all compute, and the first writes."""
    folder = run.folder / SAMPLES / ASKED if asked else run.folder / SAMPLES
    if run.parallel.rank != 0 and not run.parallel.in_step:
        return folder / folder_name(run.step)
    fits = partial(fitting, "samples do", partial(run.memory.remedy, "lower validation.width, height or frames"))
    weights = evaluated(run.trainees, run.trained)
    if run.parallel.in_step:
        with _together(run), fits():
            rows = _held_out(run, weights)
        sampler = _agreed(run, fits)
        with _together(run), fits():
            sampler = _made_ahead(run, sampler, weights)
        if run.parallel.rank == 0:
            _tell(run, rows, asked)
            _write(run, sampler, Weights(weights.label), folder)
    else:
        with fits():
            _tell(run, _held_out(run, weights), asked)
            _write(run, _sampler(run), weights, folder)
    release(run.device)
    return folder / folder_name(run.step)


@contextmanager
def _together(run: Run) -> Iterator[None]:
    """A validation may fail and the run go on, but not where other processes are in the middle of the same pass. (What
    the model itself refuses, it refuses in all of them, before the first.)"""
    try:
        yield
    except (ModelError, PeerError):
        raise
    except SuperTunerError as error:
        raise OutOfStep(
            f"validation of step {run.step}: {error}. All processes make it together, so none can leave it out"
        ) from error


def _agreed(run: Run, fits: Callable[[], AbstractContextManager[None]]) -> Sampler:
    """Who makes the samples; TrainError in all processes if one of them has nobody."""
    made, why = None, ""
    try:
        with fits():
            made = _sampler(run)
    except (TrainError, ModelError) as error:
        why = str(error)
    if problems := [said.decode() for said in run.parallel.gather(why.encode()) if said]:
        raise TrainError(problems[0])
    assert made is not None
    return made


def _sampler(run: Run) -> Sampler:
    modules = _modules(run)
    with undisturbed(modules.values()):
        return run.family.sampler(run.model, {**modules, **_others(run)}, run.device, run.dtype)


def _made_ahead(run: Run, sampler: Sampler, weights: Weights) -> Sampler:
    modules = _modules(run).values()
    return made_ahead(run.samples_plan, sampler, step=run.step, modules=modules, progress=run.progress, weights=weights)


def _modules(run: Run) -> dict[str, nn.Module]:
    return {trainee.expert.part: trainee.module for trainee in run.trainees}


def _tell(run: Run, rows: list[HeldOut], asked: bool) -> None:
    if rows:
        run.sink.emit(measured_held_out(run.step, rows))
        if not asked:
            for row in rows:
                run.validations.append_line(held_out.line_of(run.step, row))


def _write(run: Run, sampler: Sampler, weights: Weights, folder: Path) -> None:
    made = make_samples(
        run.samples_plan,
        sampler,
        run=run.name,
        step=run.step,
        modules=_modules(run).values(),
        folder=folder,
        progress=run.progress,
        weights=weights,
    )
    run.sink.emit(made)


def _others(run: Run) -> dict[str, nn.Module]:
    """Experts that are not trained: in 8 bits or shared out if the trained ones are, as there may be no room for more.
    Otherwise the sampler loads them itself."""
    kind, sharing = run.config.model.base_weights, run.parallel.sharing
    found: dict[str, nn.Module] = {}
    for expert in run.model.experts:
        if expert in run.experts or (kind == "as_computed" and sharing is None):
            continue
        module = run.family.denoiser(run.model, expert, run.dtype)
        use_backend(module, run.config.model.attention)
        if sharing is not None:
            sharing.share(module)
        elif kind != "as_computed":
            quantise(module.to(run.device), kind, run.device)
        found[expert.part] = module
    return found


def plan(
    config: RunConfig, family: Family, model: Model, corpus: Corpus, other: Corpus | None, sink: Sink
) -> SamplePlan:
    """What is sampled at every validation of the run; `other` is held-out data.

    A size that the model cannot make is refused now, not at the first validation. One that nobody set is a bucket's,
    and buckets are judged as such.
    """
    planned = plan_samples(
        config.validation,
        default=largest(group.bucket for group in corpus.order.groups),
        held_out=() if other is None else _captioned(other, model),
        data=_captioned(corpus, model),
        sink=sink,
    )
    size, settings = planned.size, config.validation
    if settings.width is None and settings.frames is None:
        return planned
    frames = () if size.frames == 1 else (size.frames,)
    if why := family.why_not(model, (3, *frames, size.height, size.width)):
        raise TrainError(
            f"validation.width, height and frames are {size.width}, {size.height} and {size.frames}, of which the "
            f"model can make no sample: {why}; change them"
        )
    return planned


def _captioned(corpus: Corpus, model: Model) -> Iterator[Captioned]:
    """The first samples in the order of training, with their captions, and what they start from if that is needed.

    A caption comes once: to decode hundreds of clips because all of them are called the same would take minutes.
    """
    order, told = corpus.order, set[str]()
    for micro in micro_batches(order, range(min(LOOKED_AT, order.epoch_length(0))), 1):
        part = corpus.parts[order.groups[int(micro.draws.group[0])].dataset]
        caption = caption_of(corpus.seed, part, int(micro.draws.sample[0]), int(micro.draws.cycle[0]))
        if caption.strip() in told:
            continue
        told.add(caption.strip())
        yield Captioned(caption, _shown(corpus, micro, model))


def _shown(corpus: Corpus, micro: MicroBatch, model: Model) -> NDArray[np.uint8] | None:
    """What a sample starts from: the first frame, or the picture that is changed."""
    part = corpus.parts[corpus.order.groups[int(micro.draws.group[0])].dataset]
    if model.edits and part.originals is not None:
        original_CHW = part.originals.picture(int(micro.draws.sample[0]))
        return np.ascontiguousarray(original_CHW.permute(1, 2, 0).numpy())
    return _first_frame(corpus, micro) if model.starts_from_frame else None


def _first_frame(corpus: Corpus, micro: MicroBatch) -> NDArray[np.uint8]:
    with Decoders(corpus, 1) as decoders:
        media = decoders.make(micro).media[0]
    frame_CHW = media[:, 0] if media.ndim == 4 else media
    return np.ascontiguousarray(frame_CHW.permute(1, 2, 0).numpy())


def _held_out(run: Run, weights: Weights) -> list[HeldOut]:
    maker, settings = run.held_out, run.config.validation
    if maker is None:
        return []
    levels = held_out.plan_levels(run.experts, settings.held_out_levels, run.sink)
    modules = [trainee.module for trainee in run.trainees]
    title = f"held-out loss of step {run.step}"
    rows: list[HeldOut] = []
    with (
        undisturbed(modules),
        weights.applied(),
        run.progress.phase(title, items=len(modules), noun="experts") as phase,
    ):
        for trainee in run.trainees:
            batch_size = run.config.train.batch_size
            probes = held_out.probes(maker, trainee.expert, samples=settings.held_out_samples, batch_size=batch_size)
            own = levels[trainee.expert.name]
            rows += held_out.measure(trainee, probes, own, seed=run.config.run.seed, rules=run.rules)
            phase.advance(1)
    return held_out.with_means(rows)
