"""Builds, inspects, verifies and prunes the caches of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from supertuner.api.session import arena_lifetime, build_saved_config, open_session, run_name
from supertuner.arena.format import ArenaLifetime
from supertuner.arena.run_context import RunContext
from supertuner.cache.inventory import (
    CacheArenaStatus,
    RequiredEntries,
    count_missing,
    list_cache_arenas,
    verify_cache_arena,
)
from supertuner.cache.keys import empty_keys, unique_keys
from supertuner.cache.location import cache_folders
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import LoadedConfig
from supertuner.core.errors import ArenaBusyError, ArenaError, CacheError
from supertuner.core.types import JSON, bytes_text
from supertuner.sinks.console import ConsoleSink

if TYPE_CHECKING:
    from supertuner.train.encoding.cache_plan import CacheKind
    from supertuner.train.encoding.corpus_caches import CorpusCaches


@dataclass(frozen=True, slots=True)
class CacheBuildResult:
    """The result for one kind of cache entries."""

    kind: str
    data: str
    """Which data: "training" or "held-out"."""
    entries: int
    encoded: int
    folder: Path
    life: ArenaLifetime

    def to_dict(self) -> dict[str, JSON]:
        return {
            "what": self.kind,
            "data": self.data,
            "entries": self.entries,
            "made": self.encoded,
            "where": str(self.folder),
            "life": self.life,
        }


@dataclass(frozen=True, slots=True)
class CacheState:
    """The cache arenas of a configuration, and the entries it still lacks."""

    arenas: tuple[CacheArenaStatus, ...]
    missing: dict[str, int]
    """Kind of entries → number of entries that the staged datasets need and that are not cached."""
    unstaged: dict[str, str]
    """Datasets that are not staged → why not. Which entries they use is unknown, because keys contain checksums of the
    files."""


def build_caches(loaded: LoadedConfig, *, check: bool = False) -> list[CacheBuildResult]:
    """Stage and encode everything that training needs. With `check`, damaged entries are found and encoded again."""
    with open_session(loaded) as session, open_cache_sets(session.config, session.context) as cache_sets:
        return [built for data, caching in cache_sets for built in _build_portion(data, caching, check)]


def inspect_caches(loaded: LoadedConfig) -> CacheState:
    """The cache arenas and how the configuration uses them. Stages, encodes and changes nothing."""
    with ConsoleSink() as console:
        return _inspect(loaded, console)


def verify_caches(loaded: LoadedConfig) -> tuple[CacheState, tuple[str | None, ...]]:
    """(the state, for each arena its problem, or None if it is intact)."""
    with ConsoleSink() as console:
        state = _inspect(loaded, console)
        return state, tuple(verify_cache_arena(held, console) for held in state.arenas)


def prunable_caches(state: CacheState) -> list[CacheArenaStatus]:
    """Arenas that the configuration certainly does not need: stale, unused, damaged, or left unfinished by another
    encoder."""
    verdicts = ("stale", "unused", "damaged")
    return [
        held
        for held in state.arenas
        if held.usage in verdicts or (held.usage == "unfinished" and (held.is_stale or "-epoch" in held.name))
    ]


def prune_caches(arenas: Sequence[CacheArenaStatus]) -> Iterator[tuple[CacheArenaStatus, str | None]]:
    """Remove these arenas; yields (arena, the reason why it was not removed, or None)."""
    for arena in arenas:
        try:
            arena.home.remove(arena.name)
            yield arena, None
        except ArenaBusyError:
            yield arena, "in use"
        except ArenaError as error:
            yield arena, str(error)


@contextmanager
def open_cache_sets(config: RunConfig, context: RunContext) -> Iterator[list[tuple[str, CorpusCaches]]]:
    """Stage the data and open their caches: (`training` or `held-out`, its caches) of each."""
    with context.progress.phase("loading libraries"):
        from supertuner.data.corpus_loader import open_corpus, select_datasets
        from supertuner.step.precision import ComputePrecision
        from supertuner.train.encoding.corpus_caches import open_corpus_caches
        from supertuner.train.run.memory_engine import open_memory
        from supertuner.train.run.model_source import open_model
        from supertuner.train.run_checks import select_device
        from supertuner.train.setup import build_encoding_spec
    device = select_device(config.train.device)
    precision = ComputePrecision(config.train.mixed_precision, device)
    life = arena_lifetime(config)
    with ExitStack() as stack:
        memory = stack.enter_context(open_memory(config, device, context))
        family, model = open_model(config, context.run_dir)
        encoding = build_encoding_spec(config, family, model, precision, memory.out_of_memory_remedy)
        cache_sets = []
        for data, held_out in (("training", False), ("held-out", True)):
            part = select_datasets(config, held_out=held_out)
            if part is None:
                continue
            corpus = stack.enter_context(open_corpus(part, context, life=life))
            until = config.validation.held_out_samples if held_out else None
            keep = memory.keep_in_host
            caches = open_corpus_caches(config, corpus, encoding, context, until=until, life=life, on_attach=keep)
            cache_sets.append((data, stack.enter_context(caches)))
        yield cache_sets


def _build_portion(data: str, caching: CorpusCaches, check: bool) -> Iterator[CacheBuildResult]:
    from supertuner.train.encoding.cache_plan import CACHE_KINDS

    for kind in CACHE_KINDS:
        store = caching.open(kind, check=check, load=False)
        if store is None:
            continue
        with store:
            entries, place = len(unique_keys(caching.keys(kind))[0]), store.location
            yield CacheBuildResult(kind, data, entries, store.entries_made, place.home.path, place.life)


def _inspect(loaded: LoadedConfig, console: ConsoleSink) -> CacheState:
    with console.phase("loading libraries"):
        from supertuner.models.family_loader import load_family
        from supertuner.train.encoding.cache_plan import CACHE_KINDS
        from supertuner.train.run.model_source import TINY_MODEL, tiny_model_folder
    config = loaded.config
    run_dir = config.run.output_dir / run_name(loaded, build_saved_config(loaded))
    tiny_model = tiny_model_folder(load_family(config.model.family).name, run_dir)
    if config.model.path == TINY_MODEL and not tiny_model.is_dir():  # opening the model would write it
        remedy = "run `supertuner cache build` first"
        raise CacheError(f"{tiny_model} does not exist, so nothing is cached for it; {remedy}")
    required, unstaged = _required_entries(config, run_dir, console)
    folders: list[Path] = []
    missing: dict[str, int] = {}
    cache, needed = config.cache_config, list[RequiredEntries]()
    for kind, storage in zip(CACHE_KINDS, (cache.vae_cache_type, cache.text_cache_type), strict=True):
        if storage != "none":
            kind_folders = cache_folders(storage, config, run_dir)
            missing[kind] = count_missing(kind_folders[0], required[kind])
            folders += kind_folders
            needed.append(required[kind])
    return CacheState(tuple(list_cache_arenas(folders, needed)), missing, unstaged)


def _required_entries(
    config: RunConfig, run_dir: Path, console: ConsoleSink
) -> tuple[dict[CacheKind, RequiredEntries], dict[str, str]]:
    """For each kind the entries that the staged datasets need, and the datasets that are not staged, with reasons."""
    from supertuner.data.corpus_loader import open_staged_corpus, select_datasets
    from supertuner.step.precision import DTYPES
    from supertuner.train.encoding import cache_plan as plans
    from supertuner.train.run.model_source import open_model
    from supertuner.train.setup import encoder_fingerprints

    family, model = open_model(config, run_dir)
    fingerprints, dtype = encoder_fingerprints(config, family, model), DTYPES[config.train.mixed_precision]
    namespaces = plans.cache_namespaces(fingerprints, dtype)
    keys = {kind: [empty_keys()] for kind in plans.CACHE_KINDS}
    unstaged: dict[str, str] = {}
    for held_out in (False, True):
        part = select_datasets(config, held_out=held_out)
        if part is None:
            continue
        with open_staged_corpus(part, console) as (corpus, unstaged_part):
            unstaged |= unstaged_part
            if corpus is None:
                continue
            requirements = plans.cache_requirements(config, corpus, fingerprints, dtype)
            # The positions of some datasets alone are not those of the run: then all their samples count.
            until = config.validation.held_out_samples if held_out and not unstaged_part else None
            plan = plans.build_cache_plan(requirements, until)
            for kind in plans.CACHE_KINDS:
                keys[kind].append(plan.keys(kind))
    required = {
        kind: RequiredEntries(namespaces[kind], unique_keys(np.concatenate(keys[kind]))[0], not unstaged)
        for kind in plans.CACHE_KINDS
    }
    return required, unstaged


def cache_record(arena: CacheArenaStatus) -> dict[str, JSON]:
    """One arena as a JSON object."""
    return {
        "name": arena.name,
        "home": str(arena.home.path),
        "what": arena.kind,
        "identity": arena.encoder_fingerprint,
        "verdict": arena.usage,
        "entries": arena.info.units,
        "used": arena.used_entries,
        "nbytes": arena.info.nbytes,
        "in_use": arena.info.users,
    }


def cache_row(arena: CacheArenaStatus) -> list[str]:
    """One arena as a row of a table: name, entries, used entries, size, usage, encoder, folder."""
    entries, size = "" if arena.info.units is None else str(arena.info.units), bytes_text(arena.info.nbytes)
    encoder = arena.encoder_fingerprint[:12]
    return [arena.name, entries, str(arena.used_entries), size, arena.usage, encoder, str(arena.home.path)]


def describe_cache(arena: CacheArenaStatus) -> str:
    """One arena as a line of text."""
    entries = "" if arena.info.units is None else f"{arena.info.units} entries, {arena.used_entries} of them used, "
    return f"{arena.name}: {arena.usage}; {entries}{bytes_text(arena.info.nbytes)} in {arena.home.path}"


def describe_build(result: CacheBuildResult) -> str:
    if not result.entries:
        return f"{result.kind} of {result.data} data: nothing is cached in advance; training encodes what it uses"
    count = f"{result.encoded} encoded now" if result.encoded else "nothing to encode"
    lifetimes = {"until_removed": "until it is removed", "run": "as long as the run"}
    stays = lifetimes.get(str(result.life), f"{result.life} h")
    return f"{result.kind} of {result.data} data: {result.entries} entries, {count}; in {result.folder}, stays {stays}"
