"""The overhead of sharded training: milliseconds per micro-batch beyond a plain FSDP2 loop.

Both rivals run in the same two processes, one thread each, and take turns. Ours is the whole training loop with
`parallel.strategy: fsdp` and all weights trained; the peer is torch's `fully_shard` on each block of the same module,
with tensors in memory and gradients summed only in the last micro-batch of a window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the ranks run this file as a script

from benchmarks.harness import ClaimRow, at_most, in_memory_folder, say
from benchmarks.ranks import (
    BATCH,
    MICRO,
    TURN,
    ResidualLinearModel,
    beyond,
    main_of,
    measure,
    opened_run,
    place_here,
    samples,
    timed,
)
from benchmarks.runs import denoise_with_scale
from supertuner.train.run.training_run import TrainingRun

RANKS = 2
LIMIT_MS = 1.0


def rows() -> list[ClaimRow]:
    with in_memory_folder() as folder:
        times = timed(__file__, RANKS, str(folder))
    ours, bare = times["ours"], times["bare"]
    say(f"ours {ours}, bare {bare} for {TURN} windows of {RANKS}×{MICRO}×{BATCH}")
    name = "two processes, beyond bare FSDP2, per micro-batch (all weights)"
    return [at_most(name, beyond(times), LIMIT_MS, unit="ms", note=f"ours / bare {ours.median_s / bare.median_s:.2f}")]


def run_rank(folder: str, answer: Path) -> None:
    settings = {
        "adapter": {"type": "full"},
        "parallel": {"strategy": "fsdp"},
        "model": {"experts": "low_noise"},
        "exports": {"when": "never"},
    }
    with opened_run("shards", Path(folder), place_here(), MICRO, **settings) as run:
        _lighten(run)
        measure(run, _bare(run), MICRO, answer)


def _lighten(run: TrainingRun) -> None:
    """Replace the run's model by another module; data, caches, logs and reports stay as they are."""
    from supertuner.models.adapters.attach import TrainableExpert
    from supertuner.optim.optimizer_registry import build_optimizer
    from supertuner.step.train_step import ExpertState

    (expert_state,), sharder = run.expert_states, run.process_group.sharder
    assert sharder is not None
    module, expert = ResidualLinearModel(4, 256), expert_state.expert
    trained = sharder.shard_expert(TrainableExpert(expert.name, "full", module, dict(module.named_parameters())))
    parameters = dict(trained.parameters)
    run.step_options = replace(run.step_options, denoise=denoise_with_scale)
    run.expert_states = (
        ExpertState(expert, module, parameters, build_optimizer(run.config.optimizer, parameters, expert.name)),
    )
    run.trainable_experts = {expert.name: trained}


def _bare(run: TrainingRun) -> Callable[[int], None]:
    """A function that trains one window with a plain loop of the same mathematics."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module: Any = ResidualLinearModel(4, 256)
    draw, mesh = samples(run), init_device_mesh("cpu", (RANKS,))
    for block in (*module.layers, module):
        fully_shard(block, mesh=mesh)
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def window(micro: int) -> None:
        total = torch.zeros(())
        for number in range(micro):
            clean, noise, level = draw()
            module.set_requires_gradient_sync(number == micro - 1)
            predicted = module((1 - level) * clean + level * noise)
            each = (predicted - (noise - clean)).square().flatten(1).mean(1)
            (each.sum() / (BATCH * micro * RANKS)).backward()
            total += each.detach().sum()
        torch.distributed.all_reduce(total)
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(total)

    return window


def main() -> int:
    return main_of(rows, run_rank)


if __name__ == "__main__":
    raise SystemExit(main())
