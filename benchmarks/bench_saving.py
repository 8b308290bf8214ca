"""What a checkpoint costs training: how much longer steps take, with saving in the background and in the foreground.

A step sleeps for 0.5 s, as a step on a GPU leaves the CPU idle; a checkpoint has 16 MiB (weights and AdamW's two
moments, more per second of a step than an adapter of a large model has) and is written to a real disk and synced. Two
steps with a save and two steps without alternate. The limit applies to the extra time of the whole loop: the copy, the
book-keeping, and the CPU time that the writer thread takes from the training thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import ClaimRow, FigureSpread, at_most, noted, report
from benchmarks.runs import opened, rewind, write_config
from supertuner.models.spec import Tensors
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.step.train_step import ExpertState
from supertuner.train import loop
from supertuner.train.checkpoint.async_saver import CheckpointSaver
from supertuner.train.run.training_run import TrainingRun

STEP_S = 0.5
STATE_BYTES = 16 << 20
TOGETHER = 2
"""Steps after a save that may be affected by it."""
PAIRS = 15
LIMIT_PERCENT = 2.0


class ManyWeightsModel(nn.Module):
    """A model with many weights that computes almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        side = int((STATE_BYTES / 3 / 4 / 8) ** 0.5)
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(side, side)) for _ in range(8)])

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum((layer.sum() for layer in self.layers), torch.zeros(()))
        return noisy * (1 + total)


def asleep(
    module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, conditions: Tensors
) -> torch.Tensor:
    time.sleep(STEP_S)
    predicted: torch.Tensor = module(noisy)
    return predicted


def weigh_down(run: TrainingRun) -> None:
    """Replace the run's model by `ManyWeightsModel`."""
    run.step_options = replace(run.step_options, denoise=asleep)
    trainees, trained = [], {}
    for trainee in run.expert_states:
        module = ManyWeightsModel()
        parameters = dict(module.named_parameters())
        optimizer = build_optimizer(run.config.optimizer, parameters, trainee.expert.name)
        trainees.append(ExpertState(trainee.expert, module, parameters, optimizer))
        name = trainee.expert.name
        trained[name] = replace(run.trainable_experts[name], module=module, parameters=parameters)
    run.expert_states, run.trainable_experts = tuple(trainees), trained


def longer(run: TrainingRun) -> tuple[FigureSpread, FigureSpread]:
    """Percent of a step, per save: (how much longer steps with a save take than steps without, the CPU time of the
    training thread for the save, which is what remains on an otherwise idle machine)."""
    rewind(run)
    loops: list[float] = []
    savers: list[float] = []
    with CheckpointSaver(run) as saver, run.dataloader() as feed:
        for number, window in enumerate(feed):
            begun = time.perf_counter()
            loop._train_step(run, window)
            between = time.thread_time()
            saver.report_if_finished()
            if number % (2 * TOGETHER) == 0:
                saver.save()
            savers.append(time.thread_time() - between)
            loops.append(time.perf_counter() - begun)
    return _apart(loops), _apart(savers)


def _apart(seconds: list[float]) -> FigureSpread:
    """The difference between the steps with a save and the following steps without. The first two pairs are excluded,
    because they import modules and access memory for the first time."""
    stretches = [sum(seconds[at : at + TOGETHER]) for at in range(0, len(seconds), TOGETHER)]
    shares = [100 * (a - b) / STEP_S for a, b in zip(stretches[0::2], stretches[1::2], strict=True)][2:]
    return FigureSpread(statistics.median(shares), min(shares), max(shares))


@contextmanager
def a_run(folder: Path, background: bool) -> Iterator[TrainingRun]:
    blocks = {
        "train": {"batch_size": 1, "max_steps": 2 * TOGETHER * (PAIRS + 2), "mixed_precision": "fp32"},
        "model": {"experts": "high_noise"},
        "checkpoints": {"every_steps": 0, "in_background": background},
    }
    with opened(write_config(folder, **blocks)) as (_, run):
        weigh_down(run)
        yield run


def rows() -> list[ClaimRow]:
    torch.set_num_threads(1)
    found = {}
    for background in (True, False):
        with tempfile.TemporaryDirectory(prefix="supertuner-bench-") as place, a_run(Path(place), background) as run:
            found[background] = longer(run)
    return [
        at_most(
            "a checkpoint of 16 MiB in the background, share of a step of 0.5 s",
            found[True][0],
            LIMIT_PERCENT,
            unit="%",
        ),
        noted("… of which CPU time of the training thread: copying 16 MiB", found[True][1], unit="%"),
        noted("… in the foreground", found[False][0], unit="%"),
    ]


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
