"""Tries a configuration in about a minute: the full-size run is checked without its weights, and a tiny one trained.

    machine, data, model, adapter   checks of the run as configured; problems are collected, not raised
    trial                           the same configuration on the family's tiny model, in a run folder of its own

Nothing of the user is changed: staged datasets and configs from the hub are those that the run itself would write.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from supertuner.api.session import build_saved_config, load_command_config, open_session, run_name
from supertuner.api.training import TrainingResult, train_in_session
from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.core.errors import ModelError, SourceError, SuperTunerError
from supertuner.core.events import Event, MeasurementEvent, NullSink, TeeSink
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.run_folder import DECISIONS_FILE, read_decisions
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus, absent, bad, good
from supertuner.tools.trial.findings import from_error
from supertuner.tools.trial.shrink import SIDE, replaced_settings, trial_name, trial_settings

if TYPE_CHECKING:
    import torch

    from supertuner.plan.forecast.storage import ExpertStateSizes
    from supertuner.tools.trial.machine_checks import BackgroundForecast
    from supertuner.tools.trial.model_checks import ModelFindings

GROUP = "trial"
FORECAST_READY_S = 50.0
"""Seconds after the start until which the forecast is waited for."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """The arguments of `supertuner train CONFIG --try`."""

    config: Path
    sets: tuple[str, ...] = ()
    limit: int | None = None
    force: bool = False

    @property
    def next_command(self) -> str:
        words = ["supertuner", "train", str(self.config), *(word for one in self.sets for word in ("--set", one))]
        words += ["--limit", str(self.limit)] if self.limit is not None else []
        return shlex.join([*words, *(["--force"] if self.force else [])])


@dataclass(slots=True)
class TrialResult:
    """What was checked, and the trial run."""

    checks: list[CheckResult] = field(default_factory=list)
    training: TrainingResult | None = None
    """None: the trial run failed, or could not start."""
    seconds: float = 0.0

    @property
    def has_problems(self) -> bool:
        return any(check.status is CheckStatus.BAD for check in self.checks)


class ProgressConsole(ConsoleSink):
    """Shows progress and the line of training steps. Events of the trial are in its run folder."""

    def emit(self, event: Event, /) -> None:
        if isinstance(event, MeasurementEvent):
            super().emit(event)


def run_trial(request: TrialRequest, show: Callable[[Sequence[CheckResult]], None]) -> TrialResult:
    """Check the full-size run and train the tiny one. `show` gets the results of each group when they are there.

    Raises ConfigError or ModelError if the configuration cannot be read, or has no model.
    """
    began, result = time.monotonic(), TrialResult()
    loaded = load_command_config(request.config, request.sets, limit=request.limit, needs_data=False)
    if not loaded.config.datasets:
        raise SourceError(f"{loaded.source_name}: there is no dataset; add one under datasets")
    if loaded.config.model.path is None:
        raise ModelError('model.path is not set; name a folder, a model on the hub, or "tiny"')

    def add(checks: Sequence[CheckResult]) -> None:
        result.checks += checks
        show(checks)

    with ExitStack() as stack:
        console = stack.enter_context(ProgressConsole())
        with console.phase("loading libraries"):
            from supertuner.tools.trial import machine_checks as machine
        device, device_checks = machine.check_device(loaded.config)
        forecast = _start_forecast(request, loaded, device)
        if not isinstance(forecast, str):
            stack.enter_context(forecast)
        replaced, backend_checks = machine.check_backends(loaded.config, device)
        notes = [CheckResult("configuration", note.what, CheckStatus.WARNING, note.message) for note in loaded.notes]
        add([*notes, *device_checks, *backend_checks])
        title = _check_full_size(loaded, device, console, add)
        result.training = _run_tiny(request, loaded, device, replaced, add)
        if result.training is not None and title is not None:
            add(_compare_titles(result.training.run_dir, title))
        if isinstance(forecast, str):
            add([absent("machine", "memory", forecast)])
        elif result.training is None or result.training.stopped_by is None:  # a stopped trial waits for nothing
            refuses = loaded.config.forecast.refuse and not request.force
            until = began + FORECAST_READY_S
            add([machine.check_memory(forecast, until, request.config, refuses=refuses)])
    result.seconds = time.monotonic() - began
    return result


def _start_forecast(request: TrialRequest, loaded: LoadedConfig, device: torch.device) -> BackgroundForecast | str:
    """The forecast of the full-size run, begun beside everything else, or why there is none."""
    from supertuner.plan.forecast.preflight import SHARDED_NOT_FORECAST, device_capacity, why_not_needed
    from supertuner.tools.trial.machine_checks import BackgroundForecast, assumes_gpu

    config = loaded.config
    if config.forecast.before_training == "never":
        return 'no forecast: forecast.before_training is "never"'
    if config.parallel.strategy == "fsdp":
        return f"no forecast: {SHARDED_NOT_FORECAST}"
    if reason := why_not_needed(config, device_capacity(device, HostFacts())):
        return reason
    limits = [f"datasets[{index}].limit={request.limit}" for index in range(len(config.datasets))]
    sets = [*request.sets, *(limits if request.limit is not None else [])]
    machine = None if assumes_gpu(config, device) else "this"
    return BackgroundForecast(request.config, sets, machine)


def _check_full_size(
    loaded: LoadedConfig,
    device: torch.device,
    console: ProgressConsole,
    add: Callable[[Sequence[CheckResult]], None],
) -> str | None:
    """All checks but the forecast. Returns the title of the full-size model; None: it is not known."""
    from supertuner.models.family_loader import load_family
    from supertuner.tools.trial.adapter_checks import check_experts
    from supertuner.tools.trial.data_checks import check_datasets
    from supertuner.tools.trial.model_checks import check_captions, check_weights, find_model

    config, host = loaded.config, HostFacts()
    run_dir = config.run.output_dir / run_name(loaded, build_saved_config(loaded))
    data = check_datasets(config, RunContext(run_dir, NullSink(), console, host))
    add(data.checks)
    family = load_family(config.model.family)
    found = find_model(config, run_dir)
    captions = {**data.captions, **{prompt: "validation.prompts" for prompt in config.validation.prompts}}
    add([*found.checks, *check_weights(found, console), *check_captions(found, family, captions, console)])
    if found.model is None:
        return None
    with console.phase("matching layers"):
        adapter = check_experts(config, family, found.model)
    add(adapter.checks)
    add(_check_space(loaded, device, found, adapter.sizes))
    return found.model.title


def _check_space(
    loaded: LoadedConfig, device: torch.device, found: ModelFindings, sizes: Sequence[ExpertStateSizes]
) -> list[CheckResult]:
    from supertuner.plan.forecast.preflight import device_capacity
    from supertuner.tools.trial import machine_checks as machine
    from supertuner.tools.trial.model_checks import download_folder

    host = HostFacts()
    try:
        needs = machine.list_space_needs(loaded.config, sizes, device_capacity(device, host))
    except SuperTunerError as error:
        return [from_error("machine", "space", error, CheckStatus.WARNING)]
    if found.download_bytes:
        needs.append(machine.SpaceNeed("the model", download_folder(), found.download_bytes))
    return list(machine.check_space(needs, host))


# ── the tiny run ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _run_tiny(
    request: TrialRequest,
    loaded: LoadedConfig,
    device: torch.device,
    replaced: dict[str, str],
    add: Callable[[Sequence[CheckResult]], None],
) -> TrainingResult | None:
    config = loaded.config
    name = trial_name(run_name(loaded, build_saved_config(loaded)), config.run.output_dir)
    changes = [*replaced_settings(config), *((key, value, "see above") for key, value in replaced.items())]
    overrides: dict[str, JSON] = {**trial_settings(config, name), **{key: value for key, value, _ in changes}}
    overrides["train.device"] = str(device)
    noted = [f"{key}: {why}" for key, _, why in changes if why]
    if noted:
        add([absent(GROUP, "left out", "; ".join(noted))])
    try:
        small = load_config(request.config, sets=request.sets, overrides=overrides, check_paths=False)
        training = _train_quietly(small)
    except SuperTunerError as error:
        add([from_error(GROUP, "training", error)])
        return None
    add([_check_training(training), *_check_samples(training), *_check_exports(training)])
    return training


def _train_quietly(small: LoadedConfig) -> TrainingResult:
    """Train with progress on the console; all events go to the run folder alone."""
    with open_session(small, show_progress=False) as run_session, ProgressConsole() as console:
        assert run_session.run_folder is not None
        sink = TeeSink(console, run_session.run_folder)
        return train_in_session(replace(run_session, console=console, sink=sink))


def _check_training(training: TrainingResult) -> CheckResult:
    losses = [record.loss for record in training.losses if record.loss is not None]
    text = f"{training.steps} steps of a tiny model at {SIDE} pixels in {training.seconds:.1f} s, {training.run_dir}"
    if not losses or not all(math.isfinite(loss) for loss in losses):
        return bad(GROUP, "training", f"{text}: a loss is not finite", "lower optimizer.learning_rate")
    return good(GROUP, "training", f"{text}; losses {', '.join(f'{loss:.3g}' for loss in losses)}")


def _compare_titles(run_dir: Path, full_size_title: str) -> list[CheckResult]:
    """A remark if the tiny model of the family is of another kind than the model of the run."""
    tiny_title = next(one["value"] for one in read_decisions(run_dir / DECISIONS_FILE) if one["what"] == "model")
    if tiny_title == full_size_title:
        return []
    return [absent(GROUP, "tiny model", f"it is {tiny_title}; what only {full_size_title} has was not tried")]


def _check_samples(training: TrainingResult) -> list[CheckResult]:
    grids = sorted((training.run_dir / "samples").glob("step-*"))
    return [good(GROUP, "samples", f"{grids[-1]} (noise: the model is random)")] if grids else []


def _check_exports(training: TrainingResult) -> list[CheckResult]:
    """Read every exported file again, with the reader of `supertuner adapter inspect`."""
    from supertuner.api.adapters import inspect
    from supertuner.models.loading import read_weight_header

    checks = []
    for path in training.adapters:
        try:
            if path.is_dir():
                tensors = sum(len(read_weight_header(file)) for file in sorted(path.glob("*.safetensors")))
                checks.append(good(GROUP, "export", f"{path} reads back: {tensors} tensors"))
                continue
            found = inspect(path)
            layers = sum(found.kinds.values())
            if found.unknown or found.not_finite:
                what = f"{len(found.unknown)} unknown names, {len(found.not_finite)} tensors that are not finite"
                checks.append(bad(GROUP, "export", f"{path}: {what}", f"run `supertuner adapter inspect {path}`"))
            else:
                checks.append(good(GROUP, "export", f"{path} reads back: {layers} layers, {found.scheme} names"))
        except SuperTunerError as error:
            checks.append(from_error(GROUP, "export", error))
    return checks
