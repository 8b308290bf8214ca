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

from supertuner.arena.peers import Peers
from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources import alloc_conf
from supertuner.config.sources.launcher import ALONE, Launched
from supertuner.core.errors import CheckpointError, TrainError
from supertuner.core.events import Decided, Noted, Progress, Sink, Warned
from supertuner.core.host import Host
from supertuner.data.corpus import Corpus
from supertuner.data.opened import open_corpus, portion
from supertuner.distributed.fsdp_checks import require_shareable
from supertuner.distributed.node import open_peers, require_same_data
from supertuner.distributed.process_group import Alone, Parallel, in_turn
from supertuner.models import loading
from supertuner.models.adapters import attach as adapters
from supertuner.models.adapters import initial_weights as adapter_given
from supertuner.models.attention import require_backend, require_choice
from supertuner.models.compiled import try_compiler
from supertuner.models.fingerprint import fingerprint
from supertuner.models.objective.diffusion import Law, auto_shift
from supertuner.models.quantise import probe
from supertuner.models.spec import Expert, Family, Model
from supertuner.optim import table as optimizers
from supertuner.optim.schedule import Course, course_of, ramp_text
from supertuner.plan.placement.planner import Planning
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Precision
from supertuner.step.trainee import experts_of, rules_of, store_base, trained_of, trainee_of, weight_format
from supertuner.step.window import Trainee
from supertuner.train.checkpoint import save as checkpoint
from supertuner.train.checkpoint.load import Loaded, load
from supertuner.train.checkpoint.state import processes_of, restore, revision_of
from supertuner.train.dataloader import Maker, batches_ahead
from supertuner.train.encoding.encoded import open_encoded
from supertuner.train.encoding.encoders import Encoding, Identities
from supertuner.train.export import adapter_init as adapter_start
from supertuner.train.loss_log import LOSSES, Elsewhere, LossLog
from supertuner.train.loss_weights import counting_of
from supertuner.train.memory import MemoryEngine, open_memory
from supertuner.train.model_source import opened_model
from supertuner.train.offload.manager import Acts
from supertuner.train.offload.optimizer_state import HOST
from supertuner.train.offload.setup import acts_of, plans_of, waits_at_home
from supertuner.train.out_of_memory import fitting
from supertuner.train.run import HELD_OUT, Run
from supertuner.train.same_weights import require_same_weights, require_same_whole
from supertuner.train.validation.validate import plan

FINGERPRINTS = ".fingerprints.json"
"""Below `run.output_dir`: fingerprints of models by their files' names, sizes and dates."""


@dataclass(frozen=True, eq=False, slots=True)
class Outside:
    """What a run reports to, and what it asks about the machine."""

    sink: Sink
    progress: Progress
    host: Host


@contextmanager
def open_run(
    config: RunConfig,
    name: str,
    folder: Path,
    outside: Outside,
    *,
    resume: str | None = None,
    parallel: Parallel | None = None,
    planning: Planning | None = None,
) -> Iterator[Run]:
    """Everything that a run needs, ready for its loop; leaving closes it. `resume` is said instead of the setting's."""
    parallel = parallel or Alone()
    sink = outside.sink
    device = device_of(config.train.device)
    precision = Precision(config.train.mixed_precision, device, keeps_casts=parallel.sharing is None)
    if parallel.sharing is not None:
        require_shareable(config)
    begin = _checkpoint_of_all(folder, resume or config.checkpoints.resume, outside, parallel)
    with in_turn(parallel):  # a tiny model is made in the run's folder, by the first
        family, model = opened_model(config, folder, None if begin is None else revision_of(begin))
    sink.emit(Decided("model", model.title, f"what {model.source.path} says of itself"))
    sink.emit(Decided("train.device", str(device), _why_device(config.train.device)))
    experts = experts_of(config, model)
    require_stages(config, model, sink)
    _require_machinery(config, experts, precision)
    given = _tried(config, family, model, experts)
    with ExitStack() as opened:
        peers = opened.enter_context(open_peers(config, parallel))  # first: it sees how everything below ends
        memory = opened.enter_context(open_memory(config, device, host=outside.host, sink=sink))
        corpus, other = _opened_data(config, opened, outside, peers)
        require_same_data(parallel, peers, [corpus] if other is None else [corpus, other])
        begun_by = _begun_by(begin, folder, parallel, sink)
        course = _course(config, corpus, begun_by, parallel, sink)
        samples_plan = plan(config, family, model, corpus, other, sink)  # before hours of encoding: it may be refused
        with peers.in_turn("fingerprints of encoders", outside.progress):  # gigabytes, which are read through once
            encoding = encoding_of(config, family, model, precision, memory.remedy)
        maker_of = partial(_maker, config, encoding, folder, opened, outside, memory, peers, parallel.in_step)
        done = course.consumed(0 if begin is None else begin.step)
        sink.emit(Decided("loader.prefetch_batches", *batches_ahead(config, device)))
        maker = maker_of(memory.place, corpus, done, course.total_samples)
        # Held-out batches get their noise later, by the CPU: they are only put where the GPU can fetch them.
        held_out = None if other is None else maker_of(StepBatch.pinned, other, 0, _measured(config, other))
        trained, trainees, acts = _under_plans(
            config, family, model, experts, precision, memory, sink, planning, parallel
        )
        run = Run(
            name=name,
            config=config,
            folder=folder,
            sink=sink,
            progress=outside.progress,
            host=outside.host,
            device=device,
            dtype=precision.dtype,
            parallel=parallel,
            begun_by=begun_by,
            family=family,
            model=model,
            course=course,
            rules=rules_of(config, family, model, precision, sink, partial(memory.placing, "state")),
            maker=maker,
            held_out=held_out,
            trainees=trainees,
            trained=trained,
            losses=opened.enter_context(_log(folder / LOSSES, parallel)),
            validations=opened.enter_context(_log(folder / HELD_OUT, parallel)),
            samples_plan=samples_plan,
            memory=memory,
            acts=acts,
            given=given,
        )
        _begin(run, begin)
        require_same_weights(run)
        yield run


