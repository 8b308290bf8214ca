"""Processes that train one run together begin at the same step with the same weights; who does not is named.

Each loads files of its own node, and from then on only gradients are exchanged: another model or checkpoint somewhere
would train something that nobody asked for, without a word. (`many/alike.py` compares settings and versions.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import xxhash

from supertuner.core.errors import TrainError
from supertuner.distributed.process_group import Parallel
from supertuner.models.adapters.attach import Trained
from supertuner.train.run import Run

LOOKED_AT = 1024
"""Numbers of each tensor: one that was loaded or drawn otherwise differs in these."""


def require_same_weights(run: Run) -> None:
    """Every process begins as the first one does, or the run ends here."""
    if run.parallel.ranks == 1:
        return
    facts = {"step": str(run.step)}
    for expert, trained in run.trained.items():
        facts[f"weights of {expert}"] = _digest(trained)
    _require(run.parallel, facts)


def require_same_whole(parallel: Parallel, trained: Trained) -> None:
    """The same of an expert that is still whole in each process: once it is shared out, each has other rows."""
    _require(parallel, {f"weights of {trained.name}": _digest(trained)})


def _require(parallel: Parallel, facts: Mapping[str, str]) -> None:
    first, *others = [json.loads(one) for one in parallel.gather(json.dumps(facts).encode())]
    for rank, other in enumerate(others, start=1):
        differs = [name for name in first if first[name] != other.get(name)]
        if differs:
            shown = ", ".join(f"{name} ({first[name]} on rank 0, {other.get(name)} there)" for name in differs)
            raise TrainError(
                f"rank {rank} begins otherwise than rank 0: {shown}; give every node the same model, adapters and "
                "checkpoints"
            )


def _digest(trained: Trained) -> str:
    """An expert as it begins, frozen weights included. Of what is shared out, every process has another part: of that
    only the shapes."""
    digest = xxhash.xxh3_64()
    for name, tensor in {**dict(trained.module.named_parameters()), **trained.parameters}.items():
        digest.update(name.encode())
        if trained.parts is None and type(tensor.data) is torch.Tensor:  # not in parts, and not in 8 bits
            digest.update(tensor.detach().flatten()[:LOOKED_AT].float().cpu().numpy().tobytes())
    if trained.parts is not None:
        digest.update(str([place.shape for place in trained.parts.places.values()]).encode())
    return digest.hexdigest()
