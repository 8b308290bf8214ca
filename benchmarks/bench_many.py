"""What training on two processes costs beside the model: milliseconds per micro-batch beyond a bare loop.

Both rivals run in the same two processes, one thread each, and take turns: ours is the whole engine (caches, windows,
sums, agreement about signals, logs, reports, the watch), the peer is torch's DistributedDataParallel around the same
module over tensors that lie ready in memory, its gradients added up in the last micro-batch of a window only. For the
record: how much faster two processes are than one at the same number of samples per window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the ranks run this file as a script

from benchmarks.harness import ClaimRow, at_most, in_memory_folder, noted, say
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
from benchmarks.runs import SingleScaleModel, denoise_with_scale
from supertuner.train.run.training_run import TrainingRun

LIMIT_MS = 1.0


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one number": SingleScaleModel,
    "66 tensors": partial(ResidualLinearModel, 32, 128),
}


def rows() -> list[ClaimRow]:
    found = []
    with in_memory_folder() as folder:
        for model in MODELS:
            together, alone = (timed(__file__, ranks, str(folder), model) for ranks in (2, 1))
            name = f"two processes, beyond bare DDP, per micro-batch ({model})"
            ratio = together["ours"].median_s / together["bare"].median_s
            say(f"{model}: ours {together['ours']}, bare {together['bare']} for {TURN} windows of 2×{MICRO}×{BATCH}")
            found.append(at_most(name, beyond(together), LIMIT_MS, unit="ms", note=f"ours / bare {ratio:.2f}"))
            faster, peer = (alone[who].median_s / together[who].median_s for who in ("ours", "bare"))
            note = f"not interleaved; the bare loop: {peer:.2f}"
            found.append(noted(f"two processes against one, same windows ({model})", faster, note=note))
    return found


def run_rank(folder: str, model: str, answer: Path) -> None:
    place = place_here()
    micro = 2 * MICRO // place.world_size
    with opened_run(f"many-{place.world_size}-{model.replace(' ', '-')}", Path(folder), place, micro) as run:
        _lighten(run, MODELS[model])
        measure(run, _bare(run, MODELS[model]()), micro, answer)


def _lighten(run: TrainingRun, make: Callable[[], nn.Module]) -> None:
    """Let the run train another module; data, caches, logs and reports stay as they are."""
    from supertuner.optim.optimizer_registry import build_optimizer
    from supertuner.step.window import ExpertState

    trainees = []
    for trainee in run.expert_states:
        module = make()
        parameters = dict(module.named_parameters())
        trainees.append(
            ExpertState(
                trainee.expert,
                module,
                parameters,
                build_optimizer(run.config.optimizer, parameters, trainee.expert.name),
            )
        )
    run.step_options, run.expert_states = replace(run.step_options, denoise=denoise_with_scale), tuple(trainees)


def _bare(run: TrainingRun, module: nn.Module) -> Callable[[int], None]:
    """A window of the same mathematics as a person would write it down."""
    from torch.nn.parallel import DistributedDataParallel

    many, draw = run.process_group.world_size > 1, samples(run)
    wrapped: nn.Module = DistributedDataParallel(module) if many else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def window(micro: int) -> None:
        total = torch.zeros(())
        for number in range(micro):
            clean, noise, level = draw()
            apart = isinstance(wrapped, DistributedDataParallel) and number < micro - 1
            with wrapped.no_sync() if apart else nullcontext():  # type: ignore[operator]
                predicted = wrapped((1 - level) * clean + level * noise)
                each = (predicted - (noise - clean)).square().flatten(1).mean(1)
                (each.sum() / (BATCH * micro)).backward()
            total += each.detach().sum()
        if many:
            torch.distributed.all_reduce(total)
        torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(total)

    return window


def main() -> int:
    return main_of(rows, run_rank)


if __name__ == "__main__":
    raise SystemExit(main())
