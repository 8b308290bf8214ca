"""The loss on samples that are not trained on, at fixed noise levels and with fixed noise: comparable at every step.

The noise of a sample at a level is a function of seed, sample and level; nothing is drawn. So two validations of the
same weights give the same bits, and the loss changes only because the weights do.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import torch
import xxhash

from supertuner.core.events import Decided, Sink
from supertuner.data.ordering.windows import micro_batches
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import Expert
from supertuner.sinks.training import HeldOut, finite
from supertuner.step.batch import StepBatch
from supertuner.step.window import Rules, Trainee, held_out_loss
from supertuner.train.dataloader import Maker


@dataclass(frozen=True, eq=False, slots=True)
class Probe:
    """Some held-out samples of one shape."""

    batch: StepBatch
    indices: tuple[int, ...]
    """Which sample each row is: what its noise depends on."""


def plan_levels(experts: Iterable[Expert], levels: Sequence[float], sink: Sink) -> dict[str, tuple[float, ...]]:
    """Expert → the levels it is measured at: those in its range, or else the middle of its range."""
    found = {}
    for expert in experts:
        inside = tuple(level for level in levels if expert.low <= level < expert.high)
        found[expert.name] = inside or ((expert.low + expert.high) / 2,)
        if not inside:
            reason = f"validation.held_out_levels has none from {expert.low:g} to {expert.high:g}: the middle"
            sink.emit(Decided(f"validation.held_out_levels[{expert.name}]", list(found[expert.name]), reason))
    return found


def probes(maker: Maker, expert: Expert, *, samples: int, batch_size: int) -> Iterator[Probe]:
    """The first samples of the held-out data's order, each once at most, in batches."""
    order = maker.corpus.order
    for micro in micro_batches(order, range(min(samples, order.epoch_length(0))), batch_size):
        yield Probe(maker.make(micro, expert), tuple(micro.draws.position.tolist()))


def measure(
    trainee: Trainee, given: Iterable[Probe], levels: Sequence[float], *, seed: int, rules: Rules
) -> list[HeldOut]:
    """The mean loss of one expert at each level, with the weights that its module holds now."""
    losses: dict[float, list[float]] = {level: [] for level in levels}
    for probe in given:
        for level, found in losses.items():
            batch = at_level(probe, level, seed).to(rules.precision.device)
            found += held_out_loss(trainee, (batch,), rules).tolist()
    return [HeldOut(trainee.expert.name, level, mean(found)) for level, found in losses.items() if found]


def at_level(probe: Probe, level: float, seed: int) -> StepBatch:
    """The batch with the noise that belongs to each of its samples at this level."""
    batch = probe.batch
    shape = tuple(batch.latents.shape[1:])
    chance = level_seed(seed, level)
    noise = torch.stack([sample_noise(chance, index, shape) for index in probe.indices])
    return replace(batch, noise=noise, levels=torch.full((len(probe.indices),), level, dtype=torch.float32))


def level_seed(seed: int, level: float) -> int:
    """Seed of the noise of one level: other than that of training, and of other levels."""
    return xxhash.xxh3_64_intdigest(struct.pack("<8sqd", b"held-out", seed, level)) >> 1


def with_means(rows: Sequence[HeldOut]) -> list[HeldOut]:
    """Each expert's levels followed by their mean; last the mean of everything, each level counting the same."""
    experts: dict[str | None, list[HeldOut]] = {}
    for row in rows:
        experts.setdefault(row.expert, []).append(row)
    found = []
    for expert, own in experts.items():
        found += [*own, HeldOut(expert, None, mean([row.loss for row in own]))]
    return [*found, HeldOut(None, None, mean([row.loss for row in rows]))] if rows else []


def mean(losses: Sequence[float]) -> float:
    """Exact whatever the order: batches may be cut differently."""
    return fsum(losses) / len(losses)


def line_of(step: int, row: HeldOut) -> bytes:
    """A line of validation.jsonl. Numbers as Python's repr, which reads back to the same bits."""
    fields: Mapping[str, object] = {
        "step": step,
        "expert": row.expert,
        "level": row.level,
        "loss": finite(row.loss),
    }
    return (json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n").encode()
