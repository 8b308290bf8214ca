"""Processes that train one run have the same settings and versions, wherever they were started, or do not begin."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence

import torch
import xxhash

import supertuner
from supertuner.config.sources.translate import iter_settings
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.settings import key_paths as place
from supertuner.core.errors import ConfigError, ConfigProblem
from supertuner.distributed.process_group import ProcessGroup

NODE_SPECIFIC_SETTINGS = ("arena", "forecast", "memory", "report", "train.device")
"""Settings, and blocks of them, that may be others on another node: where memory is, and what is reported."""
MAX_DIFFERENCES = 8


def settings_to_compare(config: RunConfig) -> dict[str, str]:
    """What must be the same everywhere."""
    settings = {"supertuner": supertuner.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for key, value in iter_settings(config.model_dump(mode="json")):
        path = place.format_path(key)
        if not any(path == own or path.startswith(f"{own}.") for own in NODE_SPECIFIC_SETTINGS):
            settings[path] = json.dumps(value)
    return settings


def require_same_config(process_group: ProcessGroup, settings: Mapping[str, str]) -> None:
    """Refuse to begin where any process has others than the first."""
    if process_group.world_size == 1:
        return
    content = json.dumps(settings, sort_keys=True).encode()
    digests = process_group.all_gather(xxhash.xxh3_128_digest(content))
    if len(set(digests)) == 1:
        return
    settings_by_rank = [json.loads(one) for one in process_group.all_gather(content)]
    raise ConfigError("the processes of this run", list(_differences(settings_by_rank)))


def _differences(settings_by_rank: Sequence[Mapping[str, str]]) -> Sequence[ConfigProblem]:
    first = settings_by_rank[0]
    problems = []
    for name in sorted({name for words in settings_by_rank for name in words}):
        other_rank = next(
            (rank for rank, words in enumerate(settings_by_rank) if words.get(name) != first.get(name)), None
        )
        if other_rank is not None:
            first_value, other_value = first.get(name, "not set"), settings_by_rank[other_rank].get(name, "not set")
            problems.append(
                ConfigProblem(
                    name, f"{first_value} for rank 0, {other_value} for rank {other_rank}; start all with the same"
                )
            )
    return problems[:MAX_DIFFERENCES]
