"""Refuses to start a run unless all ranks have the same settings, versions, data, step and weights.

Each rank reads the files of its own node, and after the start the ranks exchange only gradients: other data, another
model or another checkpoint on one node would silently train something that no configuration describes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

import supertuner
from supertuner.arena.node_peers import NodePeers
from supertuner.config.settings import key_paths as place
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.translate import iter_settings
from supertuner.core.errors import ConfigError, ConfigProblem, TrainError
from supertuner.data.corpus import Corpus, CorpusDataset
from supertuner.distributed.node import machine_id
from supertuner.distributed.process_group import ProcessGroup
from supertuner.models.adapters.attach import TrainableExpert

NODE_SPECIFIC_SETTINGS = ("arena", "forecast", "memory", "report", "train.device")
"""Settings and blocks of settings that may differ between nodes: about their memory, and what they report."""
MAX_DIFFERENCES = 8
COMPARED_VALUES = 1024
"""Values per tensor: a tensor from another file or another seed differs in these."""


def settings_to_compare(config: RunConfig) -> dict[str, str]:
    """Settings and versions that must be equal on all ranks."""
    settings = {"supertuner": supertuner.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for key, value in iter_settings(config.model_dump(mode="json")):
        path = place.format_path(key)
        if not any(path == name or path.startswith(f"{name}.") for name in NODE_SPECIFIC_SETTINGS):
            settings[path] = json.dumps(value)
    return settings


def require_same_config(process_group: ProcessGroup, settings: Mapping[str, str]) -> None:
    """ConfigError, listing the differences, unless all ranks have the same settings as rank 0."""
    if process_group.world_size == 1:
        return
    content = json.dumps(settings, sort_keys=True).encode()
    digests = process_group.all_gather(xxhash.xxh3_128_digest(content))
    if len(set(digests)) == 1:
        return
    settings_by_rank = [json.loads(message) for message in process_group.all_gather(content)]
    raise ConfigError("the ranks of this run", list(_differences(settings_by_rank)))


def _differences(settings_by_rank: Sequence[Mapping[str, str]]) -> Sequence[ConfigProblem]:
    problems = []
    for name in sorted({name for settings in settings_by_rank for name in settings}):
        values = [settings.get(name, "not set") for settings in settings_by_rank]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            difference = f"{values[0]} for rank 0, {values[other]} for rank {other}"
            problems.append(ConfigProblem(name, f"{difference}; start all with the same"))
    return problems[:MAX_DIFFERENCES]


def require_same_data(process_group: ProcessGroup, peers: NodePeers, corpora: Sequence[Corpus]) -> None:
    """TrainError, naming dataset and machines, unless every node staged the same samples and captions.

    Only then does a position mean the same sample on every rank. Collective; one rank per node computes the digests.
    """
    if process_group.world_size == 1:
        return
    digests = None
    if peers.is_first:
        parts = [part for corpus in corpora for part in corpus.datasets]
        digests = {part.samples.id: [len(part.samples), _dataset_digest(part)] for part in parts}
    messages = _all_gather_json(process_group, [machine_id(), digests])
    digests_by_machine = [(machine.split()[0], data) for machine, data in messages if data is not None]
    first_machine, expected = digests_by_machine[0]
    for machine, data in digests_by_machine:
        for name, (count, digest) in data.items():
            if [count, digest] != expected[name]:
                difference = "as many, but different ones," if count == expected[name][0] else str(count)
                raise TrainError(
                    f"datasets[{name}] has {expected[name][0]} samples on {first_machine} and {difference} on "
                    f"{machine}; give every node the same files and captions: ranks choose samples by their index"
                )


def _dataset_digest(part: CorpusDataset) -> str:
    """Digest of a dataset's samples and captions; it does not depend on file names and dates."""
    digest = xxhash.xxh3_128(part.samples.caption_digest().encode())
    digest.update(np.ascontiguousarray(part.samples.content_digests()).view(np.uint8).data)
    digest.update(np.ascontiguousarray(part.members.samples).view(np.uint8).data)
    return digest.hexdigest()


def require_same_weights(process_group: ProcessGroup, step: int, experts: Mapping[str, TrainableExpert]) -> None:
    """TrainError, naming the rank, unless all ranks start at this step with the same weights."""
    if process_group.world_size == 1:
        return
    digests = {f"weights of {name}": _weights_digest(expert) for name, expert in experts.items()}
    _require_same_facts(process_group, {"step": str(step), **digests})


def require_same_unsharded_weights(process_group: ProcessGroup, trainable: TrainableExpert) -> None:
    """Compare an expert that is still whole on each rank: once it is sharded, the ranks hold different rows."""
    _require_same_facts(process_group, {f"weights of {trainable.name}": _weights_digest(trainable)})


def _require_same_facts(process_group: ProcessGroup, facts: Mapping[str, str]) -> None:
    first, *others = _all_gather_json(process_group, facts)
    for rank, other in enumerate(others, start=1):
        differs = [name for name in first if first[name] != other.get(name)]
        if differs:
            shown = ", ".join(f"{name} ({first[name]} on rank 0, {other.get(name)} there)" for name in differs)
            raise TrainError(
                f"rank {rank} starts differently from rank 0: {shown}; give every node the same model, adapters and "
                "checkpoints"
            )


def _all_gather_json(process_group: ProcessGroup, value: object) -> list[Any]:
    return [json.loads(message) for message in process_group.all_gather(json.dumps(value).encode())]


def _weights_digest(trainable: TrainableExpert) -> str:
    """Digest of an expert's weights, frozen ones included. Of sharded weights only the shapes, since the ranks hold
    different rows."""
    digest = xxhash.xxh3_64()
    for name, tensor in {**dict(trainable.module.named_parameters()), **trainable.parameters}.items():
        digest.update(name.encode())
        if trainable.shards is None and type(tensor.data) is torch.Tensor:  # neither a DTensor nor 8-bit
            digest.update(tensor.detach().flatten()[:COMPARED_VALUES].float().cpu().numpy().tobytes())
    if trainable.shards is not None:
        digest.update(str([shard.full_shape for shard in trainable.shards.row_shards.values()]).encode())
    return digest.hexdigest()
