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
from supertuner.distributed.process_group import ProcessGroup
from supertuner.models.adapters.attach import TrainableExpert
from supertuner.train.run.training_run import TrainingRun

COMPARED_VALUES = 1024
"""Numbers of each tensor: one that was loaded or drawn otherwise differs in these."""


def require_same_weights(run: TrainingRun) -> None:
    """Every process begins as the first one does, or the run ends here."""
    if run.process_group.world_size == 1:
        return
    facts = {"step": str(run.step)}
    for expert, trainable in run.trainable_experts.items():
        facts[f"weights of {expert}"] = _weights_digest(trainable)
    _require_same_facts(run.process_group, facts)


def require_same_unsharded_weights(process_group: ProcessGroup, trainable: TrainableExpert) -> None:
    """The same of an expert that is still whole in each process: once it is shared out, each has other rows."""
    _require_same_facts(process_group, {f"weights of {trainable.name}": _weights_digest(trainable)})


def _require_same_facts(process_group: ProcessGroup, facts: Mapping[str, str]) -> None:
    first, *others = [json.loads(one) for one in process_group.all_gather(json.dumps(facts).encode())]
    for rank, other in enumerate(others, start=1):
        differs = [name for name in first if first[name] != other.get(name)]
        if differs:
            shown = ", ".join(f"{name} ({first[name]} on rank 0, {other.get(name)} there)" for name in differs)
            raise TrainError(
                f"rank {rank} begins otherwise than rank 0: {shown}; give every node the same model, adapters and "
                "checkpoints"
            )


def _weights_digest(trainable: TrainableExpert) -> str:
    """An expert as it begins, frozen weights included. Of what is shared out, every process has another part: of that
    only the shapes."""
    digest = xxhash.xxh3_64()
    for name, tensor in {**dict(trainable.module.named_parameters()), **trainable.parameters}.items():
        digest.update(name.encode())
        if trainable.shards is None and type(tensor.data) is torch.Tensor:  # not in parts, and not in 8 bits
            digest.update(tensor.detach().flatten()[:COMPARED_VALUES].float().cpu().numpy().tobytes())
    if trainable.shards is not None:
        digest.update(str([place.full_shape for place in trainable.shards.row_shards.values()]).encode())
    return digest.hexdigest()
