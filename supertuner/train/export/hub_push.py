"""Pushes the adapter of a run, a step, a checkpoint or a file to the Hugging Face hub, with samples and a model card.

A push is one commit, and none if the hub has the same files already. It deletes nothing: files of other steps stay. A
card that SuperTuner did not write, or that was edited, is kept unless the caller asks to replace it.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import HubError, HubUnreachableError, ModelError
from supertuner.core.events import NoteEvent, Sink, WarningEvent
from supertuner.core.types import JSON
from supertuner.models import hub_upload
from supertuner.models.adapters.keys_convert import adapter_layers
from supertuner.runs.run_reader import RunReader, open_run
from supertuner.sinks.saved_config import flatten_settings
from supertuner.train.checkpoint.manifest import TENSORS_SUFFIX, checkpoint_name
from supertuner.train.export.adapter_export import PROGRAMS, export_files, program_path
from supertuner.train.export.adapter_files import AdapterFile, open_adapter, refuse_checkpoint_part, with_expert
from supertuner.train.export.adapter_inspect import adapter_kind
from supertuner.train.export.export import OWN_FORMAT
from supertuner.train.export.export_metadata import base_model_name, hub_task, strip_folders
from supertuner.train.export.model_card import (
    KIND_TITLES,
    CardFacts,
    CardOrigin,
    CardSample,
    card_origin,
    render_card,
)
from supertuner.train.export.run_adapters import RunAdapter, adapter_files_in, is_run_source, open_run_adapter
from supertuner.train.run.training_run import EXPORTS_DIR, SAMPLES_DIR

PUSH_SETTING: Final = "exports.push_to_hub"
CARD_BLOCKS: Final = ("model", "adapter", "objective", "gh200_optimizations", "train", "optimizer")
"""Blocks whose settings are in a card; of a dataset, only these:"""
CARD_DATASET_SETTINGS: Final = ("resolution", "frames", "repeats")
NOT_IN_CARD: Final = ("model.path", "model.offline", "train.device")
MAX_SAMPLES: Final = 12
SAMPLES_FILE: Final = "samples.json"


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What the caller of a push chooses. None: as the settings of the run say."""

    programs: tuple[str, ...] = ()
    """Programs whose files are pushed, besides `exports.formats` of the run."""
    private: bool | None = None
    license: str | None = None
    trigger_word: str | None = None
    overwrite: bool = False
    """Replace a model card that SuperTuner did not write, or that was edited."""


@dataclass(frozen=True, slots=True)
class PushedAdapter:
    """What a push did."""

    repository: str
    url: str
    is_private: bool
    has_new_commit: bool
    """False: the hub had the same files already."""
    files: tuple[str, ...]
    license: str | None
    kept_card: CardOrigin | None
    """Why the card on the hub was kept: it is foreign, or was edited; None: it was not kept."""

    def to_dict(self) -> dict[str, JSON]:
        """Everything as JSON values."""
        return {
            "repository": self.repository,
            "url": self.url,
            "private": self.is_private,
            "new_commit": self.has_new_commit,
            "files": list(self.files),
            "license": self.license,
            "kept_card": self.kept_card,
        }


@dataclass(frozen=True, eq=False, slots=True)
class _PushContent:
    files: Mapping[str, Path]
    """Path in the repository → file."""
    card: CardFacts
    title: str
    """Of the commit."""


def check_access(repository: str, sink: Sink) -> None:
    """HubError if the run could certainly not be pushed at its end; a warning if the hub cannot be reached now."""
    try:
        account = hub_upload.read_account()
    except HubUnreachableError as error:
        text = f"access to {repository} could not be checked: {error}; the push is tried when training ends"
        sink.emit(WarningEvent(PUSH_SETTING, text))
        return
    except HubError as error:
        raise HubError(f'{PUSH_SETTING} is "{repository}": {error}') from None
    if problem := account.problem_with(repository):
        raise HubError(f'{PUSH_SETTING} is "{repository}": {problem}')
    sink.emit(NoteEvent(PUSH_SETTING, f"{repository} is pushed when training ends, as {account.name}"))


