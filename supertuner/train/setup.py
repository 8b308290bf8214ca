"""Builds a run in phases, each of which needs the result of the one before: the only place that knows all packages.

    check_run     CheckedRun      settings, model, device and checkpoint fit together; nothing is staged or loaded
    open_data     RunData         samples are staged, and the schedule follows from them
    encode        EncodedData     caches are filled, so batches can be made
    load_experts  LoadedExperts   weights are loaded, and offload plans applied
    start_run     TrainingRun     the loop may begin, at step 0 or after the checkpoint

Whatever can be refused is refused in the earliest phase that can know it: encoding may take hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import xxhash
from torch import nn

from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import DecisionEvent, NoteEvent, Sink
from supertuner.data.corpus import Corpus
from supertuner.data.corpus_loader import open_corpus, select_datasets
from supertuner.distributed.node import open_node_peers
from supertuner.distributed.process_group import ProcessGroup, SingleProcess, rank_zero_first
from supertuner.distributed.same_start import require_same_data, require_same_unsharded_weights, require_same_weights
from supertuner.memory.out_of_memory import explain_out_of_memory
from supertuner.models import loading
from supertuner.models.adapters.attach import TrainableExpert
from supertuner.models.adapters.existing_adapters import (
    ExistingAdapter,
    frozen_layer_merger,
    load_initial_values,
    merge_summary,
)
from supertuner.models.fingerprint import fingerprint
from supertuner.models.objective.from_settings import timestep_distribution
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim.schedule import TrainingSchedule, build_training_schedule, ramp_text
from supertuner.plan.placement.run_plans import RunPlanner
from supertuner.plan.sample_requests import ValidationSamplePlan
from supertuner.runs.loss_files import HELD_OUT_FILE, LOSSES_FILE
from supertuner.step import expert_setup
from supertuner.step.batch import StepBatch
from supertuner.step.parameter_state import HOST
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState
from supertuner.train import run_checks
from supertuner.train.checkpoint.load import LoadedCheckpoint
from supertuner.train.checkpoint.resume import find_resume_checkpoint, restore_run, saved_revision, saved_world_size
from supertuner.train.encoding.corpus_caches import open_encoded_corpus
from supertuner.train.encoding.encoders import EncoderFingerprints, EncodingSpec
from supertuner.train.export.adapter_init import load_initial_adapters
from supertuner.train.offload.manager import OffloadManager, loading_device, plan_experts
from supertuner.train.offload.transfer import create_transfer
from supertuner.train.run.dataloader import BatchCollator, batches_ahead
from supertuner.train.run.loss_log import open_loss_log
from supertuner.train.run.loss_weights import build_loss_weights
from supertuner.train.run.memory_engine import MemoryEngine, limit_pool_use, open_memory
from supertuner.train.run.model_source import open_model
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.validation.validate import plan_validation

FINGERPRINTS_FILE = ".fingerprints.json"
"""Below `run.output_dir`: fingerprints of model files by their names, sizes and modification times."""


@dataclass(frozen=True, eq=False, slots=True)
class CheckedRun:
    """Made by `check_run`: the settings fit the model and the machine. Nothing is staged, encoded or loaded yet."""

    config: RunConfig
    context: RunContext
    """Without the peers of the node, which `open_data` finds."""
    process_group: ProcessGroup
    planner: RunPlanner | None
    precision: ComputePrecision
    family: Family
    model: ModelDescription
    experts: tuple[Expert, ...]
    """Those that are trained."""
    resume_from: LoadedCheckpoint | None
    """None: the run begins at step 0."""
    initial_weight_digests: Mapping[str, str]
    """`expert: setting` of each adapter file that the run starts from → digest of its tensors."""


@dataclass(frozen=True, eq=False, slots=True)
class RunData:
    """Made by `open_data`: the samples are staged, and the schedule follows from them."""

    checked: CheckedRun
    context: RunContext
    """With the peers of the node."""
    memory: MemoryEngine
    corpus: Corpus
    held_out_corpus: Corpus | None
    initial_world_size: int
    schedule: TrainingSchedule
    sample_plan: ValidationSamplePlan


@dataclass(frozen=True, eq=False, slots=True)
class EncodedData:
    """Made by `encode`: the caches hold what the run needs, and batches can be made."""

    data: RunData
    collator: BatchCollator
    held_out_collator: BatchCollator | None


@dataclass(frozen=True, eq=False, slots=True)
class LoadedExperts:
    """Made by `load_experts`: each expert is in the memory where its plan wants it."""

    encoded: EncodedData
    trainable_experts: Mapping[str, TrainableExpert]
    expert_states: tuple[ExpertState, ...]
    offload: OffloadManager | None


@contextmanager
def open_run(
    config: RunConfig,
    context: RunContext,
    *,
    resume: str | None = None,
    process_group: ProcessGroup | None = None,
    planner: RunPlanner | None = None,
) -> Iterator[TrainingRun]:
    """All phases: yields a run that is ready for its loop, and closes it at the end.

    `resume` overrides `checkpoints.resume`. The run's name is that of `context.run_dir`.
    """
    resume = resume or config.checkpoints.resume
    checked = check_run(config, context, resume, process_group or SingleProcess(), planner)
    with open_data(checked) as data, encode(data) as encoded, start_run(load_experts(encoded)) as run:
        yield run


def check_run(
    config: RunConfig, context: RunContext, resume: str, process_group: ProcessGroup, planner: RunPlanner | None
) -> CheckedRun:
    """First phase: refuse what cannot work, and find the checkpoint to resume from."""
    sink = context.sink
    device = run_checks.select_device(config.train.device)
    precision = ComputePrecision(config.train.mixed_precision, device, caches_casts=process_group.sharder is None)
    if process_group.sharder is not None:
        from supertuner.distributed.fsdp import require_fsdp_supported

        require_fsdp_supported(config, device)
    resume_from = find_resume_checkpoint(context, resume, process_group)
    revision = None if resume_from is None else saved_revision(resume_from)
    with rank_zero_first(process_group):  # rank 0 writes a tiny model into the run's folder
        family, model = open_model(config, context.run_dir, revision)
    sink.emit(DecisionEvent("model", model.title, f"read from {model.source.path}"))
    sink.emit(DecisionEvent("train.device", str(device), run_checks.device_reason(config.train.device)))
    sink.emit(run_checks.export_decision(config))
    experts = expert_setup.selected_experts(config, model)
    run_checks.require_expert_settings(config, model, sink)
    run_checks.require_backends(config, experts, precision)
    digests = run_checks.check_against_meta_modules(config, family, model, experts)
    return CheckedRun(config, context, process_group, planner, precision, family, model, experts, resume_from, digests)


@contextmanager
def open_data(checked: CheckedRun) -> Iterator[RunData]:
    """Second phase: stage the samples, and derive the schedule and the validation samples from them."""
    config, process_group = checked.config, checked.process_group
    with ExitStack() as stack:
        # First, so that it is closed last: the peers are informed if anything below fails.
        peers = stack.enter_context(open_node_peers(config, process_group))
        context = checked.context.with_peers(peers)
        memory = stack.enter_context(open_memory(config, checked.precision.device, context))
        corpora = [
            stack.enter_context(open_corpus(datasets, context))
            for held_out in (False, True)
            if (datasets := select_datasets(config, held_out=held_out)) is not None
        ]
        corpus, held_out_corpus = corpora[0], corpora[1] if len(corpora) > 1 else None
        require_same_data(process_group, peers, corpora)
        world_size = _choose_initial_world_size(checked)
        schedule = build_training_schedule(config, corpus.order.epoch_begin, world_size)
        context.sink.emit(DecisionEvent("train.steps", schedule.total_steps, schedule.end_reason))
        if schedule.ramp.grows:
            text = ramp_text(schedule.ramp, config.train.batch_size, process_group.world_size)
            context.sink.emit(NoteEvent("ramp", text))
        samples = plan_validation(config, checked.family, checked.model, corpus, held_out_corpus, context.sink)
        yield RunData(checked, context, memory, corpus, held_out_corpus, world_size, schedule, samples)


@contextmanager
def encode(data: RunData) -> Iterator[EncodedData]:
    """Third phase: encode the samples that are not cached yet."""
    checked, context, schedule, remedy = data.checked, data.context, data.schedule, data.memory.out_of_memory_remedy
    # The encoders' files have gigabytes: rank 0 of the node reads them, the others find its fingerprints.
    with context.peers.first_rank_first("fingerprints of encoders", context.progress):
        encoding = build_encoding_spec(checked.config, checked.family, checked.model, checked.precision, remedy)
    prefetch, reason = batches_ahead(checked.config, checked.precision.device)
    context.sink.emit(DecisionEvent("loader.prefetch_batches", prefetch, reason))
    with ExitStack() as stack:
        first = schedule.samples_after(0 if checked.resume_from is None else checked.resume_from.step)
        positions = range(first, schedule.total_samples)
        collator = stack.enter_context(_open_collator(data, encoding, data.corpus, positions, data.memory.place_batch))
        held_out_collator = None
        if (corpus := data.held_out_corpus) is not None:
            count = min(checked.config.validation.held_out_samples, corpus.order.epoch_length(0))
            # Held-out batches get their noise later, on the CPU: they are only pinned, not sent to the GPU yet.
            opening = _open_collator(data, encoding, corpus, range(count), StepBatch.pinned)
            held_out_collator = stack.enter_context(opening)
        yield EncodedData(data, collator, held_out_collator)


def load_experts(encoded: EncodedData) -> LoadedExperts:
    """Fourth phase: load the trained experts, each to the memory where its plan wants it, and apply the plans.

    Sharded weights have no plan. On several ranks that each hold all weights, a plan stays what it is at the start:
    re-planning on one rank only would place its gradients differently from the other ranks.
    """
    data, checked = encoded.data, encoded.data.checked
    config, precision, sharder = checked.config, checked.precision, checked.process_group.sharder
    one_pool, sink = bool(data.memory.facts.one_pool), data.context.sink
    limit_pool_use(data.memory.facts, precision.device, data.context)  # again: caches and staged files are there by now
    planned = {}
    if sharder is None:
        planned = plan_experts(config, checked.model, checked.experts, checked.planner, sink, one_pool=one_pool)
    trainable_experts = {}
    for expert in checked.experts:
        load_to = HOST if sharder is not None else loading_device(config, planned.get(expert.name), precision.device)
        trainable = _load_trainable_expert(data, expert, load_to)
        if sharder is not None:
            require_same_unsharded_weights(checked.process_group, trainable)
            trainable = sharder.shard_expert(trainable)
        trainable_experts[expert.name] = trainable
    expert_states = tuple(
        expert_setup.build_expert_state(config, expert, trainable_experts[expert.name], precision)
        for expert in checked.experts
    )
    if sharder is not None and config.plan.act != "never" and config.plan.idle_experts != "gpu":
        sharder.enable_expert_swap(expert_states)
    if not planned:
        return LoadedExperts(encoded, trainable_experts, expert_states, None)
    replanner = checked.planner if checked.process_group.world_size == 1 else None
    replan, check_every = None if replanner is None else replanner.replan, config.plan.check_every_windows
    advice = 'set model.base_weights: "int8"' if one_pool else 'set plan.weights: "streamed"'
    remedy = partial(data.memory.out_of_memory_remedy, advice)
    with explain_out_of_memory("what the plan keeps on the device does", remedy):
        transfer = create_transfer(precision.device)
        offload = OffloadManager(expert_states, planned, transfer, sink, check_every=check_every, replan=replan)
    return LoadedExperts(encoded, trainable_experts, expert_states, offload)


@contextmanager
def start_run(loaded: LoadedExperts) -> Iterator[TrainingRun]:
    """Last phase: open the logs, and restore the checkpoint if there is one."""
    encoded, data, checked = loaded.encoded, loaded.encoded.data, loaded.encoded.data.checked
    run_dir, rank = data.context.run_dir, checked.process_group.rank
    config, family, model, precision = checked.config, checked.family, checked.model, checked.precision
    place_state, sink = partial(data.memory.allocating, "state"), data.context.sink
    torch.manual_seed(config.run.seed)  # for libraries that draw from the global generators; a checkpoint restores them
    with open_loss_log(run_dir / LOSSES_FILE, rank) as losses, open_loss_log(run_dir / HELD_OUT_FILE, rank) as held_out:
        run = TrainingRun(
            config=config,
            context=data.context,
            device=precision.device,
            dtype=precision.dtype,
            process_group=checked.process_group,
            initial_world_size=data.initial_world_size,
            family=family,
            model=model,
            schedule=data.schedule,
            step_options=expert_setup.build_step_options(config, family, model, precision, sink, place_state),
            collator=encoded.collator,
            held_out_collator=encoded.held_out_collator,
            expert_states=loaded.expert_states,
            trainable_experts=loaded.trainable_experts,
            loss_log=losses,
            validation_log=held_out,
            sample_plan=data.sample_plan,
            memory=data.memory,
            offload=loaded.offload,
            initial_weight_digests=checked.initial_weight_digests,
        )
        if checked.resume_from is None:
            run.loss_log.reset()
            run.validation_log.reset()
        else:
            restore_run(run, checked.resume_from)
            sink.emit(NoteEvent("resume", f"going on after step {run.step}, from {checked.resume_from.path}"))
        require_same_weights(run.process_group, run.step, run.trainable_experts)
        yield run


def build_encoding_spec(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    precision: ComputePrecision,
    remedy: Callable[[str], str],
) -> EncodingSpec:
    """The encoders of a run. `remedy` extends the advice of an out-of-memory error
    (`MemoryEngine.out_of_memory_remedy`)."""
    fingerprints = encoder_fingerprints(config, family, model)
    return EncodingSpec(family, model, fingerprints, precision.device, precision.dtype, remedy)


def encoder_fingerprints(config: RunConfig, family: Family, model: ModelDescription) -> EncoderFingerprints:
    """The fingerprints of the encoders' files, which are computed once per file and remembered."""
    memo = config.run.output_dir / FINGERPRINTS_FILE
    media, text = fingerprint(family.media_files(model), memo), fingerprint(family.text_files(model), memo)
    if model.needs_first_frame:  # text-to-video uses the same VAE, and its entries lack the encoded first frame
        media = xxhash.xxh3_128_hexdigest(f"{media} and the first frame".encode())
    return EncoderFingerprints(media, text)


