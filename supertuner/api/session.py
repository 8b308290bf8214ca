"""The session of a run or command that works on a configuration: the locked run folder, the console and the sinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from supertuner.arena.format import ArenaLifetime
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.key_paths import CHANGEABLE_SETTINGS, setting_defaults
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.environment import strip_uvm_keys_for_torch
from supertuner.config.sources.launcher import SINGLE_PROCESS_ENVIRONMENT, LauncherEnvironment
from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.core.errors import ConfigError, SourceError
from supertuner.core.events import DecisionEvent, NoteEvent, NullSink, Sink, TeeSink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.interrupts import interrupts_win
from supertuner.data.staging.arena_lookup import require_paths
from supertuner.sinks.console import ConsoleSink
from supertuner.sinks.run_folder import RunFolder
from supertuner.sinks.saved_config import SavedConfig


@dataclass(frozen=True, slots=True)
class RunSession:
    config: RunConfig
    run_dir: Path
    run_folder: RunFolder | None
    """The run's folder, locked by this process; None in all processes of the job except the first."""
    console: ConsoleSink | NullSink
    sink: Sink
    """Writes to the console and to the run's folder."""
    host: HostFacts
    launcher: LauncherEnvironment = SINGLE_PROCESS_ENVIRONMENT
    """Rank and world size of this process."""

    @property
    def context(self) -> RunContext:
        return RunContext(self.run_dir, self.sink, self.console, self.host)


def arena_lifetime(config: RunConfig) -> ArenaLifetime:
    """How long arenas live that a command creates for a later run; `arena.keep: "run"` would remove them at once."""
    return "until_removed" if config.arena.keep == "run" else config.arena.keep


def load_command_config(
    path: Path, sets: Sequence[str], *, limit: int | None = None, strict: bool = False, needs_data: bool = True
) -> LoadedConfig:
    """Load a configuration and apply a command's `--limit` and `--strict` to each of its datasets.

    With these options a named run gets another name, so that a first try does not occupy the folder of the real run.
    The folder of a dataset may be missing if its staged arena still exists, or if the command does without data
    (`needs_data`).
    """
    try:
        config = load_config(path, sets=sets, check_paths=False).config
    except ConfigError:
        return load_config(path, sets=sets)  # raises the same error, together with the errors about paths
    dataset_options = [*([f"limit={limit}"] if limit is not None else []), *(["strict=true"] if strict else [])]
    all_sets = [
        *sets,
        *(f"datasets[{index}].{option}" for index in range(len(config.datasets)) for option in dataset_options),
    ]
    if dataset_options and config.run.name is not None:
        name_suffixes = [*([f"limit-{limit}"] if limit is not None else []), *(["strict"] if strict else [])]
        all_sets.append("run.name=" + "-".join([config.run.name, *name_suffixes]))
    is_trial = limit is not None and config.exports.push_to_hub is not None
    if is_trial:
        all_sets.append("exports.push_to_hub=null")
    loaded = load_config(path, sets=all_sets, check_paths=False)
    if is_trial:
        note = WarningEvent("exports.push_to_hub", "has no effect: a trial with a part of the data is not pushed")
        loaded = replace(loaded, notes=(*loaded.notes, note))
    if needs_data:
        require_paths(loaded)
    return loaded


@contextmanager
def open_session(
    loaded: LoadedConfig, launcher: LauncherEnvironment = SINGLE_PROCESS_ENVIRONMENT, *, show_progress: bool = True
) -> Iterator[RunSession]:
    """Lock the run's folder, save the configuration in it, and emit the notes of the configuration loader.

    In a job of several processes only the first one does so; the others get a session that emits nothing. With
    `show_progress` false nothing is written to the console. Raises SourceError if the configuration has no dataset.
    """
    config = loaded.config
    if not config.datasets:
        raise SourceError(f"{loaded.source_name}: there is no dataset; add one under datasets")
    saved_config = build_saved_config(loaded)
    name = run_name(loaded, saved_config)
    strip_uvm_keys_for_torch()  # the configuration has read these keys; stock torch would reject them
    if not launcher.is_main_process:
        with interrupts_win():
            yield RunSession(config, config.run.output_dir / name, None, NullSink(), NullSink(), HostFacts(), launcher)
        return
    with (
        interrupts_win(),
        ConsoleSink() if show_progress else nullcontext(NullSink()) as console,
        RunFolder(config.run.output_dir / name, name, saved_config) as folder,
    ):
        sink = TeeSink(console, folder)
        folder.emit_all(loaded.notes)
        for note in loaded.notes:
            console.emit(note)
        if folder.replaced_settings:
            changes = "; ".join(folder.replaced_settings[:3])
            sink.emit(NoteEvent("run", f"replaces a start with other settings that produced nothing; now: {changes}"))
        if folder.changed_settings:
            changes = "; ".join(folder.changed_settings[:5])
            sink.emit(NoteEvent("run", f"settings changed since the last session: {changes}"))
        for problem in folder.damaged_records:
            sink.emit(WarningEvent("run", f"{problem}; the run continues without its records"))
        if config.run.name is None:
            sink.emit(DecisionEvent("run.name", name, "not set: the file's name and a digest of its settings"))
        for dataset in config.datasets:
            folder.forget_set_aside(dataset.id)
        yield RunSession(config, folder.path, folder, console, sink, HostFacts(), launcher)


def run_name(loaded: LoadedConfig, saved_config: SavedConfig) -> str:
    """The name of the run and of its folder."""
    return loaded.config.run.name or f"{Path(loaded.file_name).stem}-{saved_config.digest[:8]}"


def build_saved_config(loaded: LoadedConfig) -> SavedConfig:
    """The configuration in the form in which a run's folder stores it."""
    return SavedConfig(
        file_content=loaded.file_content,
        extension=Path(loaded.file_name).suffix,
        resolved=loaded.config.model_dump(mode="json"),
        origins=loaded.origins,
        attachments=loaded.attachments,
        defaults=setting_defaults(),
        changeable=CHANGEABLE_SETTINGS,
    )