def push_adapter(source: str, repository: str, options: PushOptions) -> PushedAdapter:
    """Push what `source` names: a run (its newest step), `RUN@STEP`, a checkpoint, a file, or a folder of files.

    HubError if the hub refuses it or cannot be reached; ModelError if there is no such adapter, before anything is
    created on the hub.
    """
    with tempfile.TemporaryDirectory(prefix="supertuner-") as folder, _open_files(source) as (adapter, paths):
        private = options.private
        if private is None:
            private = adapter is None or adapter.config.exports.hub_private
        content = _collect(repository, options, adapter, paths, Path(folder))
        remote = hub_upload.open_repository(repository, private=private)
        current = hub_upload.read_text(remote, hub_upload.CARD_FILE)
        origin = None if current is None else card_origin(current)
        kept_card = None if options.overwrite or origin is CardOrigin.OWN else origin
        files: dict[str, Path | bytes] = {**content.files}
        if kept_card is None:
            files[hub_upload.CARD_FILE] = render_card(content.card).encode()
        is_new = hub_upload.commit_files(remote, files, content.title)
    return PushedAdapter(
        repository, remote.url, remote.is_private, is_new, tuple(files), content.card.license, kept_card
    )


@contextmanager
def _open_files(source: str) -> Iterator[tuple[RunAdapter | None, tuple[Path, ...]]]:
    """The adapter of a run, or None, and the files of the adapter."""
    path = Path(source)
    paths = adapter_files_in(path) if path.is_dir() else () if is_run_source(source) else (path,)
    if paths:
        yield None, paths
        return
    with open_run_adapter(source) as adapter:
        yield adapter, adapter.files


def _collect(
    repository: str, options: PushOptions, adapter: RunAdapter | None, paths: Sequence[Path], folder: Path
) -> _PushContent:
    for path in paths:
        refuse_checkpoint_part(path)
    own_files = [with_expert(open_adapter(path), None) for path in paths]
    by_program: dict[str, list[Path]] = {}
    for file in own_files:
        by_program.setdefault(_program_of(file), []).append(file.path)
    formats = () if adapter is None else tuple(name for name in adapter.config.exports.formats if name != OWN_FORMAT)
    for program in dict.fromkeys((*formats, *options.programs)):
        if program not in by_program and not (adapter is not None and program == OWN_FORMAT):
            by_program[program] = _program_files(own_files, program, adapter, folder)
    names = {program: [path.name for path in found] for program, found in by_program.items()}
    files = {path.name: path for found in by_program.values() for path in found}
    card = _file_facts(repository, options, own_files, names)
    if adapter is None:
        return _PushContent(files, card, f"{own_files[0].path.stem}, pushed by SuperTuner")
    samples = dict(_read_samples(adapter))
    for sample_files in samples.values():
        files |= sample_files
    title = f"{adapter.run_dir.resolve().name}, step {adapter.step}, pushed by SuperTuner"
    return _PushContent(files, _with_run(card, adapter, tuple(samples)), title)


def _program_of(file: AdapterFile) -> str:
    """The program whose names the file has; "" if it is none of them, such as lycoris-lora."""
    if file.reading.scheme.name == OWN_FORMAT and all(layer.is_lora for layer in adapter_layers(file.reading)):
        return OWN_FORMAT
    return next((name for name in PROGRAMS if file.path.name.endswith(f".{name}{TENSORS_SUFFIX}")), "")


def _program_files(
    own_files: Sequence[AdapterFile], program: str, adapter: RunAdapter | None, folder: Path
) -> list[Path]:
    """The files for a program: those that the run exported, else written now into `folder`."""
    if adapter is None:
        try:
            return [done.path for done in export_files(own_files, program, folder, None)]
        except ModelError as error:  # it may ask for parameters of `adapter export`
            raise ModelError(
                f"{error}; write it with `supertuner adapter export` first, and push the result"
            ) from error
    exported = adapter.run_dir / EXPORTS_DIR / checkpoint_name(adapter.step)
    existing = [program_path(exported / file.path.name, program) for file in own_files]
    if all(path.is_file() for path in existing):
        return existing
    return [done.path for done in export_files(own_files, program, folder, adapter.base_weight_files)]


