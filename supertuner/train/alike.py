"""Processes that train one run together are the same in all that decides its result; who is not is named at the start.

Each begins from files of its own node, and from then on only gradients are exchanged: another model, another setting or
another version somewhere would train something that nobody asked for, without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import xxhash

from supertuner.config.tree import RunConfig
from supertuner.core.errors import TrainError
from supertuner.core.types import JSON
from supertuner.models.adapters import Trained
from supertuner.train.run import Run
from supertuner.train.saving import versions

BLOCKS = ("objective", "gh200_optimizations", "parallel", "train", "optimizer", "checkpoints", "validation")
"""Settings that must be the same; what names files may well differ from node to node."""
LOOKED_AT = 1024
"""Numbers of each trained tensor: a tensor that was loaded or drawn otherwise differs in these."""


def require_alike(run: Run) -> None:
    """Every process has what the first one has, or the run ends here."""
    if run.parallel.ranks == 1:
        return
    said = run.parallel.gather(json.dumps(facts_of(run), sort_keys=True).encode())
    first, *others = [json.loads(one) for one in said]
    for rank, other in enumerate(others, start=1):
        differs = [name for name in sorted(first | other) if first.get(name) != other.get(name)]
        if differs:
            shown = "; ".join(f"{name}: {other.get(name)} there, {first.get(name)} on rank 0" for name in differs[:4])
            raise TrainError(
                f"rank {rank} is not like rank 0: {shown}. All processes must have the same settings, model and "
                "versions; give each node the same files"
            )


def facts_of(run: Run) -> dict[str, JSON]:
    """What must be the same everywhere, by names that people know."""
    facts: dict[str, JSON] = {f"version of {name}": version for name, version in versions().items()}
    facts.pop("version of threads")  # nodes may have other numbers of cores
    facts |= {"run.seed": run.config.run.seed, "step": run.step, "given files": {**run.given}}
    facts |= _settings(run.config)
    for expert, trained in run.trained.items():
        facts[f"weights of {expert}"] = _weights(trained)
    return facts


def _settings(config: RunConfig) -> dict[str, JSON]:
    found: dict[str, JSON] = {}
    for name in BLOCKS:
        block: Mapping[str, JSON] = getattr(config, name).model_dump(mode="json")
        found |= {f"{name}.{field}": value for field, value in block.items()}
    for field in ("train.device", "checkpoints.resume"):
        found.pop(field)
    return found


def _weights(trained: Trained) -> str:
    """What is trained, as it begins; of parts, their places."""
    digest = xxhash.xxh3_64()
    for name, parameter in trained.parameters.items():
        digest.update(name.encode())
        if trained.parts is None:
            digest.update(parameter.detach().flatten()[:LOOKED_AT].float().cpu().numpy().tobytes())
        else:
            digest.update(str(trained.parts.places[name].shape).encode())
    return digest.hexdigest()