def _choose_initial_world_size(checked: CheckedRun) -> int:
    """The number of ranks that the windows are made for: a resumed run keeps its windows on any number of ranks."""
    resume_from, world_size = checked.resume_from, checked.process_group.world_size
    if resume_from is None or resume_from.path.parent.parent != checked.context.run_dir.resolve():
        return world_size
    initial_world_size = saved_world_size(resume_from)
    if initial_world_size != world_size:
        reason = f"the run began with {initial_world_size}, and keeps its windows on {world_size}"
        checked.context.sink.emit(DecisionEvent("processes", initial_world_size, reason))
    return initial_world_size


@contextmanager
def _open_collator(
    data: RunData, encoding: EncodingSpec, corpus: Corpus, positions: range, place: Callable[[StepBatch], StepBatch]
) -> Iterator[BatchCollator]:
    """A collator for these positions of a corpus, whose caches are filled now."""
    checked, context, on_attach = data.checked, data.context, data.memory.keep_in_host
    config, family, model = checked.config, checked.family, checked.model
    # Before hours of encoding: masks may be refused.
    weights = build_loss_weights(corpus, context.sink, checked.process_group.forward_is_collective)
    place_batch = place if encoding.device.type == "cuda" else None
    distribution_for = partial(timestep_distribution, config.objective, family, model)
    begin, until = positions.start, positions.stop
    with open_encoded_corpus(
        config, corpus, encoding, context, begin=begin, until=until, on_attach=on_attach
    ) as encoded:
        yield BatchCollator(corpus, encoded, family, model, distribution_for, config.run.seed, place_batch, weights)


