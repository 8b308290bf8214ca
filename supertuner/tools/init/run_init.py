"""`supertuner init`: surveys the data, searches settings by forecast, and writes them with reasons as comments.

Nothing is overwritten. Everything that can be refused is refused before the first forecast, which takes longest.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from supertuner.api.forecasting import estimate_runs
from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.config.sources.render import canonical_tree, render_tree
from supertuner.core.errors import ConfigError, OptionError, TrainError
from supertuner.core.types import MediaKind
from supertuner.memory.machines import MACHINES
from supertuner.models.published_models import find_published, models_of_family
from supertuner.plan.forecast.report import change_text
from supertuner.plan.forecast.results import FitStatus, MachineCapacity, RunForecast, capacity_text, verdict_text
from supertuner.plan.forecast.suggestions import FORECAST_ONLY_MACHINES
from supertuner.plan.forecast.target_machine import THIS_MACHINE
from supertuner.sinks.console import ConsoleSink
from supertuner.tools.init.commented_yaml import add_comments
from supertuner.tools.init.folder_survey import FolderSurvey, survey_folder
from supertuner.tools.init.reasons import search_reasons
from supertuner.tools.init.search import BASE_WEIGHTS, SettingsTrial, SettingValues, search_settings
from supertuner.tools.init.settings import WINDOW, ChosenSetting, ModelChoice, settings_from_data, survey_text
from supertuner.tools.model_list import find_capacity, require_family, weights_fit

GIVEN = "given with --set"
EDITING, REFERENCES = "image editing", "datasets[0].conditioning_dir"
KINDS_BY_TASK: Mapping[str, tuple[MediaKind, ...]] = {
    "text to video": (MediaKind.IMAGE, MediaKind.VIDEO),
    "image to video": (MediaKind.VIDEO,),
}
"""What models of a task learn from; all others learn from images."""


@dataclass(frozen=True, slots=True)
class InitRequest:
    """The arguments of `supertuner init`."""

    family: str
    data: Path
    machine: str
    out: Path
    model: str | None = None
    trigger_word: str | None = None
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class InitResult:
    """What was written."""

    request: InitRequest
    survey: FolderSurvey
    settings: tuple[ChosenSetting, ...]
    """In the order of the file."""
    forecast: RunForecast


def this_machine_has_gpu() -> bool:
    return not find_capacity(THIS_MACHINE).on_cpu


def run_init(request: InitRequest, console: ConsoleSink) -> InitResult:
    """Survey, search, write. Raises OptionError, SourceError or ConfigError for wrong arguments, and TrainError if
    nothing fits the machine."""
    require_new_file(request.out)
    for option, text in (("--data", str(request.data)), ("--trigger-word", request.trigger_word or "a")):
        if not text.isprintable():
            raise OptionError(f"{option} {text!r}: a configuration cannot hold these characters; use others")
    model = choose_model(request.family, request.model)
    capacity = find_capacity(request.machine)
    given = {text.partition("=")[0].strip() for text in request.sets}
    if _task(model) == EDITING and REFERENCES not in given:
        raise OptionError(f"{model.path} edits images: name their folder with --set {REFERENCES}=FOLDER")
    survey = survey_folder(request.data, _media_kinds(model), request.trigger_word)
    if model.published is not None and not weights_fit(model.published, capacity).possible:
        raise TrainError(_hopeless_text(model, capacity))
    base = settings_from_data(model, survey, request.trigger_word)

    def load(changes: SettingValues) -> LoadedConfig:
        free = {one.path: one.value for one in base if one.path not in given}
        return load_config({}, sets=request.sets, overrides={**free, **changes})

    def forecast(changes: SettingValues) -> RunForecast:
        return estimate_runs([load(changes)], request.machine, console=console)[0]

    load({})  # a wrong --set is refused before the first forecast
    fixed = given if _is_valid(load, {BASE_WEIGHTS: "int8"}) else {*given, BASE_WEIGHTS}
    chosen, trials = search_settings(forecast, min(WINDOW, survey.usable), fixed)
    if chosen is None:
        raise TrainError(_refusal_text(trials, model, capacity))
    loaded = load(chosen.settings)
    settings = {one.path: one for one in (*base, *search_reasons(chosen, trials))}
    settings |= {path: ChosenSetting(path, value, GIVEN) for path, value, _ in loaded.iter_settings() if path in given}
    ordered = [settings[path] for path, _, _ in loaded.iter_settings() if path in settings]
    write_config(request.out, loaded, ordered, chosen.forecast)
    return InitResult(request, survey, tuple(ordered), chosen.forecast)


def _is_valid(load: Callable[[SettingValues], LoadedConfig], changes: SettingValues) -> bool:
    """Whether the settings given allow these changes: 8-bit weights need an adapter, for example."""
    try:
        load(changes)
    except ConfigError:
        return False
    return True


def choose_model(family: str, path: str | None) -> ModelChoice:
    """The model at `path`; None: the first published one of the family."""
    require_family(family)
    path = path or next(iter(models_of_family(family)))
    published = find_published(path)
    if published is not None and published.family != family:
        raise OptionError(f"--model {path} is of family {published.family}; set `family` to {published.family}")
    return ModelChoice(family, path, published)


def require_new_file(path: Path) -> None:
    """Raises OptionError if `path` exists, is not YAML, or cannot be written."""
    if path.suffix not in (".yaml", ".yml"):
        raise OptionError(f"--out {path}: the configuration is YAML; give it a name that ends in .yaml")
    if os.path.lexists(path):
        raise OptionError(f"--out {path} exists, and nothing is overwritten; give another name, or remove it")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"--out {path}: cannot be written; name a file in a folder that exists and is writable")


def write_config(path: Path, loaded: LoadedConfig, settings: list[ChosenSetting], forecast: RunForecast) -> None:
    text = render_tree(canonical_tree(loaded.provenance, path.absolute().parent), "yaml")
    header = [
        f"{forecast.model} on {capacity_text(forecast.capacity)}, written by `supertuner init`.",
        *verdict_lines(forecast),
        "All figures are modelled, not measured. `supertuner estimate` shows the whole forecast.",
    ]
    comments = {one.path: one.reason for one in settings if one.reason}
    with path.open("x", encoding="utf-8") as file:  # "x": never an existing file
        file.write(add_comments(text, comments, header))


def verdict_lines(forecast: RunForecast) -> list[str]:
    """Whether the run fits, and a warning if it does only just."""
    tight = "warning: it fits only tightly; smaller samples (datasets[0].resolution, frames) are safer"
    return [verdict_text(forecast), *([tight] if forecast.verdict.fit is FitStatus.TIGHT else [])]


def summary_lines(result: InitResult) -> list[str]:
    """What was chosen and why, and the commands to type next."""
    request, survey = result.request, result.survey
    lines = [f"{survey.folder}: {survey_text(survey)}", *(f"note: {note}" for note in survey.notes), ""]
    for one in result.settings:
        if one.reason:
            lines.append(f"{one.path}: {json.dumps(one.value, ensure_ascii=False)}")
            lines += [f"    {line}" for line in one.reason.split("\n")]
    out = shlex.quote(str(request.out))
    return [
        *(*lines, "", *verdict_lines(result.forecast)),
        *("", f"{request.out} is written; next:"),
        f"  supertuner config validate {out}",
        f"  supertuner estimate {out} --machine {request.machine}",
        f"  supertuner train {out} --try",
        f"  supertuner train {out}",
    ]


def _task(model: ModelChoice) -> str:
    """What the model does; one that is not in the table is taken to do what the first of its family does."""
    return (model.published or next(iter(models_of_family(model.family).values()))).task


def _media_kinds(model: ModelChoice) -> tuple[MediaKind, ...]:
    return KINDS_BY_TASK.get(_task(model), (MediaKind.IMAGE,))


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _refusal_text(trials: list[SettingsTrial], model: ModelChoice, capacity: MachineCapacity) -> str:
    """Why nothing fits, from the cheapest settings that were forecast, and what would."""
    cheapest = trials[-1].forecast
    changes = [change_text(change) for change in cheapest.changes if change.fits]
    lines = [f"{verdict_text(cheapest)}, with the cheapest settings that were forecast: {cheapest.settings}"]
    lines += (
        ["with one of these changes it would fit, modelled:", *(f"  {change}" for change in changes)] if changes else []
    )
    return "\n".join([*lines, *_alternatives(model, capacity), "nothing was written"])


def _hopeless_text(model: ModelChoice, capacity: MachineCapacity) -> str:
    weights = f"the weights of {model.path} do not fit {capacity_text(capacity)}, not even in 8 bits"
    if capacity.host_bytes is None:
        weights += "; on that machine itself, --machine this also counts its host memory"
    return "\n".join([weights, *_alternatives(model, capacity), "nothing was written"])


def _alternatives(model: ModelChoice, capacity: MachineCapacity) -> list[str]:
    """Other machines for this model, and smaller models of its family for this machine, by their weights."""
    if model.published is None:
        return []
    weights, others = model.published.weights, models_of_family(model.family)
    known = [key for key, row in MACHINES.items() if row.gpu_bytes.value is not None and key != capacity.machine.key]
    found = {
        "--machine": [
            key
            for key in known
            if key not in FORECAST_ONLY_MACHINES and weights_fit(model.published, find_capacity(key)).possible
        ],
        "--model": [
            name
            for name, other in others.items()
            if other.experts * other.weights.denoiser < model.published.experts * weights.denoiser
            and weights_fit(other, capacity).possible
        ],
    }
    return [f"by their weights, these may fit: {option} {', '.join(names)}" for option, names in found.items() if names]
