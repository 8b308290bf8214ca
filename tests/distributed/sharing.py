"""Windows on a tiny Wan2.2 with sharded weights: what tests run on each rank, and on one process to compare.

Results are plain arrays; shards come with the index of their first row.
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
from supertuner.config.sources.launcher import LauncherEnvironment
from supertuner.data.ordering.micro_batches import shard_window
from supertuner.distributed.fsdp import FsdpGradientReduction, FsdpSharder, create_fsdp_sharder
from supertuner.distributed.process_group import ProcessGroup, SingleProcess
from supertuner.distributed.torch_process_group import TorchProcessGroup
from supertuner.models.adapters.attach import TrainableExpert, attach
from supertuner.models.families.wan22 import family as wan22
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import ModelSource
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.step.batch import StepBatch
from supertuner.step.precision import PrecisionName
from supertuner.step.train_step import ExpertState, WindowResult, prepare_for_training, train_window
from tests.step.step_builders import CPU, EXPERT, build_wan_batch, wan_step_options

Array = NDArray[Any]
WINDOWS = (range(0, 8), range(8, 13), range(13, 14))
"""The second is cut into batches that are not alike, and of the third only one process has a share."""


@dataclass(frozen=True, slots=True)
class ShardingCase:
    kind: str = "lora"
    precision: PrecisionName = "fp32"
    checkpointing: bool = False
    settings: ParallelSettings = field(default_factory=ParallelSettings)
    rate: float = 1e-3


@dataclass(frozen=True, slots=True)
class ShardingResult:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Array]
    averages: dict[str, Array]
    begins: dict[str, int]
    """Of parts: the first row of each that is here."""


def a_trained(source: ModelSource, case: ShardingCase, seed: int = 0) -> TrainableExpert:
    """The low-noise expert with an adapter without zeros, or with all weights trained."""
    model = wan22.read_model(source)
    dtype = torch.float32 if case.kind == "full" or case.precision == "fp32" else torch.bfloat16
    module = wan22.FAMILY.load_denoiser(model, model.experts[-1], dtype)
    settings = AdapterSettings(type=case.kind, rank=2)  # type: ignore[arg-type]
    trained = attach(module, settings, ("to_q", "to_k", "to_v", "to_out.0"), seed=seed, name="low_noise")
    for place, parameter in enumerate(trained.parameters.values()):
        parameter.data += 0.02 * sample_noise(seed, place, parameter.shape)
    prepare_for_training(module, case.checkpointing)
    return trained


def a_trainee(trained: TrainableExpert) -> ExpertState:
    parameters = dict(trained.parameters)
    optimizer = build_optimizer(OptimizerSettings(), parameters, "model")
    return ExpertState(EXPERT, trained.module, parameters, optimizer, EmaWeights(parameters, 0.9))


def opened(group: ProcessGroup, case: ShardingCase) -> tuple[ProcessGroup, FsdpSharder | None]:
    """The process group of a run: a single process, or one with a sharder for these settings."""
    if not isinstance(group, TorchProcessGroup):
        return group, None
    sharing = create_fsdp_sharder(case.settings, CPU)
    return replace(
        group, forward_is_collective=True, sharder=sharing, reduction=FsdpGradientReduction(sharing)
    ), sharing


def shared_out(parallel: ProcessGroup, source: ModelSource, cases: list[ShardingCase]) -> list[ShardingResult]:
    """Train each case through all windows."""
    return [_through(parallel, source, case) for case in cases]


def _through(group: ProcessGroup, source: ModelSource, case: ShardingCase) -> ShardingResult:
    parallel, sharing = opened(group, case)
    whole = a_trained(source, case)
    trained = whole if sharing is None else sharing.shard_expert(whole)
    expert_state = a_trainee(trained)
    results = [window(parallel, source, expert_state, span, case) for span in WINDOWS]
    assert expert_state.ema is not None
    return ShardingResult(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        {name: parameter.detach().numpy().copy() for name, parameter in trained.parameters.items()},
        {name: average.numpy().copy() for name, average in expert_state.ema.averages.items()},
        {} if trained.shards is None else {name: place.first_row for name, place in trained.shards.row_shards.items()},
    )


def window(
    parallel: ProcessGroup, source: ModelSource, expert_state: ExpertState, span: range, case: ShardingCase
) -> WindowResult:
    batches = share_of(parallel, span)
    return train_window(
        expert_state,
        batches,
        samples=len(span),
        learning_rate=case.rate,
        options=replace(wan_step_options(source, case.precision, 1.0), reduction=parallel.reduction),
        micro_batches=len(batches),
    )


def share_of(parallel: ProcessGroup, span: range) -> list[StepBatch]:
    """This rank's samples in batches of up to two, padded with idle batches if other ranks have more."""
    counts = [len(_cut(shard_window(span, rank, parallel.world_size))) for rank in range(parallel.world_size)]
    own = _cut(shard_window(span, parallel.rank, parallel.world_size))
    idle = replace(build_wan_batch([span.start], 4), idle=True)
    return own + [idle] * (max(counts) - len(own) if parallel.forward_is_collective else 0)


def _cut(mine: range) -> list[StepBatch]:
    return [build_wan_batch(list(mine[n : n + 2]), 4) for n in range(0, len(mine), 2)]


def by_one_process(_: LauncherEnvironment, source: ModelSource, cases: list[ShardingCase]) -> list[ShardingResult]:
    return shared_out(SingleProcess(), source, cases)


def together(found: list[ShardingResult]) -> ShardingResult:
    """Join the shards of all ranks; values that are whole on each rank must be equal to the bit."""
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
    return ShardingResult(first.losses, first.norms, weights, averages, {})
