"""Windows on a tiny Wan2.2 whose weights are shared out: what tests run in each rank, and by one process to compare.

What is returned are plain arrays; parts of tensors come with the row they begin at.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.config.settings.parallel import ParallelSettings
from supertuner.config.sources.launcher import Launched
from supertuner.data.ordering.windows import share
from supertuner.distributed.fsdp import Sharded, Sharing, sharing_over_all
from supertuner.distributed.group import Group
from supertuner.distributed.process_group import Alone, Parallel
from supertuner.models.adapters.attach import Trained, attach
from supertuner.models.families.wan22 import family as wan22
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import Source
from supertuner.optim.ema import Ema
from supertuner.optim.table import build
from supertuner.step.batch import StepBatch
from supertuner.step.precision import Name
from supertuner.step.window import Trainee, WindowResult, prepare, train_window
from tests.step.making import CPU, EXPERT, wan_batch, wan_rules

Array = NDArray[Any]
WINDOWS = (range(0, 8), range(8, 13), range(13, 14))
"""The second is cut into batches that are not alike, and of the third only one process has a share."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: str = "lora"
    precision: Name = "fp32"
    checkpointing: bool = False
    settings: ParallelSettings = field(default_factory=ParallelSettings)
    rate: float = 1e-3


@dataclass(frozen=True, slots=True)
class Found:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Array]
    averages: dict[str, Array]
    begins: dict[str, int]
    """Of parts: the first row of each that is here."""


def a_trained(source: Source, case: Case, seed: int = 0) -> Trained:
    """The low-noise expert with an adapter that is not zero anywhere, or with all of its weights."""
    model = wan22.read(source)
    dtype = torch.float32 if case.kind == "full" or case.precision == "fp32" else torch.bfloat16
    module = wan22.FAMILY.denoiser(model, model.experts[-1], dtype)
    settings = AdapterSettings(type=case.kind, rank=2)  # type: ignore[arg-type]
    trained = attach(module, settings, ("to_q", "to_k", "to_v", "to_out.0"), seed=seed, name="low_noise")
    for place, parameter in enumerate(trained.parameters.values()):
        parameter.data += 0.02 * sample_noise(seed, place, parameter.shape)
    prepare(module, case.checkpointing)
    return trained


def a_trainee(trained: Trained) -> Trainee:
    parameters = dict(trained.parameters)
    optimizer = build(OptimizerSettings(), parameters, "model")
    return Trainee(EXPERT, trained.module, parameters, optimizer, Ema(parameters, 0.9))


def opened(group: Parallel, case: Case) -> tuple[Parallel, Sharing | None]:
    """The processes as a run sees them: alone, or with a sharing as the settings say."""
    if not isinstance(group, Group):
        return group, None
    sharing = sharing_over_all(case.settings, CPU)
    return replace(group, in_step=True, sharing=sharing, reduction=Sharded(sharing)), sharing


def shared_out(parallel: Parallel, source: Source, cases: list[Case]) -> list[Found]:
    """Each case through all windows."""
    return [_through(parallel, source, case) for case in cases]


def _through(group: Parallel, source: Source, case: Case) -> Found:
    parallel, sharing = opened(group, case)
    whole = a_trained(source, case)
    trained = whole if sharing is None else sharing.share_out(whole)
    trainee = a_trainee(trained)
    results = [window(parallel, source, trainee, span, case) for span in WINDOWS]
    assert trainee.ema is not None
    return Found(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        {name: parameter.detach().numpy().copy() for name, parameter in trained.parameters.items()},
        {name: average.numpy().copy() for name, average in trainee.ema.averages.items()},
        {} if trained.parts is None else {name: place.begin for name, place in trained.parts.places.items()},
    )


def window(parallel: Parallel, source: Source, trainee: Trainee, span: range, case: Case) -> WindowResult:
    batches = share_of(parallel, span)
    return train_window(
        trainee,
        batches,
        samples=len(span),
        rate=case.rate,
        rules=wan_rules(source, case.precision, 1.0),
        reduction=parallel.reduction,
        micro_batches=len(batches),
    )


def share_of(parallel: Parallel, span: range) -> list[StepBatch]:
    """This process's share in batches of up to two; where others have more, idle ones."""
    counts = [len(_cut(share(span, rank, parallel.ranks))) for rank in range(parallel.ranks)]
    own = _cut(share(span, parallel.rank, parallel.ranks))
    idle = replace(wan_batch([span.start], 4), idle=True)
    return own + [idle] * (max(counts) - len(own) if parallel.in_step else 0)


def _cut(mine: range) -> list[StepBatch]:
    return [wan_batch(list(mine[n : n + 2]), 4) for n in range(0, len(mine), 2)]


def by_one_process(_: Launched, source: Source, cases: list[Case]) -> list[Found]:
    return shared_out(Alone(), source, cases)


def together(found: list[Found]) -> Found:
    """What ranks have in parts, as one; what all have whole must be the same in all, to the bit."""
    first = found[0]

    def joined(fields: list[dict[str, Array]]) -> dict[str, Array]:
        if not first.begins:
            for other in fields[1:]:
                assert all(np.array_equal(fields[0][name], other[name]) for name in fields[0])
            return fields[0]
        for name in first.begins:
            ends = np.cumsum([0] + [len(one[name]) for one in fields]).tolist()
            assert [one.begins[name] for one in found] == ends[:-1], name
        return {name: np.concatenate([one[name] for one in fields]) for name in fields[0]}

    assert all((one.losses, one.norms) == (first.losses, first.norms) for one in found)
    weights, averages = joined([one.weights for one in found]), joined([one.averages for one in found])
    return Found(first.losses, first.norms, weights, averages, {})
