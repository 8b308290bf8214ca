"""The caches of a configuration: built, looked at, checked and pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from supertuner.arena.format import Life
from supertuner.cache.inspect import Held, Needed, holdings, verify_held
from supertuner.cache.keys import unique
from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources.load import Loaded
from supertuner.core.errors import ArenaBusy, ArenaError, CacheError
from supertuner.core.events import Progress, Silence, Sink
from supertuner.core.host import Host
from supertuner.core.types import JSON, bytes_text
from supertuner.sinks.console import Console
from supertuner.tools.session import kept_config, life_of, run_name, session

if TYPE_CHECKING:
    from supertuner.arena.home import Home
    from supertuner.train.encoding.stores import Caching


@dataclass(frozen=True, slots=True)
class Built:
    """What became of one kind of entries."""

    what: str
    data: str
    """Which data: "training" or "held-out"."""
    entries: int
    made: int
    where: Path
    life: Life

    def figures(self) -> dict[str, JSON]:
        return {
            "what": self.what,
            "data": self.data,
            "entries": self.entries,
            "made": self.made,
            "where": str(self.where),
            "life": self.life,
        }


@dataclass(frozen=True, slots=True)
class State:
    """What there is of a configuration's caches."""

    held: tuple[Held, ...]
    missing: dict[str, int]
    """Kind of entries → how many the configuration needs and has not."""


def build(loaded: Loaded, *, check: bool = False) -> list[Built]:
    """Stage and encode all that training will need. With `check`, damaged entries are found and made again."""
    with session(loaded) as work, cachings(work.config, work.path, work.host, work.sink, work.console) as found:
        return [built for data, caching in found for built in _built(data, caching, check)]


def look(loaded: Loaded) -> State:
    """What is there, and what the configuration uses of it. Begins no run."""
    with _looking(loaded) as (_, state):
        return state


def verify(loaded: Loaded) -> tuple[State, tuple[str | None, ...]]:
    """The same, and for each arena what is wrong with it; None if it is whole."""
    with _looking(loaded) as (console, state):
        return state, tuple(verify_held(held, console) for held in state.held)


def prunable(state: State) -> list[Held]:
    """Arenas of which the configuration needs nothing: stale, unused, damaged, or begun and left by another encoder."""
    verdicts = ("stale", "unused", "damaged")
    return [
        held
        for held in state.held
        if held.verdict in verdicts or (held.verdict == "unfinished" and (held.stale or "-epoch" in held.name))
    ]


def prune(held: Sequence[Held]) -> Iterator[tuple[Held, str | None]]:
    """Remove these arenas; for each, why it was not removed, or None."""
    for one in held:
        try:
            one.home.remove(one.name)
            yield one, None
        except ArenaBusy:
            yield one, "in use"
        except ArenaError as error:
            yield one, str(error)


@contextmanager
def cachings(
    config: RunConfig, folder: Path, host: Host, sink: Sink, progress: Progress
) -> Iterator[list[tuple[str, Caching]]]:
    """What opens the caches of the data that are trained on, and of those held out, with the data staged."""
    with progress.phase("loading libraries"):
        from supertuner.data.opened import open_corpus, portion
        from supertuner.step.precision import Precision
        from supertuner.train.encoding.stores import open_caching
        from supertuner.train.memory import open_memory
        from supertuner.train.model_source import opened_model
        from supertuner.train.setup import device_of, encoding_of
    device = device_of(config.train.device)
    precision = Precision(config.train.mixed_precision, device)
    life = life_of(config)
    with ExitStack() as opened:
        memory = opened.enter_context(open_memory(config, device, host=host, sink=sink))
        encoding = encoding_of(config, *opened_model(config, folder), precision, memory.remedy)
        found = []
        for data, held_out in (("training", False), ("held-out", True)):
            part = portion(config, held_out=held_out)
            if part is None:
                continue
            corpus = opened.enter_context(open_corpus(part, host=host, sink=sink, progress=progress, life=life))
            until = config.validation.held_out_samples if held_out else None
            caching = open_caching(
                config,
                corpus,
                encoding,
                run_folder=folder,
                host=host,
                sink=sink,
                progress=progress,
                until=until,
                life=life,
                attached=memory.keep_in_host,
            )
            found.append((data, opened.enter_context(caching)))
        yield found


def _built(data: str, caching: Caching, check: bool) -> Iterator[Built]:
    from supertuner.train.encoding.cache_plan import KINDS

    for what in KINDS:
        store = caching.open(what, check=check, load=False)
        if store is None:
            continue
        with store:
            place = store.place
            yield Built(what, data, len(unique(caching.keys(what))[0]), store.made, place.home.path, place.life)


@contextmanager
def _looking(loaded: Loaded) -> Iterator[tuple[Console, State]]:
    config = loaded.config
    folder = config.run.output_dir / run_name(loaded, kept_config(loaded))
    if config.model.path == "tiny" and not folder.is_dir():
        raise CacheError(f"{folder}: was never begun, so nothing is cached for it; `supertuner cache build` begins it")
    with Console(rest="`supertuner stage` lists them all") as console:
        with cachings(config, folder, Host(), console, console) as found:
            state = _state([caching for _, caching in found])
        yield console, state


def _state(cachings: Sequence[Caching]) -> State:
    from supertuner.cache.store import Store
    from supertuner.train.encoding.cache_plan import KINDS

    homes: list[Home] = []
    needed: list[Needed] = []
    missing: dict[str, int] = {}
    for what in KINDS:
        where = cachings[0].places(what)
        if where is None:
            continue
        space = cachings[0].needs.space(what)
        keys, _ = unique(np.concatenate([caching.keys(what) for caching in cachings]))
        homes += [where.kept.home, *([] if where.shared is None else [where.shared.home])]
        needed.append(Needed(space, keys))
        with Store(where.kept, space, Silence()) as store:
            missing[what] = len(store.missing(keys))
    return State(tuple(holdings(homes, needed)), missing)


def record(held: Held) -> dict[str, JSON]:
    """One arena, for programs."""
    return {
        "name": held.name,
        "home": str(held.home.path),
        "what": held.what,
        "identity": held.identity,
        "verdict": held.verdict,
        "entries": held.info.units,
        "used": held.used,
        "nbytes": held.info.nbytes,
        "in_use": held.info.users,
    }


def line(held: Held) -> str:
    """One arena, for people."""
    entries = "" if held.info.units is None else f"{held.info.units} entries, {held.used} of them used, "
    return f"{held.name}: {held.verdict}; {entries}{bytes_text(held.info.nbytes)} in {held.home.path}"


def built_line(built: Built) -> str:
    count = f"{built.made} encoded now" if built.made else "nothing to encode"
    stays = {"until_removed": "until it is removed", "run": "as long as the run"}.get(
        str(built.life), f"{built.life} h"
    )
    return f"{built.what} of {built.data} data: {built.entries} entries, {count}; in {built.where}, stays {stays}"
