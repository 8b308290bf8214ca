"""The host time of applying a plan: nothing for a plan without offloading, and little per block otherwise.

Forty blocks that compute almost nothing run on the CPU, so the time is that of offloading itself: hooks, look-ups, and
copies of a few kilobytes. On a GPU this is host time, and the host runs ahead of the device: it matters only if a block
computes for a shorter time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import ClaimRow, FigureSpread, at_most, interleave, paired, report, say
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.models.objective.diffusion import TrainingObjective
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision
from supertuner.step.train_step import ExpertState, StepOptions, train_window
from supertuner.train.offload.apply import apply_plan
from supertuner.train.offload.transfer import SynchronousTransfer

CPU = torch.device("cpu")
BLOCKS, WIDTH, WINDOWS = 40, 16, 10
NOTHING_LIMIT = 1.02
BLOCK_LIMIT_MS = 1.0


class MostlyFrozenBlock(nn.Module):
    """A block of frozen layers and one small trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(8))
        self.trained = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.frozen:
            hidden = layer(hidden)
        output: torch.Tensor = hidden + self.trained(hidden)
        return output


class BlockStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MostlyFrozenBlock() for _ in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def expert_state() -> ExpertState:
    torch.manual_seed(0)
    module = BlockStack()
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    optimizer = build_optimizer(OptimizerSettings.model_validate({"name": "adamw"}), parameters, "model")
    return ExpertState(Expert("model", "transformer"), module, parameters, optimizer)


def plan(weights: WeightPlacement, activations: ActivationPolicy) -> MemoryPlan:
    rows = tuple(BlockPlan(f"blocks.{number}", weights, activations, "a benchmark") for number in range(BLOCKS))
    return MemoryPlan("train", "cpu", True, rows, 1, OptimizerPlacement.GPU, False, None)


def windows(expert: ExpertState) -> Callable[[], None]:
    options = StepOptions(_denoise, TrainingObjective(), ComputePrecision("fp32", CPU))
    shape = (2, 4, WIDTH)
    batch = StepBatch(torch.ones(shape), torch.ones(shape), torch.full((2,), 0.5), {}, {})

    def run() -> None:
        for _ in range(WINDOWS):
            train_window(expert, [batch], samples=2, learning_rate=1e-4, options=options)

    return run


def _denoise(module: nn.Module, noisy: torch.Tensor, _levels: torch.Tensor, _t: Tensors, _c: Tensors) -> torch.Tensor:
    predicted: torch.Tensor = module(noisy)
    return predicted


def rows() -> list[ClaimRow]:
    rivals = {"none": windows(expert_state()), "again": windows(expert_state())}
    for name, weights, activations in (
        ("nothing", WeightPlacement.GPU, ActivationPolicy.KEEP),
        ("streamed", WeightPlacement.STREAMED, ActivationPolicy.KEEP),
        ("sent", WeightPlacement.GPU, ActivationPolicy.SEND),
        ("recomputed", WeightPlacement.GPU, ActivationPolicy.RECOMPUTE),
    ):
        expert = expert_state()
        apply_plan(expert, plan(weights, activations), SynchronousTransfer(CPU), min_offload_bytes=1)
        rivals[name] = windows(expert)
    times = interleave(rivals, rounds=15)
    for name, timing in times.items():
        say(f"{name:10} {timing} for {WINDOWS} windows of {BLOCKS} blocks")
    noise = paired(times["again"], times["none"])
    found = [
        at_most(
            "a plan without offloading, compared with no plan",
            paired(times["nothing"], times["none"]),
            NOTHING_LIMIT,
            note=f"two runs without a plan: {noise.median:.3f} ({noise.low:.3f} to {noise.high:.3f})",
        )
    ]
    for name, title in (("streamed", "streamed"), ("sent", "offloaded")):
        beyond = sorted(
            (a - b) / (WINDOWS * BLOCKS) * 1e3
            for a, b in zip(times[name].rounds_s, times["none"].rounds_s, strict=True)
        )
        spread = FigureSpread(beyond[len(beyond) // 2], beyond[0], beyond[-1])
        found.append(
            at_most(
                f"following a plan without the copies, a {title} block, both passes", spread, BLOCK_LIMIT_MS, unit="ms"
            )
        )
    return found


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    sys.exit(main())
