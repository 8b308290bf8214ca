"""Processes that train one run have the same settings and versions, wherever they were started, or do not begin."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence

import torch
import xxhash

import supertuner
from supertuner.config.dialects.translate import leaves
from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources import key_path as place
from supertuner.core.errors import ConfigError, Problem
from supertuner.distributed.process_group import Parallel

OWN = ("arena", "forecast", "memory", "report", "train.device")
"""Settings, and blocks of them, that may be others on another node: where memory is, and what is reported."""
MOST_TOLD = 8


def words_of(config: RunConfig) -> dict[str, str]:
    """What must be the same everywhere."""
    found = {"supertuner": supertuner.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for where, value in leaves(config.model_dump(mode="json")):
        path = place.show(where)
        if not any(path == own or path.startswith(f"{own}.") for own in OWN):
            found[path] = json.dumps(value)
    return found


def require_alike(parallel: Parallel, words: Mapping[str, str]) -> None:
    """Refuse to begin where any process has others than the first."""
    if parallel.ranks == 1:
        return
    content = json.dumps(words, sort_keys=True).encode()
    digests = parallel.gather(xxhash.xxh3_128_digest(content))
    if len(set(digests)) == 1:
        return
    all_of_them = [json.loads(one) for one in parallel.gather(content)]
    raise ConfigError("the processes of this run", list(_differences(all_of_them)))


def _differences(all_of_them: Sequence[Mapping[str, str]]) -> Sequence[Problem]:
    first = all_of_them[0]
    problems = []
    for name in sorted({name for words in all_of_them for name in words}):
        other = next((rank for rank, words in enumerate(all_of_them) if words.get(name) != first.get(name)), None)
        if other is not None:
            here, there = first.get(name, "not set"), all_of_them[other].get(name, "not set")
            problems.append(Problem(name, f"{here} for rank 0, {there} for rank {other}; start all with the same"))
    return problems[:MOST_TOLD]