def _begin(run: Run, begin: Loaded | None) -> None:
    if begin is None:
        run.losses.begin()
        run.validations.begin()
        return
    restore(run, begin)
    run.sink.emit(Noted("resume", f"going on after step {run.step}, from {begin.path}"))


def device_of(setting: str, launched: Launched = ALONE) -> torch.device:
    """Where to compute: of many processes of a node, each on a GPU of its own."""
    name = setting if setting != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if launched.local_ranks > 1 and name == "cuda":
        name = f"cuda:{launched.local_rank}"
    elif launched.local_ranks > 1 and name.startswith("cuda:"):
        raise TrainError(
            f'train.device is "{setting}", and {launched.local_ranks} processes of this node would share it; use '
            '"cuda": each takes the GPU of its own number'
        )
    try:
        device = torch.empty(1, device=torch.device(name)).device  # with its number, as tensors will name it
    except ValueError as error:  # torch reads its allocator variables when CUDA starts, and says so of what is wrong
        where = " or ".join(alloc_conf.VARIABLES)
        raise TrainError(f"torch refuses its allocator settings: {str(error).splitlines()[0]} Mend {where}") from error
    except (RuntimeError, AssertionError) as error:  # torch says so where a device is unknown, absent or not built in
        reason = str(error).splitlines()[0]
        remedy = 'use "cpu", or see `supertuner doctor`' if setting == "auto" else 'use "auto"'
        raise TrainError(f'train.device is "{setting}", and {name} cannot be used here: {reason}; {remedy}') from error
    return device


def require_stages(config: RunConfig, model: Model, sink: Sink) -> None:
    """Settings of an expert that this model has not: an adapter's are refused, an optimizer's are told. What its family
    never has was told when the configuration was read."""
    told = {remark.field for remark in config.doubts()}
    for stage in {"high_noise", "low_noise"} - {expert.name for expert in model.experts}:
        why = f"{model.title} has {' and '.join(expert.name for expert in model.experts)}"
        if stage in config.adapter.model_fields_set:
            raise TrainError(f"adapter.{stage} is set, and {why}; put it into adapter itself")
        for name in sorted(config.optimizer.model_fields_set):
            if name.startswith(f"{stage}_") and f"optimizer.{name}" not in told:
                sink.emit(Warned(f"optimizer.{name}", f"has no effect: {why}"))


def _require_machinery(config: RunConfig, experts: tuple[Expert, ...], precision: Precision) -> None:
    """What can be refused without the model is refused before anything is staged and encoded."""
    for expert in experts:
        optimizers.rate_of(config.optimizer, expert.name)
    require_backend(config.model.attention, precision.device)
    if config.model.base_weights != "as_computed":
        probe(config.model.base_weights, precision.device, precision.dtype)
    if config.model.compile:
        try_compiler(precision.device)


