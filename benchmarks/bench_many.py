"""The overhead of training with two processes: milliseconds per micro-batch beyond a plain loop.

Both rivals run in the same two processes, one thread each, and take turns. Ours is the whole training loop (caches,
windows, gradient sums, agreement on signals, logs, reports, watchdog); the peer is torch's DistributedDataParallel
around the same module, with tensors in memory and gradients summed only in the last micro-batch of a window. Also
shown, without a limit: the speed-up of two processes over one at the same number of samples per window.
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
            faster, peer = (alone[rival].median_s / together[rival].median_s for rival in ("ours", "bare"))
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
    """Replace the run's model by another module; data, caches, logs and reports stay as they are."""
    from supertuner.optim.optimizer_registry import build_optimizer
    from supertuner.step.train_step import ExpertState

    expert_states = []
    for expert_state in run.expert_states:
        module = make()
        parameters = dict(module.named_parameters())
        expert_states.append(
            ExpertState(
                expert_state.expert,
                module,
                parameters,
                build_optimizer(run.config.optimizer, parameters, expert_state.expert.name),
            )
        )
    run.step_options, run.expert_states = replace(run.step_options, denoise=denoise_with_scale), tuple(expert_states)


def _bare(run: TrainingRun, module: nn.Module) -> Callable[[int], None]:
    """A function that trains one window with a plain loop of the same mathematics."""
    from torch.nn.parallel import DistributedDataParallel

    many, draw = run.process_group.world_size > 1, samples(run)
    wrapped: nn.Module = DistributedDataParallel(module) if many else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def window(micro: int) -> None:
        total = torch.zeros(())
        for number in range(micro):
            clean, noise, level = draw()
            skip_sync = isinstance(wrapped, DistributedDataParallel) and number < micro - 1
            with wrapped.no_sync() if skip_sync else nullcontext():  # type: ignore[operator]
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
