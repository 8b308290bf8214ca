"""A command at work on a configuration: its run folder locked, and everything that is said on screen and on record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from supertuner.arena.format import Life
from supertuner.config.identity import FREE, defaults
from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources.environment import keep_from_torch
from supertuner.config.sources.launcher import ALONE, Launched
from supertuner.config.sources.load import Loaded, load
from supertuner.core.errors import ConfigError, SourceError
from supertuner.core.events import Decided, Noted, Silence, Sink, Together
from supertuner.core.host import Host
from supertuner.data.homes import home_path
from supertuner.data.staging.reuse import staged_earlier
from supertuner.sinks.console import Console
from supertuner.sinks.kept_config import KeptConfig
from supertuner.sinks.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Session:
    config: RunConfig
    path: Path
    """The run's folder."""
    folder: RunFolder | None
    """The same, locked and kept; None: another process of the job has it."""
    console: Console | Silence
    sink: Sink
    """Reaches the screen and the run's folder."""
    host: Host
    launched: Launched = ALONE
    """Which process of the job this is."""


def life_of(config: RunConfig) -> Life:
    """How long arenas made by a command stay. What it makes is for a later run: "run" would end it at once."""
    return "until_removed" if config.arena.keep == "run" else config.arena.keep


def load_narrowed(path: Path, sets: Sequence[str], *, limit: int | None = None, strict: bool = False) -> Loaded:
    """A configuration, with a command's `--limit` and `--strict` as if they were set for each of its datasets.

    A named run gets a name of its own with them: a first try must not stand in the way of the run itself. A dataset's
    folder may be gone if what was staged from it is still here.
    """
    try:
        config = load(path, sets=sets, check_paths=False).config
    except ConfigError:
        return load(path, sets=sets)  # the same refusal, together with the paths that are wrong
    given = [*([f"limit={limit}"] if limit is not None else []), *(["strict=true"] if strict else [])]
    narrowed = [*sets, *(f"datasets[{place}].{one}" for place in range(len(config.datasets)) for one in given)]
    if given and config.run.name is not None:
        tried = [*([f"limit-{limit}"] if limit is not None else []), *(["strict"] if strict else [])]
        narrowed.append("run.name=" + "-".join([config.run.name, *tried]))
    loaded = load(path, sets=narrowed, check_paths=False)
    config = loaded.config
    gone = any(staged_earlier(home_path(dataset, config), dataset) is not None for dataset in config.datasets)
    return loaded if gone else load(path, sets=narrowed)


@contextmanager
def session(loaded: Loaded, launched: Launched = ALONE) -> Iterator[Session]:
    """Lock the run's folder, tell what the configuration has to say, and work; the folder keeps all of it.

    Of many processes the first does so; the others work on the same run and say nothing but what went wrong.
    """
    config = loaded.config
    if not config.datasets:
        raise SourceError(f"{loaded.source} names no dataset; add one under datasets")
    kept = kept_config(loaded)
    name = run_name(loaded, kept)
    keep_from_torch()  # the configuration has what was said there; stock torch would refuse it
    if not launched.first:
        yield Session(config, config.run.output_dir / name, None, Silence(), Silence(), Host(), launched)
        return
    with Console() as console, RunFolder(config.run.output_dir / name, name, kept) as folder:
        sink = Together(console, folder)
        folder.emit_all(loaded.notes)
        for note in loaded.notes:
            console.emit(note)
        if folder.replaced:
            text = f"begun before with other settings, and nothing came of it; now: {'; '.join(folder.replaced[:3])}"
            sink.emit(Noted("run", text))
        if folder.changed:
            sink.emit(Noted("run", f"settings that are others than last time: {'; '.join(folder.changed[:5])}"))
        if config.run.name is None:
            sink.emit(Decided("run.name", name, "not given: the file's name and a digest of its settings"))
        for dataset in config.datasets:
            folder.forget_set_aside(dataset.id)
        yield Session(config, folder.path, folder, console, sink, Host(), launched)


def run_name(loaded: Loaded, kept: KeptConfig) -> str:
    """The run's name, and that of its folder."""
    return loaded.config.run.name or f"{Path(loaded.source).stem}-{kept.digest[:8]}"


def kept_config(loaded: Loaded) -> KeptConfig:
    """The configuration as a run's folder keeps it."""
    return KeptConfig(
        given=loaded.given,
        extension=Path(loaded.source).suffix,
        resolved=loaded.config.model_dump(mode="json"),
        origins=loaded.origins,
        attachments=loaded.attachments,
        defaults=defaults(),
        free=FREE,
    )
