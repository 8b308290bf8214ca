"""Where a run's objects are built and its rooms are wired: the only place that knows all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from supertuner.arena.node_peers import NodePeers
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources import alloc_conf
from supertuner.config.sources.launcher import SINGLE_PROCESS_ENVIRONMENT, LauncherEnvironment
from supertuner.core.errors import CheckpointError, TrainError
from supertuner.core.events import DecisionEvent, NoteEvent, Progress, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.data.corpus import Corpus
from supertuner.data.corpus_loader import open_corpus, select_datasets
from supertuner.distributed.fsdp_checks import require_fsdp_supported
from supertuner.distributed.node import open_node_peers, require_same_data
from supertuner.distributed.process_group import ProcessGroup, SingleProcess, rank_zero_first
from supertuner.models import loading
from supertuner.models.adapters import attach as adapters
from supertuner.models.adapters import existing_adapters as adapter_given
from supertuner.models.attention import require_backend, require_backend_support
from supertuner.models.block_compilation import check_compiler
from supertuner.models.fingerprint import fingerprint
from supertuner.models.objective.diffusion import TimestepDistribution, auto_shift
from supertuner.models.quantization import check_quantization
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.optim import optimizer_registry as optimizers
from supertuner.optim.schedule import TrainingSchedule, build_training_schedule, ramp_text
from supertuner.plan.placement.planner import RunPlanner
from supertuner.step.batch import StepBatch
from supertuner.step.expert_setup import (
    build_expert_state,
    build_step_options,
    build_trainable_expert,
    quantize_base_weights,
    selected_experts,
    weight_dtype,
)
from supertuner.step.precision import ComputePrecision
from supertuner.step.window import ExpertState
from supertuner.train.checkpoint import durable_save as checkpoint
from supertuner.train.checkpoint.load import LoadedCheckpoint, load_checkpoint
from supertuner.train.checkpoint.state import restore_run, saved_revision, saved_world_size
from supertuner.train.run.dataloader import BatchCollator, batches_ahead
from supertuner.train.encoding.encoded_corpus import open_encoded_corpus
from supertuner.train.encoding.encoders import EncoderFingerprints, EncodingSpec
from supertuner.train.export import adapter_init as adapter_start
from supertuner.train.run.loss_log import LOSSES_FILE, LossLog, NullLossLog
from supertuner.train.run.loss_weights import build_loss_weights
from supertuner.train.run.memory_engine import MemoryEngine, open_memory
from supertuner.train.model_source import open_model
from supertuner.train.offload.manager import OffloadManager
from supertuner.step.parameter_state import HOST
from supertuner.train.offload.setup import create_offload_manager, loading_device, plan_experts
from supertuner.memory.out_of_memory import explain_out_of_memory
from supertuner.train.run.training_run import HELD_OUT_FILE, TrainingRun
from supertuner.train.same_weights import require_same_unsharded_weights, require_same_weights
from supertuner.train.validation.validate import plan_validation

FINGERPRINTS_FILE = ".fingerprints.json"
"""Below `run.output_dir`: fingerprints of models by their files' names, sizes and dates."""


@dataclass(frozen=True, eq=False, slots=True)
class RunContext:
    """What a run reports to, and what it asks about the machine."""

    sink: Sink
    progress: Progress
    host: HostFacts