def _tried(config: RunConfig, family: Family, model: Model, experts: tuple[Expert, ...]) -> dict[str, str]:
    """What can be refused by the model's layers alone is, before anything is staged; expert and setting of each file
    that an adapter begins with → what it is known by."""
    given: dict[str, str] = {}
    for expert in experts:
        bones = loading.skeleton(model, expert.part)
        require_choice(bones, config.model.attention)
        if config.adapter.type != "full":
            settings = adapters.for_expert(config.adapter, expert.name)
            adapters.layers_of(bones, settings, adapters.targets_of(settings, family.targets), expert.name)
        tried = adapter_start.tried(config, family, model, expert)
        given |= {f"{expert.name}: {place}": digest for place, digest in tried.items()}
    return given


def law_of(config: RunConfig, family: Family, model: Model, shape: tuple[int, ...]) -> Law:
    """How noise levels are drawn for latents of this shape."""
    settings = config.objective
    shift = auto_shift(family.tokens(model, shape)) if settings.shift == "auto" else settings.shift
    assert not isinstance(shift, str)
    flow = (model.prediction or family.prediction) == "flow"
    kind = settings.timesteps or ("logit_normal" if flow else "uniform")
    return Law(kind, settings.logit_mean, settings.logit_std, model.shift if shift is None else shift)


def _why_device(setting: str) -> str:
    if setting != "auto":
        return "as configured"
    return "there is a GPU" if torch.cuda.is_available() else "there is no GPU that torch can use"


def _log(path: Path, parallel: Parallel) -> LossLog:
    return LossLog(path) if parallel.rank == 0 else Elsewhere()


def _checkpoint_of_all(folder: Path, resume: str, outside: Outside, parallel: Parallel) -> Loaded | None:
    """What all processes go on from: what the first one finds. Only that one may tidy up after a killed save."""
    if parallel.rank == 0:
        found = _checkpoint(folder, resume, outside)
        parallel.told(b"" if found is None else os.fsencode(found.path))
        return found
    path = parallel.told(None)
    return load(Path(os.fsdecode(path)), checked=True) if path else None


def _checkpoint(folder: Path, resume: str, outside: Outside) -> Loaded | None:
    """What the run goes on from; None: it begins."""
    checkpoints = folder / checkpoint.FOLDER
    if resume == "never":
        if checkpoint.find(checkpoints):
            raise CheckpointError(f'{checkpoints} holds checkpoints, and resume is "never"; give another run.name')
        return None
    path = Path(resume).expanduser()
    if resume != "latest" and (path.resolve().parent == checkpoints.resolve() or not path.is_dir()):
        return load(path, outside.progress)  # what is not there is told, also to a run with checkpoints of its own
    found = checkpoint.latest(checkpoints, outside.sink, outside.progress)
    if found is None and checkpoint.find(checkpoints):
        raise CheckpointError(
            f"no checkpoint in {checkpoints} is whole (`supertuner checkpoint verify` says what is wrong with each); "
            "put one back, or give another run.name to begin anew"
        )
    if resume == "latest":
        return found
    if found is None:
        return load(path, outside.progress)
    why = f"this run has checkpoints of its own by now; {path} is where it began"
    outside.sink.emit(Decided("checkpoints.resume", str(found.path), why))
    return found


def _opened_data(config: RunConfig, opened: ExitStack, outside: Outside, peers: Peers) -> tuple[Corpus, Corpus | None]:
    """The datasets that are trained on, and those that are held out, if there are any."""

    def corpus_of(part: RunConfig) -> Corpus:
        return opened.enter_context(
            open_corpus(part, host=outside.host, sink=outside.sink, progress=outside.progress, peers=peers)
        )

    trained_on, held_out = portion(config, held_out=False), portion(config, held_out=True)
    assert trained_on is not None, "a configuration that holds everything out is refused"
    return corpus_of(trained_on), None if held_out is None else corpus_of(held_out)


def _begun_by(begin: Loaded | None, folder: Path, parallel: Parallel, sink: Sink) -> int:
    """How many processes the windows are made for. A run that goes on elsewhere goes on with the windows it has."""
    if begin is None or begin.path.parent.parent != folder.resolve():
        return parallel.ranks
    processes = processes_of(begin)
    if processes != parallel.ranks:
        why = f"the run began with {processes}, and goes on with the same windows on {parallel.ranks}"
        sink.emit(Decided("processes", processes, why))
    return processes


def _course(config: RunConfig, corpus: Corpus, begun_by: int, parallel: Parallel, sink: Sink) -> Course:
    course = course_of(config, corpus.order.epoch_begin, begun_by)
    sink.emit(Decided("train.steps", course.total_steps, course.why))
    if course.ramp.grows:
        sink.emit(Noted("ramp", ramp_text(course.ramp, config.train.batch_size, parallel.ranks)))
    return course


