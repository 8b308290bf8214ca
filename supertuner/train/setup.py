"""Where a run's objects are built and its rooms are wired: the only place that knows all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from supertuner.config.tree import RunConfig
from supertuner.core.errors import CheckpointError, TrainError
from supertuner.core.events import Decided, Noted, Progress, Sink
from supertuner.core.host import Host
from supertuner.models import adapters
from supertuner.models.attention import require_backend, use_backend
from supertuner.models.compiled import compile_blocks
from supertuner.models.objective import Law, Objective, auto_shift
from supertuner.models.quantise import quantise
from supertuner.models.spec import Expert, Family, Model
from supertuner.optim import table as optimizers
from supertuner.optim.ema import Ema
from supertuner.optim.schedule import course_of, ramp_text
from supertuner.step.precision import Precision
from supertuner.step.window import Rules, Trainee, prepare
from supertuner.train import checkpoint
from supertuner.train.checkpoint_reading import Loaded, load
from supertuner.train.feed import Maker
from supertuner.train.loss_log import LOSSES, LossLog
from supertuner.train.model_source import opened_model
from supertuner.train.parallel import Alone, Parallel
from supertuner.train.run import HELD_OUT, Run
from supertuner.train.saving import restore


@contextmanager
def open_run(
    config: RunConfig,
    name: str,
    folder: Path,
    *,
    sink: Sink,
    progress: Progress,
    host: Host,
    resume: str | None = None,
    parallel: Parallel | None = None,
) -> Iterator[Run]:
    """Everything that a run needs, ready for its loop; leaving closes it. `resume` is said instead of the setting's."""
    parallel = parallel or Alone()
    device = device_of(config.train.device)
    precision = Precision(config.train.mixed_precision, device)
    begin = _checkpoint(folder, resume or config.checkpoints.resume, sink, progress)
    family, model = opened_model(config, folder)
    sink.emit(Decided("model", model.title, f"what {model.source.path} says of itself"))
    sink.emit(Decided("train.device", str(device), _why_device(config.train.device)))
    experts = experts_of(config, model)
    require_backend(config.model.attention, device)
    with ExitStack() as opened:
        maker, held_out = _makers(config, family, model, opened, precision, sink=sink, progress=progress, host=host)
        course = course_of(config, maker.corpus.order.epoch_begin, parallel.ranks)
        sink.emit(Decided("train.steps", course.total_steps, course.why))
        if course.ramp.grows:
            text = ramp_text(course.ramp, config.train.batch_size, parallel.ranks)
            sink.emit(Noted("ramp", text))
        trained = {expert.name: _trained(config, family, model, expert, precision, sink) for expert in experts}
        run = Run(
            name=name,
            config=config,
            folder=folder,
            sink=sink,
            progress=progress,
            host=host,
            device=device,
            dtype=precision.dtype,
            parallel=parallel,
            family=family,
            model=model,
            course=course,
            rules=Rules(
                denoise=partial(family.denoise, model),
                objective=Objective(family.prediction, weighting=config.objective.weighting),
                precision=precision,
                max_grad_norm=config.train.max_grad_norm,
            ),
            maker=maker,
            held_out=held_out,
            trainees=tuple(_trainee(config, expert, trained[expert.name], precision) for expert in experts),
            trained=trained,
            losses=opened.enter_context(LossLog(folder / LOSSES)),
            validations=opened.enter_context(LossLog(folder / HELD_OUT)),
        )
        if begin is None:
            run.losses.begin()
            run.validations.begin()
        else:
            restore(run, begin)
            sink.emit(Noted("resume", f"going on after step {run.step}, from {begin.path}"))
        yield run


def device_of(setting: str) -> torch.device:
    """Where to compute."""
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(setting)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch says so where a device is unknown, absent or not built in
        reason = str(error).splitlines()[0]
        raise TrainError(f'train.device is "{setting}", which cannot be used here: {reason}; use "auto"') from error
    return device


def experts_of(config: RunConfig, model: Model) -> tuple[Expert, ...]:
    """The experts that are trained."""
    wanted = config.model.experts
    found = tuple(expert for expert in model.experts if wanted in ("all", expert.name))
    if not found:
        there = ", ".join(expert.name for expert in model.experts)
        raise TrainError(f'model.experts is "{wanted}", and {model.title} has {there}; use "all"')
    return found


def law_of(config: RunConfig, family: Family, model: Model, shape: tuple[int, ...]) -> Law:
    """How noise levels are drawn for latents of this shape."""
    settings = config.objective
    shift = auto_shift(family.tokens(model, shape)) if settings.shift == "auto" else settings.shift
    assert not isinstance(shift, str)
    return Law(settings.timesteps, settings.logit_mean, settings.logit_std, model.shift if shift is None else shift)


def _why_device(setting: str) -> str:
    if setting != "auto":
        return "as configured"
    return "there is a GPU" if torch.cuda.is_available() else "there is no GPU that torch can use"


def _checkpoint(folder: Path, resume: str, sink: Sink, progress: Progress) -> Loaded | None:
    """What the run goes on from; None: it begins."""
    checkpoints = folder / checkpoint.FOLDER
    if resume == "never":
        if checkpoint.find(checkpoints):
            raise CheckpointError(f'{checkpoints} holds checkpoints, and resume is "never"; give another run.name')
        return None
    if resume == "latest":
        return checkpoint.latest(checkpoints, sink, progress)
    return load(Path(resume).expanduser(), progress)


def _makers(
    config: RunConfig,
    family: Family,
    model: Model,
    opened: ExitStack,
    precision: Precision,
    *,
    sink: Sink,
    progress: Progress,
    host: Host,
) -> tuple[Maker, Maker | None]:
    """Who makes training batches, and who makes those of held-out data; both from caches that are built now."""
    raise NotImplementedError


def _trained(
    config: RunConfig, family: Family, model: Model, expert: Expert, precision: Precision, sink: Sink
) -> adapters.Trained:
    """An expert's module on its device, with what is trained of it."""
    settings = config.adapter
    dtype = torch.float32 if settings.type == "full" else precision.dtype
    module = family.denoiser(model, expert, dtype).to(precision.device)
    use_backend(module, config.model.attention)
    if config.model.base_weights != "as_computed":
        quantise(module, config.model.base_weights, precision.device)
    targets = adapters.targets_of(settings, family.targets)
    trained = adapters.attach(module, settings, targets, seed=config.run.seed, name=expert.name)
    prepare(module, config.train.gradient_checkpointing)
    if config.model.compile:
        compile_blocks(module)
    count = sum(parameter.numel() for parameter in trained.parameters.values())
    sink.emit(Decided(f"trained.{expert.name}", count, f"parameters of {settings.type} on {expert.part}"))
    return trained


def _trainee(config: RunConfig, expert: Expert, trained: adapters.Trained, precision: Precision) -> Trainee:
    parameters = dict(trained.parameters)
    decay = config.train.ema_decay
    return Trainee(
        expert=expert,
        module=trained.module,
        parameters=parameters,
        optimizer=optimizers.build(config.optimizer, parameters, expert.name),
        ema=None if decay is None else Ema(parameters, decay),
        scaler=precision.scaler(),
    )