@contextmanager
def open_run(
    config: RunConfig,
    name: str,
    folder: Path,
    context: RunContext,
    *,
    resume: str | None = None,
    process_group: ProcessGroup | None = None,
    planning: RunPlanner | None = None,
) -> Iterator[TrainingRun]:
    """Everything that a run needs, ready for its loop; leaving closes it. `resume` is said instead of the setting's."""
    process_group = process_group or SingleProcess()
    sink = context.sink
    device = select_device(config.train.device)
    precision = ComputePrecision(config.train.mixed_precision, device, caches_casts=process_group.sharder is None)
    if process_group.sharder is not None:
        require_fsdp_supported(config)
    resume_from = _find_checkpoint_for_all_ranks(folder, resume or config.checkpoints.resume, context, process_group)
    with rank_zero_first(process_group):  # a tiny model is made in the run's folder, by the first
        family, model = open_model(config, folder, None if resume_from is None else saved_revision(resume_from))
    sink.emit(DecisionEvent("model", model.title, f"what {model.source.path} says of itself"))
    sink.emit(DecisionEvent("train.device", str(device), _device_reason(config.train.device)))
    experts = selected_experts(config, model)
    require_expert_settings(config, model, sink)
    _require_backends(config, experts, precision)
    initial_weight_digests = _check_against_skeletons(config, family, model, experts)
    with ExitStack() as stack:
        peers = stack.enter_context(open_node_peers(config, process_group))  # first: it sees how everything below ends
        memory = stack.enter_context(open_memory(config, device, host=context.host, sink=sink))
        corpus, held_out_corpus = _open_data(config, stack, context, peers)
        require_same_data(process_group, peers, [corpus] if held_out_corpus is None else [corpus, held_out_corpus])
        initial_world_size = _choose_initial_world_size(resume_from, folder, process_group, sink)
        schedule = _build_schedule(config, corpus, initial_world_size, process_group, sink)
        sample_plan = plan_validation(
            config, family, model, corpus, held_out_corpus, sink
        )  # before hours of encoding: it may be refused
        with peers.first_rank_first(
            "fingerprints of encoders", context.progress
        ):  # gigabytes, which are read through once
            encoding = build_encoding_spec(config, family, model, precision, memory.out_of_memory_remedy)
        build_collator = partial(
            _build_collator,
            config,
            encoding,
            folder,
            stack,
            context,
            memory,
            peers,
            process_group.forward_is_collective,
        )
        samples_consumed = schedule.samples_after(0 if resume_from is None else resume_from.step)
        sink.emit(DecisionEvent("loader.prefetch_batches", *batches_ahead(config, device)))
        collator = build_collator(memory.place_batch, corpus, samples_consumed, schedule.total_samples)
        # Held-out batches get their noise later, by the CPU: they are only put where the GPU can fetch them.
        held_out_collator = (
            None
            if held_out_corpus is None
            else build_collator(StepBatch.pinned, held_out_corpus, 0, _held_out_sample_count(config, held_out_corpus))
        )
        trainable_experts, expert_states, offload = _load_experts(
            config, family, model, experts, precision, memory, sink, planning, process_group
        )
        run = TrainingRun(
            name=name,
            config=config,
            folder=folder,
            sink=sink,
            progress=context.progress,
            host=context.host,
            device=device,
            dtype=precision.dtype,
            process_group=process_group,
            initial_world_size=initial_world_size,
            family=family,
            model=model,
            schedule=schedule,
            step_options=build_step_options(
                config, family, model, precision, sink, partial(memory.allocating, "state")
            ),
            collator=collator,
            held_out_collator=held_out_collator,
            expert_states=expert_states,
            trainable_experts=trainable_experts,
            loss_log=stack.enter_context(_open_log(folder / LOSSES_FILE, process_group)),
            validation_log=stack.enter_context(_open_log(folder / HELD_OUT_FILE, process_group)),
            sample_plan=sample_plan,
            memory=memory,
            offload=offload,
            initial_weight_digests=initial_weight_digests,
        )
        _start_or_resume(run, resume_from)
        require_same_weights(run)
        yield run


def _start_or_resume(run: TrainingRun, resume_from: LoadedCheckpoint | None) -> None:
    if resume_from is None:
        run.loss_log.reset()
        run.validation_log.reset()
        return
    restore_run(run, resume_from)
    run.sink.emit(NoteEvent("resume", f"going on after step {run.step}, from {resume_from.path}"))


def select_device(setting: str, launch_env: LauncherEnvironment = SINGLE_PROCESS_ENVIRONMENT) -> torch.device:
    """Where to compute: of many processes of a node, each on a GPU of its own."""
    name = setting if setting != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if launch_env.local_world_size > 1 and name == "cuda":
        name = f"cuda:{launch_env.local_rank}"
    elif launch_env.local_world_size > 1 and name.startswith("cuda:"):
        raise TrainError(
            f'train.device is "{setting}", and {launch_env.local_world_size} processes of this node would share it; use '
            '"cuda": each takes the GPU of its own number'
        )
    try:
        device = torch.empty(1, device=torch.device(name)).device  # with its number, as tensors will name it
    except ValueError as error:  # torch reads its allocator variables when CUDA starts, and says so of what is wrong
        where = " or ".join(alloc_conf.ALLOC_CONF_VARIABLES)
        raise TrainError(f"torch refuses its allocator settings: {str(error).splitlines()[0]} Mend {where}") from error
    except (RuntimeError, AssertionError) as error:  # torch says so where a device is unknown, absent or not built in
        reason = str(error).splitlines()[0]
        remedy = 'use "cpu", or see `supertuner doctor`' if setting == "auto" else 'use "auto"'
        raise TrainError(f'train.device is "{setting}", and {name} cannot be used here: {reason}; {remedy}') from error
    return device


