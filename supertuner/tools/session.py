"""A command at work on a configuration: its run folder locked, and everything that is said on screen and on record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from supertuner.arena.format import ArenaLifetime
from supertuner.config.settings.key_paths import CHANGEABLE_SETTINGS, setting_defaults
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.environment import strip_uvm_keys_for_torch
from supertuner.config.sources.launcher import SINGLE_PROCESS_ENVIRONMENT, LauncherEnvironment
from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.core.errors import ConfigError, SourceError
from supertuner.core.events import DecisionEvent, NoteEvent, NullSink, Sink, TeeSink
from supertuner.core.host import HostFacts
from supertuner.data.staging.arena_lookup import dataset_home_path
from supertuner.data.staging.arena_lookup import find_staged_arena
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.run_folder import RunFolder
from supertuner.sinks.saved_config import SavedConfig


@dataclass(frozen=True, slots=True)
class RunSession:
    config: RunConfig
    run_dir: Path
    """The run's folder."""
    run_folder: RunFolder | None
    """The same, locked and kept; None: another process of the job has it."""
    console: ConsoleSink | NullSink
    sink: Sink
    """Reaches the screen and the run's folder."""
    host: HostFacts
    launcher: LauncherEnvironment = SINGLE_PROCESS_ENVIRONMENT
    """Which process of the job this is."""


def arena_lifetime(config: RunConfig) -> ArenaLifetime:
    """How long arenas made by a command stay. What it makes is for a later run: "run" would end it at once."""
    return "until_removed" if config.arena.keep == "run" else config.arena.keep


def load_command_config(
    path: Path, sets: Sequence[str], *, limit: int | None = None, strict: bool = False
) -> LoadedConfig:
    """A configuration, with a command's `--limit` and `--strict` as if they were set for each of its datasets.

    A named run gets a name of its own with them: a first try must not stand in the way of the run itself. A dataset's
    folder may be gone if what was staged from it is still here.
    """
    try:
        config = load_config(path, sets=sets, check_paths=False).config
    except ConfigError:
        return load_config(path, sets=sets)  # the same refusal, together with the paths that are wrong
    dataset_options = [*([f"limit={limit}"] if limit is not None else []), *(["strict=true"] if strict else [])]
    all_sets = [
        *sets,
        *(f"datasets[{place}].{one}" for place in range(len(config.datasets)) for one in dataset_options),
    ]
    if dataset_options and config.run.name is not None:
        name_suffixes = [*([f"limit-{limit}"] if limit is not None else []), *(["strict"] if strict else [])]
        all_sets.append("run.name=" + "-".join([config.run.name, *name_suffixes]))
    loaded = load_config(path, sets=all_sets, check_paths=False)
    config = loaded.config
    any_staged_earlier = any(
        find_staged_arena(dataset_home_path(dataset, config), dataset) is not None for dataset in config.datasets
    )
    return loaded if any_staged_earlier else load_config(path, sets=all_sets)


@contextmanager
def open_session(
    loaded: LoadedConfig, launcher: LauncherEnvironment = SINGLE_PROCESS_ENVIRONMENT
) -> Iterator[RunSession]:
    """Lock the run's folder, tell what the configuration has to say, and work; the folder keeps all of it.

    Of many processes the first does so; the others work on the same run and say nothing but what went wrong.
    """
    config = loaded.config
    if not config.datasets:
        raise SourceError(f"{loaded.source_name} names no dataset; add one under datasets")
    saved_config = build_saved_config(loaded)
    name = run_name(loaded, saved_config)
    strip_uvm_keys_for_torch()  # the configuration has what was said there; stock torch would refuse it
    if not launcher.is_main_process:
        yield RunSession(config, config.run.output_dir / name, None, NullSink(), NullSink(), HostFacts(), launcher)
        return
    with ConsoleSink() as console, RunFolder(config.run.output_dir / name, name, saved_config) as folder:
        sink = TeeSink(console, folder)
        folder.emit_all(loaded.notes)
        for note in loaded.notes:
            console.emit(note)
        if folder.replaced_settings:
            text = f"begun before with other settings, and nothing came of it; now: {'; '.join(folder.replaced_settings[:3])}"
            sink.emit(NoteEvent("run", text))
        if folder.changed_settings:
            sink.emit(
                NoteEvent("run", f"settings that are others than last time: {'; '.join(folder.changed_settings[:5])}")
            )
        if config.run.name is None:
            sink.emit(DecisionEvent("run.name", name, "not given: the file's name and a digest of its settings"))
        for dataset in config.datasets:
            folder.forget_set_aside(dataset.id)
        yield RunSession(config, folder.path, folder, console, sink, HostFacts(), launcher)


def run_name(loaded: LoadedConfig, saved_config: SavedConfig) -> str:
    """The run's name, and that of its folder."""
    return loaded.config.run.name or f"{Path(loaded.source_name).stem}-{saved_config.digest[:8]}"


def build_saved_config(loaded: LoadedConfig) -> SavedConfig:
    """The configuration as a run's folder keeps it."""
    return SavedConfig(
        file_content=loaded.file_content,
        extension=Path(loaded.source_name).suffix,
        resolved=loaded.config.model_dump(mode="json"),
        origins=loaded.origins,
        attachments=loaded.attachments,
        defaults=setting_defaults(),
        changeable=CHANGEABLE_SETTINGS,
    )