def encoding_of(
    config: RunConfig, family: Family, model: Model, precision: Precision, remedy: Callable[[str], str]
) -> Encoding:
    """By what samples are encoded; the encoders' files are read through once, and remembered. `remedy` says what to do
    where the device's memory is full."""
    memo = config.run.output_dir / FINGERPRINTS
    media, text = fingerprint(family.media_files(model), memo), fingerprint(family.text_files(model), memo)
    if model.starts_from_frame:  # of the same VAE, text-to-video has entries without a condition: they are not ours
        media = xxhash.xxh3_128_hexdigest(f"{media} and the first frame".encode())
    return Encoding(family, model, Identities(media, text), precision.device, precision.dtype, remedy)


def _measured(config: RunConfig, corpus: Corpus) -> int:
    """How many held-out samples are measured."""
    return min(config.validation.held_out_samples, corpus.order.epoch_length(0))


def _maker(
    config: RunConfig,
    encoding: Encoding,
    folder: Path,
    opened: ExitStack,
    outside: Outside,
    memory: MemoryEngine,
    peers: Peers,
    in_step: bool,
    place: Callable[[StepBatch], StepBatch],
    corpus: Corpus,
    begin: int,
    until: int,
) -> Maker:
    """Who makes batches of these data, from caches that are filled now."""
    counting = counting_of(corpus, outside.sink, in_step=in_step)  # before hours of encoding: masks may be refused
    encoded = opened.enter_context(
        open_encoded(
            config,
            corpus,
            encoding,
            run_folder=folder,
            host=outside.host,
            sink=outside.sink,
            progress=outside.progress,
            begin=begin,
            until=until,
            attached=memory.keep_in_host,
            peers=peers,
        )
    )
    return Maker(
        corpus=corpus,
        encoded=encoded,
        family=encoding.family,
        model=encoding.model,
        law_of=partial(law_of, config, encoding.family, encoding.model),
        seed=config.run.seed,
        place=place if encoding.device.type == "cuda" else None,
        counting=counting,
    )


def _under_plans(
    config: RunConfig,
    family: Family,
    model: Model,
    experts: tuple[Expert, ...],
    precision: Precision,
    memory: MemoryEngine,
    sink: Sink,
    planning: Planning | None,
    parallel: Parallel,
) -> tuple[dict[str, adapters.Trained], tuple[Trainee, ...], Acts | None]:
    """The experts in training, each loaded to where its plan has it, and the plans at work. Weights that are shared
    out over processes are under no plan; where each process has all of them, a plan stays as it is made at the start:
    made anew by one alone, it would have its gradients elsewhere than the others."""
    sharing = parallel.sharing
    planned = {} if sharing is not None else plans_of(config, model, experts, planning)
    trained = {}
    for expert in experts:
        home = HOST if sharing is not None else waits_at_home(config, planned.get(expert.name), precision.device)
        whole = _trained(config, family, model, expert, precision, memory, sink, home)
        if sharing is not None:
            require_same_whole(parallel, whole)
            whole = sharing.share_out(whole)
        trained[expert.name] = whole
    trainees = tuple(trainee_of(config, expert, trained[expert.name], precision) for expert in experts)
    if sharing is not None and config.plan.act != "never" and config.plan.idle_experts != "gpu":
        sharing.take_turns(trainees)
    again = planning if parallel.ranks == 1 else None
    return trained, trainees, acts_of(config, trainees, planned, again, precision, memory, sink)


def _trained(
    config: RunConfig,
    family: Family,
    model: Model,
    expert: Expert,
    precision: Precision,
    memory: MemoryEngine,
    sink: Sink,
    device: torch.device,
) -> adapters.Trained:
    """An expert's module on a device, with what is trained of it."""
    remedy = 'set model.base_weights: "int8", or train one of model.experts at a time'
    with fitting(f"{expert.part} does", partial(memory.remedy, remedy)), memory.placing("weights"):
        module = family.denoiser(model, expert, weight_format(config, precision)).to(device)
        files = adapter_start.given(config.adapter, family.name, expert.name, alone=len(model.experts) == 1)
        if "frozen" in files:
            said = adapter_given.freeze(module, files["frozen"].layers, files["frozen"].path)
            sink.emit(Noted("adapter.frozen", f"{expert.name}: {said}"))
        store_base(config, module, precision, sink)
    trained = trained_of(config, family, expert, module, precision, sink, partial(memory.placing, "state"))
    if "start_from" in files:
        said = adapter_given.start(trained, files["start_from"].layers, files["start_from"].path)
        sink.emit(Noted("adapter.start_from", f"{expert.name}: {said}"))
    return trained