def _kinds(files: Sequence[AdapterFile]) -> tuple[str, ...]:
    kinds = [adapter_kind(layer) for file in files for layer in adapter_layers(file.reading)]
    recorded = [str(file.supertuner_metadata.get("type")) for file in files]
    words = [word for kind in kinds for word in kind.split(" with ")]
    return tuple(dict.fromkeys((*words, *(kind for kind in recorded if kind in KIND_TITLES))))


def _file_facts(
    repository: str, options: PushOptions, files: Sequence[AdapterFile], names: Mapping[str, Sequence[str]]
) -> CardFacts:
    """The facts that the metadata of the files record."""
    facts = files[0].supertuner_metadata
    versions, base, task = facts.get("versions"), facts.get("base_model"), facts.get("task")
    recorded = facts.get("settings")
    settings = dict(flatten_settings(recorded)) if isinstance(recorded, Mapping) else {}
    return CardFacts(
        repository=repository,
        kinds=_kinds(files),
        files=names,
        version=str(versions["supertuner"]) if isinstance(versions, Mapping) and "supertuner" in versions else None,
        base_model=base if isinstance(base, str) else None,
        task=task if isinstance(task, str) else None,
        license=options.license,
        trigger_word=options.trigger_word,
        figures=_figures(facts),
        settings={name: strip_folders(value) for name, value in settings.items() if value != {}},
    )


def _with_run(facts: CardFacts, adapter: RunAdapter, samples: tuple[CardSample, ...]) -> CardFacts:
    """The facts with what only the run knows."""
    run, exports = open_run(adapter.run_dir), adapter.config.exports
    words = dict.fromkeys(dataset.captions.trigger_word for dataset in adapter.config.datasets)
    trigger_word = facts.trigger_word or exports.trigger_word or ", ".join(word for word in words if word)
    return replace(
        facts,
        base_model=base_model_name(adapter.model.source),
        task=hub_task(adapter.model),
        license=facts.license or exports.license,
        trigger_word=trigger_word or None,
        figures={**facts.figures, "dataset": dataset_size(run, adapter.config)},
        settings=dict(_card_settings(run)),
        samples=samples,
    )


def _figures(facts: Mapping[str, object]) -> dict[str, JSON]:
    names = {"step": "steps", "samples": "samples trained on", "seed": "seed"}
    values = {title: facts.get(name) for name, title in names.items()}
    return {title: value for title, value in values.items() if isinstance(value, int)}


def dataset_size(run: RunReader, config: RunConfig) -> str | None:
    """The number of training samples, `260 images`; None if the run does not record it."""
    figures, counts = run.summary().figures, Counter[str]()
    for dataset in config.datasets:
        staged = figures.get(f"datasets[{dataset.id}].staging")
        if not dataset.held_out and isinstance(staged, Mapping) and isinstance(staged.get("files"), int):
            counts[str(staged.get("kind"))] += int(str(staged["files"]))
    return ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in counts.items()) or None


def _card_settings(run: RunReader) -> Iterator[tuple[str, JSON]]:
    """The settings that were set and affect the result, without folders."""
    for row in run.explicit_settings():
        path = str(row["path"])
        block, _, name = path.partition(".")
        is_of_dataset = block.startswith("datasets[") and name in CARD_DATASET_SETTINGS
        if (block in CARD_BLOCKS or is_of_dataset) and path not in NOT_IN_CARD and row["value"] is not None:
            yield path, strip_folders(row["value"])


def _read_samples(adapter: RunAdapter) -> Iterator[tuple[CardSample, dict[str, Path]]]:
    """The first samples of this step, each with its files by their paths in the repository."""
    name = checkpoint_name(adapter.step)
    folder = adapter.run_dir / SAMPLES_DIR / name
    if not (folder / SAMPLES_FILE).is_file():
        return
    try:
        rows = json.loads((folder / SAMPLES_FILE).read_bytes())["samples"][:MAX_SAMPLES]
        for row in rows:
            media, image = row["files"][0], row["files"][-1]
            files = {f"{SAMPLES_DIR}/{name}/{file}": folder / Path(file).name for file in dict.fromkeys((media, image))}
            urls = list(files)
            yield CardSample(str(row["prompt"]), int(row["seed"]), urls[0], urls[-1]), files
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{folder / SAMPLES_FILE} is damaged; remove {folder} to push without samples") from error
