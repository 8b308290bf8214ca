"""Validates a run: held-out loss and samples, with the weights that would be exported. The run itself is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import CollectiveError, ModelError, PeerError, SuperTunerError, TrainError
from supertuner.core.events import NullSink, Sink
from supertuner.core.interrupts import interrupts_win
from supertuner.data.batching.decoder_pool import DecoderPool
from supertuner.data.batching.render import caption_for_sample
from supertuner.data.corpus import Corpus
from supertuner.data.ordering.micro_batches import MicroBatch, micro_batches
from supertuner.memory.out_of_memory import explain_out_of_memory
from supertuner.models.attention import use_backend
from supertuner.models.spec import Family, ModelDescription, ModelSampler, SampleRequest
from supertuner.plan import sample_requests as samples
from supertuner.sinks.training_events import HeldOutLoss, train_held_out_event
from supertuner.step.expert_setup import place_base_weights
from supertuner.step.parameter_state import HOST
from supertuner.train.run.training_run import SAMPLES_DIR, TrainingRun
from supertuner.train.validation import held_out_loss as held_out
from supertuner.train.validation import sample_images

ON_REQUEST_DIR = "asked"
"""Below `samples`: validations requested while the run trains, which are not part of its result."""


@interrupts_win()
def validate(run: TrainingRun, *, on_request: bool = False) -> Path:
    """Measure the held-out loss and make samples; returns the folder of the samples.

    If each rank holds the whole model, rank 0 does it and the others wait at their next window. If the weights are
    sharded, all ranks compute and rank 0 writes.
    """
    folder = run.context.run_dir / SAMPLES_DIR / ON_REQUEST_DIR if on_request else run.context.run_dir / SAMPLES_DIR
    if run.process_group.rank != 0 and not run.process_group.forward_is_collective:
        return folder / sample_images.samples_folder_name(run.step)
    remedy = partial(run.memory.out_of_memory_remedy, "lower validation.width, height or frames")
    explain_oom = partial(explain_out_of_memory, "samples do", remedy)
    weights = sample_images.select_evaluation_weights(run.expert_states, run.trainable_experts)
    if run.process_group.forward_is_collective:
        with _failure_ends_run(run), explain_oom():
            rows = _measure_held_out(run, weights)
        sampler = _build_sampler_on_all_ranks(run, explain_oom)
        with _failure_ends_run(run), explain_oom():
            sampler = _precompute_samples(run, sampler, weights)
        if run.process_group.rank == 0:
            _report_held_out(run, rows, on_request)
            _write_samples(run, sampler, sample_images.EvaluationWeights(weights.label), folder)
    else:
        with explain_oom():
            _report_held_out(run, _measure_held_out(run, weights), on_request)
            _write_samples(run, _build_sampler(run), weights, folder)
    return folder / sample_images.samples_folder_name(run.step)


@contextmanager
def _failure_ends_run(run: TrainingRun) -> Iterator[None]:
    """Turn an error into CollectiveError, which ends the run.

    Otherwise a failed validation does not end the run; but here other ranks are in the middle of the same pass. (An
    input that the model refuses is refused on all ranks, before the first pass: that error stays.)
    """
    try:
        yield
    except (ModelError, PeerError):
        raise
    except SuperTunerError as error:
        reason = "All ranks compute it together, so one rank cannot skip it"
        raise CollectiveError(f"validation of step {run.step}: {error}. {reason}") from error


def _build_sampler_on_all_ranks(
    run: TrainingRun, explain_oom: Callable[[], AbstractContextManager[None]]
) -> ModelSampler:
    """Build the sampler; TrainError on all ranks if it fails on one of them."""
    sampler, problem = None, ""
    try:
        with explain_oom():
            sampler = _build_sampler(run)
    except (TrainError, ModelError) as error:
        problem = str(error)
    if problems := [text.decode() for text in run.process_group.all_gather(problem.encode()) if text]:
        raise TrainError(problems[0])
    assert sampler is not None
    return sampler


def _build_sampler(run: TrainingRun) -> ModelSampler:
    modules = _expert_modules(run)
    with sample_images.preserve_training_state(modules.values()):
        return run.family.build_sampler(run.model, {**modules, **_load_untrained_experts(run)}, run.device, run.dtype)


def _precompute_samples(
    run: TrainingRun, sampler: ModelSampler, weights: sample_images.EvaluationWeights
) -> ModelSampler:
    """Compute all samples of the plan, and return a sampler that replays them.

    Needed where all ranks compute together: writing the files may then fail on one rank without leaving a pass early.
    """
    plan, title, frames = run.sample_plan, f"computing samples of step {run.step}", []
    with (
        sample_images.preserve_training_state(_expert_modules(run).values()),
        weights.applied(),
        run.context.progress.phase(title, items=len(plan), noun="generated samples") as phase,
    ):
        for _, _, request in plan.requests():
            frames.append(sampler.sample(request))
            phase.advance(1)
    return _PrecomputedSampler(iter(frames))


@dataclass(frozen=True, slots=True)
class _PrecomputedSampler:
    """Replays samples in the order of their plan."""

    frames: Iterator[NDArray[np.uint8]]

    def sample(self, request: SampleRequest) -> NDArray[np.uint8]:
        return next(self.frames)


def _expert_modules(run: TrainingRun) -> dict[str, nn.Module]:
    return {state.expert.component: state.module for state in run.expert_states}


def _report_held_out(run: TrainingRun, rows: list[HeldOutLoss], on_request: bool) -> None:
    if rows:
        run.context.sink.emit(train_held_out_event(run.step, rows))
        if not on_request:
            for row in rows:
                run.validation_log.append_line(held_out.encode_row(run.step, row))


def _write_samples(
    run: TrainingRun, sampler: ModelSampler, weights: sample_images.EvaluationWeights, folder: Path
) -> None:
    plan, modules = run.sample_plan, _expert_modules(run).values()
    event = sample_images.make_samples(
        plan, sampler, run.context, step=run.step, modules=modules, folder=folder, weights=weights
    )
    run.context.sink.emit(event)


def _load_untrained_experts(run: TrainingRun) -> dict[str, nn.Module]:
    """Load the experts that are not trained in the form of the trained ones, 8-bit or sharded: whole ones may not fit.

    Without quantization and sharding the sampler loads them itself.
    """
    kind, sharder = run.config.model.base_weights, run.process_group.sharder
    modules: dict[str, nn.Module] = {}
    for expert in run.model.experts:
        if expert in run.experts or (kind == "as_computed" and sharder is None):
            continue
        device = HOST if sharder is not None else run.device
        place = partial(place_base_weights, kind=kind, device=device, sink=NullSink())
        module = run.family.load_denoiser(run.model, expert, run.dtype, place)
        use_backend(module, run.config.model.attention)
        if sharder is not None:
            sharder.shard_module(module)
        modules[expert.component] = module
    return modules


def plan_validation(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    corpus: Corpus,
    held_out_corpus: Corpus | None,
    sink: Sink,
) -> samples.ValidationSamplePlan:
    """The samples of every validation of the run.

    TrainError for a configured size that the model cannot produce: now, not at the first validation. A size that is not
    configured is that of a bucket, and buckets are checked elsewhere.
    """
    image = None if config.validation.image is None else load_start_image(config.validation.image, model)
    planned = samples.plan_validation_samples(
        config.validation,
        default_size=samples.largest_sample_size(group.bucket for group in corpus.order.groups),
        held_out=() if held_out_corpus is None else _captioned_samples(held_out_corpus, model, image),
        training_data=_captioned_samples(corpus, model, image),
        sink=sink,
    )
    if config.validation.width is not None or config.validation.frames is not None:
        require_possible_size(family, model, planned.size)
    return planned


def require_possible_size(family: Family, model: ModelDescription, size: samples.SampleSize) -> None:
    """TrainError if the model cannot produce samples of this size."""
    frames = () if size.frames == 1 else (size.frames,)
    if reason := family.unsupported_reason(model, (3, *frames, size.height, size.width)):
        values = f"{size.width}, {size.height} and {size.frames}"
        problem = f"validation.width, height and frames are {values}, which the model cannot produce"
        raise TrainError(f"{problem}: {reason}; change them")


def load_start_image(path: Path, model: ModelDescription) -> NDArray[np.uint8]:
    """The image file that samples start from or edit (HWC). TrainError if the model has no use for it."""
    if not (model.needs_first_frame or model.edits_images):
        raise TrainError(f"validation.image is {path}, but the model ({model.title}) starts from no image; remove it")
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise TrainError(f"validation.image: {path} cannot be read as an image: {error}") from error


def _captioned_samples(
    corpus: Corpus, model: ModelDescription, image: NDArray[np.uint8] | None = None
) -> Iterator[samples.CaptionedSample]:
    """The first samples in the order of training, with captions, and with a start image if the model needs one:
    `image`, or one of the data.

    Each caption comes once: decoding hundreds of clips with equal captions would take minutes.
    """
    order, seen_captions = corpus.order, set[str]()
    for micro_batch in micro_batches(order, range(min(samples.MAX_SAMPLES_SEARCHED, order.epoch_length(0))), 1):
        draws = micro_batch.draws
        dataset = corpus.dataset_of_group(int(draws.group[0]))
        caption = caption_for_sample(corpus.seed, dataset, int(draws.sample[0]), int(draws.cycle[0]))
        if caption.strip() not in seen_captions:
            seen_captions.add(caption.strip())
            start_image = _start_image(corpus, micro_batch, model) if image is None else image
            yield samples.CaptionedSample(caption, start_image)


def _start_image(corpus: Corpus, micro_batch: MicroBatch, model: ModelDescription) -> NDArray[np.uint8] | None:
    """The image that a sample starts from: its first frame, or the reference image that the model edits."""
    references = corpus.dataset_of_group(int(micro_batch.draws.group[0])).references
    if model.edits_images and references is not None:
        image_CHW = references.load_image(int(micro_batch.draws.sample[0]))
    elif model.needs_first_frame:
        with DecoderPool(corpus, 1) as decoders:
            media = decoders.decode(micro_batch).media[0]
        image_CHW = media[:, 0] if media.ndim == 4 else media
    else:
        return None
    return np.ascontiguousarray(image_CHW.permute(1, 2, 0).numpy())


def _measure_held_out(run: TrainingRun, weights: sample_images.EvaluationWeights) -> list[HeldOutLoss]:
    collator, settings = run.held_out_collator, run.config.validation
    if collator is None:
        return []
    sigmas_by_expert = held_out.plan_sigmas(run.experts, settings.held_out_levels, run.context.sink)
    count, batch_size, seed = settings.held_out_samples, run.config.train.batch_size, run.config.run.seed
    rows, title = list[HeldOutLoss](), f"held-out loss of step {run.step}"
    with (
        sample_images.preserve_training_state(_expert_modules(run).values()),
        weights.applied(),
        run.context.progress.phase(title, items=len(run.experts), noun="experts") as phase,
    ):
        for state in run.expert_states:
            batches = held_out.held_out_batches(collator, state.expert, count, batch_size)
            sigmas = sigmas_by_expert[state.expert.name]
            rows += held_out.measure_held_out(state, batches, sigmas, seed=seed, step_options=run.step_options)
            phase.advance(1)
    return held_out.append_means(rows)