def _load_trainable_expert(data: RunData, expert: Expert, device: torch.device) -> TrainableExpert:
    """An expert's module on a device, with its trained parameters."""
    checked, memory, sink = data.checked, data.memory, data.context.sink
    config, family, model, precision = checked.config, checked.family, checked.model, checked.precision
    remedy = 'set model.base_weights: "int8", or train one of model.experts at a time'
    with (
        explain_out_of_memory(f"{expert.component} does", partial(memory.out_of_memory_remedy, remedy)),
        memory.allocating("weights"),
    ):
        files = load_initial_adapters(config.adapter, family.name, expert.name, only_expert=len(model.experts) == 1)
        place = partial(_place_expert, checked, sink, device, files.get("frozen"))
        module = family.load_denoiser(model, expert, expert_setup.weight_dtype(config, precision), place)
        if "frozen" in files:
            summary = merge_summary(files["frozen"].layers, files["frozen"].path)
            sink.emit(NoteEvent("adapter.frozen", f"{expert.name}: {summary}"))
    place_state = partial(memory.allocating, "state")
    trainable = expert_setup.build_trainable_expert(config, family, expert, module, precision, sink, place_state)
    if "start_from" in files:
        summary = load_initial_values(trainable, files["start_from"].layers, files["start_from"].path)
        sink.emit(NoteEvent("adapter.start_from", f"{expert.name}: {summary}"))
    loading.require_values(trainable.module, expert.component)
    return trainable


def _place_expert(
    checked: CheckedRun, sink: Sink, device: torch.device, frozen: ExistingAdapter | None, module: nn.Module
) -> None:
    """Bring a loaded module to a device, with the frozen adapter merged and the weights quantized."""
    merge_layer = None if frozen is None else frozen_layer_merger(module, frozen.layers, frozen.path)
    kind, compute_device = checked.config.model.base_weights, checked.precision.device
    expert_setup.place_base_weights(module, kind, device, sink, compute_device=compute_device, change_layer=merge_layer)
