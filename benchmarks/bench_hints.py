"""Repeated hints for a typical batch: at most 50 µs, compared with a bare loop of dictionary look-ups.

The batch has the eight tensors of a step of a text-to-video model, named as the trainer names them. It is hinted once
through the software superchip, whose speed says nothing about a driver; a repeated hint calls no driver, so its cost
does not depend on the machine's GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ClaimRow, RivalTiming, at_most, interleave, noted, paired, report
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.hints.api import ResidencyHints
from supertuner.memory.machines import MACHINES

LIMIT_US = 50.0
REPEATS = 20
"""Few, so that a round is shorter than a time slice of the scheduler: a busy machine then disturbs only some rounds."""
ROUNDS = 201


def typical() -> dict[str, torch.Tensor]:
    """A micro-batch of one sample."""
    return {
        "latents": torch.zeros(1, 16, 21, 60, 104),
        "noise": torch.zeros(1, 16, 21, 60, 104),
        "levels": torch.zeros(1),
        "text.prompt_embeds": torch.zeros(1, 512, 4096, dtype=torch.bfloat16),
        "text.attention_mask": torch.zeros(1, 512, dtype=torch.int64),
        "text.pooled": torch.zeros(1, 4096, dtype=torch.bfloat16),
        "conditions.image_latents": torch.zeros(1, 20, 21, 60, 104),
        "conditions.mask": torch.zeros(1, 4, 21, 60, 104),
    }


def rows() -> list[ClaimRow]:
    batch, hints = typical(), ResidencyHints(EmulatedSuperchip(MACHINES["gh200-96"]))
    counts = hints.place_batch(batch)
    assert sum(counts.values()) == len(batch)
    timings = interleave(
        {"hints": repeated(lambda: hints.place_batch(batch)), "look-ups": repeated(bare(batch))}, rounds=ROUNDS
    )
    return [
        at_most("residency hints of a batch of 8 tensors, repeated", micro(timings["hints"]), LIMIT_US, unit="µs"),
        noted("times a bare loop of dictionary look-ups", paired(timings["hints"], timings["look-ups"])),
    ]


def bare(batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    """The least that a cache of hints needs: the address as key, and a dictionary look-up."""
    known = {tensor.data_ptr(): name for name, tensor in batch.items()}
    return lambda: [known.get(tensor.data_ptr()) for tensor in batch.values()]


def repeated(act: Callable[[], object]) -> Callable[[], None]:
    def play() -> None:
        for _ in range(REPEATS):
            act()

    return play


def micro(timing: RivalTiming) -> float:
    """Microseconds of one repetition."""
    return timing.median_s / REPEATS * 1e6


def main() -> int:
    return report(rows(), title="residency hints")


if __name__ == "__main__":
    sys.exit(main())