def require_expert_settings(config: RunConfig, model: ModelDescription, sink: Sink) -> None:
    """Settings of an expert that this model has not: an adapter's are refused, an optimizer's are told. What its family
    never has was told when the configuration was read."""
    warned_fields = {remark.field for remark in config.warnings()}
    for expert_name in {"high_noise", "low_noise"} - {expert.name for expert in model.experts}:
        reason = f"{model.title} has {' and '.join(expert.name for expert in model.experts)}"
        if expert_name in config.adapter.model_fields_set:
            raise TrainError(f"adapter.{expert_name} is set, and {reason}; put it into adapter itself")
        for name in sorted(config.optimizer.model_fields_set):
            if name.startswith(f"{expert_name}_") and f"optimizer.{name}" not in warned_fields:
                sink.emit(WarningEvent(f"optimizer.{name}", f"has no effect: {reason}"))


def _require_backends(config: RunConfig, experts: tuple[Expert, ...], precision: ComputePrecision) -> None:
    """What can be refused without the model is refused before anything is staged and encoded."""
    for expert in experts:
        optimizers.learning_rate_for(config.optimizer, expert.name)
    require_backend(config.model.attention, precision.device)
    if config.model.base_weights != "as_computed":
        check_quantization(config.model.base_weights, precision.device, precision.dtype)
    if config.model.compile:
        check_compiler(precision.device)


def _check_against_skeletons(
    config: RunConfig, family: Family, model: ModelDescription, experts: tuple[Expert, ...]
) -> dict[str, str]:
    """What can be refused by the model's layers alone is, before anything is staged; expert and setting of each file
    that an adapter begins with → what it is known by."""
    digests: dict[str, str] = {}
    for expert in experts:
        skeleton = loading.build_meta_module(model, expert.component)
        require_backend_support(skeleton, config.model.attention)
        if config.adapter.type != "full":
            settings = adapters.settings_for_expert(config.adapter, expert.name)
            adapters.select_layers(
                skeleton, settings, adapters.resolve_targets(settings, family.target_presets), expert.name
            )
        own_digests = adapter_start.check_initial_adapters(config, family, model, expert)
        digests |= {f"{expert.name}: {place}": digest for place, digest in own_digests.items()}
    return digests


def timestep_distribution(
    config: RunConfig, family: Family, model: ModelDescription, shape: tuple[int, ...]
) -> TimestepDistribution:
    """How noise levels are drawn for latents of this shape."""
    settings = config.objective
    shift = auto_shift(family.token_count(model, shape)) if settings.shift == "auto" else settings.shift
    assert not isinstance(shift, str)
    flow = (model.prediction or family.prediction) == "flow"
    kind = settings.timesteps or ("logit_normal" if flow else "uniform")
    return TimestepDistribution(kind, settings.logit_mean, settings.logit_std, model.shift if shift is None else shift)


def _device_reason(setting: str) -> str:
    if setting != "auto":
        return "as configured"
    return "there is a GPU" if torch.cuda.is_available() else "there is no GPU that torch can use"


def _open_log(path: Path, process_group: ProcessGroup) -> LossLog:
    return LossLog(path) if process_group.rank == 0 else NullLossLog()


def _find_checkpoint_for_all_ranks(
    folder: Path, resume: str, context: RunContext, process_group: ProcessGroup
) -> LoadedCheckpoint | None:
    """What all processes go on from: what the first one finds. Only that one may tidy up after a killed save."""
    if process_group.rank == 0:
        loaded = _find_checkpoint(folder, resume, context)
        process_group.broadcast(b"" if loaded is None else os.fsencode(loaded.path))
        return loaded
    path = process_group.broadcast(None)
    return load_checkpoint(Path(os.fsdecode(path)), already_verified=True) if path else None


