"""Automagic on the 800 tensors of a rank-16 LoRA of Wan2.2 14B, compared with its plain form and with torch's AdamW.

The plain form processes tensor after tensor, with one torch operation per line of the algorithm. It stores its learning
rates as the published one does, in 8 bits with one scale per tensor, which needs a device synchronisation; a second
plain form stores them in fp32, which takes less time and three times the memory. One CPU thread; it says nothing about
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.harness import ClaimRow, at_least, at_most, interleave, noted, paired, report, say
from supertuner.optim.automagic.optimizer import Automagic
from supertuner.optim.automagic.rate_grid import LearningRateLimits

BLOCKS, WIDTH, HIDDEN, RANK = 40, 5120, 13824, 16
LIMITS = LearningRateLimits(start=1e-6, bump=1e-6, lowest=1e-7, highest=1e-3)
PLAIN_LIMIT, ADAMW_LIMIT, BYTES_LIMIT = 3.0, 2.5, 1.4


def lora(blocks: int = BLOCKS) -> dict[str, nn.Parameter]:
    """Query, key, value and output of two attentions, and the feed-forward layers, of each block."""
    square, up, down = ((WIDTH, WIDTH),) * 8, (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    parameters: dict[str, nn.Parameter] = {}
    for block in range(blocks):
        for layer, (inside, outside) in enumerate((*square, up, down)):
            parameters[f"blocks.{block}.{layer}.lora_A"] = nn.Parameter(torch.randn(RANK, inside) * 0.01)
            parameters[f"blocks.{block}.{layer}.lora_B"] = nn.Parameter(torch.randn(outside, RANK) * 0.01)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    return parameters


@dataclass
class PlainAutomagicState:
    """The state of the plain form for one tensor."""

    row: torch.Tensor
    column: torch.Tensor
    rates: torch.Tensor
    scale: float
    positive: torch.Tensor
    store: Callable[[torch.Tensor], tuple[torch.Tensor, float]] = field(repr=False)


def in_fp32(rates: torch.Tensor) -> tuple[torch.Tensor, float]:
    return rates, 1.0


def in_eight_bits(rates: torch.Tensor) -> tuple[torch.Tensor, float]:
    scale = (rates.abs().max() / 127).item()
    return (rates / scale).round().clamp(-127, 127).to(torch.int8), scale


def plain(
    parameters: list[nn.Parameter], store: Callable[[torch.Tensor], tuple[torch.Tensor, float]]
) -> Callable[[], None]:
    memories = [
        PlainAutomagicState(
            torch.zeros(p.shape[0]),
            torch.zeros(p.shape[1]),
            *store(torch.full(p.shape, LIMITS.start)),
            torch.zeros(p.shape, dtype=torch.bool),
            store,
        )
        for p in parameters
    ]

    @torch.no_grad()
    def step() -> None:
        for parameter, memory in zip(parameters, memories, strict=True):
            _plain_step(parameter, memory)

    return step


def _plain_step(parameter: nn.Parameter, memory: PlainAutomagicState) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    squares = gradient.square() + 1e-30
    memory.row = memory.row * 0.999 + squares.mean(-1) * 0.001
    memory.column = memory.column * 0.999 + squares.mean(-2) * 0.001
    moment = torch.outer(memory.row / memory.row.mean(), memory.column)
    update = gradient * moment.rsqrt()
    update = update / update.square().mean().sqrt().clamp(min=1.0)
    positive = update > 0
    rates = memory.rates.float() * memory.scale if memory.rates.dtype == torch.int8 else memory.rates
    rates = torch.where(positive == memory.positive, rates + LIMITS.bump, rates - LIMITS.bump)
    rates = rates.clamp(LIMITS.lowest, LIMITS.highest)
    memory.rates, memory.scale = memory.store(rates)
    memory.positive = positive
    parameter.sub_(update * rates)


def state_bytes(ours: Automagic) -> float:
    """Bytes of state per weight, without the factored moments."""
    stored: int = sum(
        tensor.numel() * tensor.itemsize
        for state in ours.state.values()
        for name, tensor in state.items()
        if name not in ("row", "column")
    )
    return stored / sum(p.numel() for p in ours.state)


def rows() -> list[ClaimRow]:
    torch.set_num_threads(1)
    parameters = lora()
    weights = list(parameters.values())
    ours, by_torch = Automagic(parameters, LIMITS), Automagic(parameters, LIMITS, native=False)
    times = interleave(
        {
            "ours": ours.step,
            "ours without C": by_torch.step,
            "plain": plain(weights, in_eight_bits),
            "plain, fp32": plain(weights, in_fp32),
            "adamw": torch.optim.AdamW(weights, foreach=True).step,
        },
        rounds=5,
    )
    say(
        f"{len(weights)} tensors of {sum(p.numel() for p in weights):,} weights: "
        + ", ".join(f"{name} {t}" for name, t in times.items())
    )
    return [
        at_least(
            "Automagic on a rank-16 LoRA of Wan2.2 14B, times as fast as its plain form",
            paired(times["plain"], times["ours"]),
            PLAIN_LIMIT,
        ),
        at_most("… time relative to foreach AdamW", paired(times["ours"], times["adamw"]), ADAMW_LIMIT),
        at_most("… rates and signs, bytes per weight", state_bytes(ours), BYTES_LIMIT, unit="B"),
        noted("… times as fast as the plain form in fp32", paired(times["plain, fp32"], times["ours"])),
        noted("… by torch's kernels alone, times as fast as plain", paired(times["plain"], times["ours without C"])),
        noted(
            "… by torch's kernels alone, time relative to foreach AdamW",
            paired(times["ours without C"], times["adamw"]),
        ),
    ]


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