def _find_checkpoint(folder: Path, resume: str, context: RunContext) -> LoadedCheckpoint | None:
    """What the run goes on from; None: it begins."""
    checkpoints = folder / checkpoint.CHECKPOINTS_DIR
    if resume == "never":
        if checkpoint.find_checkpoints(checkpoints):
            raise CheckpointError(f'{checkpoints} holds checkpoints, and resume is "never"; give another run.name')
        return None
    path = Path(resume).expanduser()
    if resume != "latest" and (path.resolve().parent == checkpoints.resolve() or not path.is_dir()):
        return load_checkpoint(
            path, context.progress
        )  # what is not there is told, also to a run with checkpoints of its own
    latest = checkpoint.load_latest(checkpoints, context.sink, context.progress)
    if latest is None and checkpoint.find_checkpoints(checkpoints):
        raise CheckpointError(
            f"no checkpoint in {checkpoints} is whole (`supertuner checkpoint verify` says what is wrong with each); "
            "put one back, or give another run.name to begin anew"
        )
    if resume == "latest":
        return latest
    if latest is None:
        return load_checkpoint(path, context.progress)
    reason = f"this run has checkpoints of its own by now; {path} is where it began"
    context.sink.emit(DecisionEvent("checkpoints.resume", str(latest.path), reason))
    return latest


def _open_data(
    config: RunConfig, stack: ExitStack, context: RunContext, peers: NodePeers
) -> tuple[Corpus, Corpus | None]:
    """The datasets that are trained on, and those that are held out, if there are any."""

    def open_part(part: RunConfig) -> Corpus:
        return stack.enter_context(
            open_corpus(part, host=context.host, sink=context.sink, progress=context.progress, peers=peers)
        )

    trained_on, held_out = select_datasets(config, held_out=False), select_datasets(config, held_out=True)
    assert trained_on is not None, "a configuration that holds everything out is refused"
    return open_part(trained_on), None if held_out is None else open_part(held_out)


def _choose_initial_world_size(
    resume_from: LoadedCheckpoint | None, folder: Path, process_group: ProcessGroup, sink: Sink
) -> int:
    """How many processes the windows are made for. A run that goes on elsewhere goes on with the windows it has."""
    if resume_from is None or resume_from.path.parent.parent != folder.resolve():
        return process_group.world_size
    world_size = saved_world_size(resume_from)
    if world_size != process_group.world_size:
        reason = f"the run began with {world_size}, and goes on with the same windows on {process_group.world_size}"
        sink.emit(DecisionEvent("processes", world_size, reason))
    return world_size


def _build_schedule(
    config: RunConfig, corpus: Corpus, initial_world_size: int, process_group: ProcessGroup, sink: Sink
) -> TrainingSchedule:
    schedule = build_training_schedule(config, corpus.order.epoch_begin, initial_world_size)
    sink.emit(DecisionEvent("train.steps", schedule.total_steps, schedule.end_reason))
    if schedule.ramp.grows:
        sink.emit(NoteEvent("ramp", ramp_text(schedule.ramp, config.train.batch_size, process_group.world_size)))
    return schedule


def build_encoding_spec(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    precision: ComputePrecision,
    remedy: Callable[[str], str],
) -> EncodingSpec:
    """By what samples are encoded; the encoders' files are read through once, and remembered. `remedy` says what to do
    where the device's memory is full."""
    memo = config.run.output_dir / FINGERPRINTS_FILE
    media, text = fingerprint(family.media_files(model), memo), fingerprint(family.text_files(model), memo)
    if model.needs_first_frame:  # of the same VAE, text-to-video has entries without a condition: they are not ours
        media = xxhash.xxh3_128_hexdigest(f"{media} and the first frame".encode())
    return EncodingSpec(family, model, EncoderFingerprints(media, text), precision.device, precision.dtype, remedy)


def _held_out_sample_count(config: RunConfig, corpus: Corpus) -> int:
    """How many held-out samples are measured."""
    return min(config.validation.held_out_samples, corpus.order.epoch_length(0))


def _build_collator(
    config: RunConfig,
    encoding: EncodingSpec,
    folder: Path,
    stack: ExitStack,
    context: RunContext,
    memory: MemoryEngine,
    peers: NodePeers,
    forward_is_collective: bool,
    place_batch: Callable[[StepBatch], StepBatch],
    corpus: Corpus,
    begin: int,
    until: int,
) -> BatchCollator:
    """Who makes batches of these data, from caches that are filled now."""
    loss_weights = build_loss_weights(
        corpus, context.sink, forward_is_collective=forward_is_collective
    )  # before hours of encoding: masks may be refused
    encoded = stack.enter_context(
        open_encoded_corpus(
            config,
            corpus,
            encoding,
            run_folder=folder,
            host=context.host,
            sink=context.sink,
            progress=context.progress,
            begin=begin,
            until=until,
            on_attach=memory.keep_in_host,
            peers=peers,
        )
    )
    return BatchCollator(
        corpus=corpus,
        encoded=encoded,
        family=encoding.family,
        model=encoding.model,
        timestep_distribution_for=partial(timestep_distribution, config, encoding.family, encoding.model),
        seed=config.run.seed,
        place_batch=place_batch if encoding.device.type == "cuda" else None,
        loss_weights=loss_weights,
    )


def _load_experts(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    experts: tuple[Expert, ...],
    precision: ComputePrecision,
    memory: MemoryEngine,
    sink: Sink,
    planning: RunPlanner | None,
    process_group: ProcessGroup,
) -> tuple[dict[str, adapters.TrainableExpert], tuple[ExpertState, ...], OffloadManager | None]:
    """The experts in training, each loaded to where its plan has it, and the plans at work. Weights that are shared
    out over processes are under no plan; where each process has all of them, a plan stays as it is made at the start:
    made anew by one alone, it would have its gradients elsewhere than the others."""
    sharder = process_group.sharder
    planned = {} if sharder is not None else plan_experts(config, model, experts, planning)
    trainable_experts = {}
    for expert in experts:
        load_to = HOST if sharder is not None else loading_device(config, planned.get(expert.name), precision.device)
        trainable = _load_trainable_expert(config, family, model, expert, precision, memory, sink, load_to)
        if sharder is not None:
            require_same_unsharded_weights(process_group, trainable)
            trainable = sharder.shard_expert(trainable)
        trainable_experts[expert.name] = trainable
    expert_states = tuple(
        build_expert_state(config, expert, trainable_experts[expert.name], precision) for expert in experts
    )
    if sharder is not None and config.plan.act != "never" and config.plan.idle_experts != "gpu":
        sharder.enable_expert_swap(expert_states)
    replanning = planning if process_group.world_size == 1 else None
    return (
        trainable_experts,
        expert_states,
        create_offload_manager(config, expert_states, planned, replanning, precision, memory, sink),
    )


def _load_trainable_expert(
    config: RunConfig,
    family: Family,
    model: ModelDescription,
    expert: Expert,
    precision: ComputePrecision,
    memory: MemoryEngine,
    sink: Sink,
    device: torch.device,
) -> adapters.TrainableExpert:
    """An expert's module on a device, with what is trained of it."""
    remedy = 'set model.base_weights: "int8", or train one of model.experts at a time'
    with (
        explain_out_of_memory(f"{expert.component} does", partial(memory.out_of_memory_remedy, remedy)),
        memory.allocating("weights"),
    ):
        module = family.load_denoiser(model, expert, weight_dtype(config, precision)).to(device)
        files = adapter_start.load_initial_adapters(
            config.adapter, family.name, expert.name, only_expert=len(model.experts) == 1
        )
        if "frozen" in files:
            summary = adapter_given.merge_frozen(module, files["frozen"].layers, files["frozen"].path)
            sink.emit(NoteEvent("adapter.frozen", f"{expert.name}: {summary}"))
        quantize_base_weights(config, module, precision, sink)
    trainable = build_trainable_expert(
        config, family, expert, module, precision, sink, partial(memory.allocating, "state")
    )
    if "start_from" in files:
        summary = adapter_given.load_initial_values(trainable, files["start_from"].layers, files["start_from"].path)
        sink.emit(NoteEvent("adapter.start_from", f"{expert.name}: {summary}"))
    return trainable
