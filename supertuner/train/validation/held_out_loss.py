"""Measures the loss on held-out samples at fixed noise levels and with fixed noise, so that steps are comparable.

The noise is a function of seed, sample and noise level, independent of any generator state. So two validations of the
same weights give the same bits, and the loss changes only when the weights do.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import fsum

import torch
import xxhash

from supertuner.core.events import DecisionEvent, Sink
from supertuner.data.ordering.micro_batches import micro_batches
from supertuner.models.objective.diffusion import sample_noise
from supertuner.models.spec import Expert
from supertuner.sinks.training_events import HeldOutLoss, finite_or_none
from supertuner.step.batch import StepBatch
from supertuner.step.train_step import ExpertState, StepOptions, held_out_losses
from supertuner.train.run.dataloader import BatchCollator


def plan_sigmas(experts: Iterable[Expert], sigmas: Sequence[float], sink: Sink) -> dict[str, tuple[float, ...]]:
    """Expert → its noise levels: the configured ones in its range; the middle of its range if there are none."""
    sigmas_by_expert = {}
    for expert in experts:
        inside = tuple(level for level in sigmas if expert.sigma_min <= level < expert.sigma_max)
        sigmas_by_expert[expert.name] = inside or ((expert.sigma_min + expert.sigma_max) / 2,)
        if not inside:
            setting, middle = "validation.held_out_levels", list(sigmas_by_expert[expert.name])
            reason = f"{setting} has none from {expert.sigma_min:g} to {expert.sigma_max:g}: the middle"
            sink.emit(DecisionEvent(f"{setting}[{expert.name}]", middle, reason))
    return sigmas_by_expert


def held_out_batches(collator: BatchCollator, expert: Expert, samples: int, batch_size: int) -> Iterator[StepBatch]:
    """The first `samples` held-out samples in their order, each at most once, in batches."""
    order = collator.corpus.order
    for micro_batch in micro_batches(order, range(min(samples, order.epoch_length(0))), batch_size):
        yield collator.collate(micro_batch, expert)


def measure_held_out(
    state: ExpertState, batches: Iterable[StepBatch], sigmas: Sequence[float], *, seed: int, step_options: StepOptions
) -> list[HeldOutLoss]:
    """The mean loss of one expert at each noise level, with the current weights of its module."""
    losses: dict[float, list[float]] = {sigma: [] for sigma in sigmas}
    for batch in batches:
        for sigma, sample_losses in losses.items():
            noisy_batch = with_sigma(batch, sigma, seed).to(step_options.precision.device)
            sample_losses += held_out_losses(state, (noisy_batch,), step_options).tolist()
    expert = state.expert.name
    return [HeldOutLoss(expert, sigma, exact_mean(values)) for sigma, values in losses.items() if values]


def with_sigma(batch: StepBatch, sigma: float, seed: int) -> StepBatch:
    """The batch at this noise level, with the noise that belongs to the position of each sample at it."""
    noise_seed, shape = sigma_noise_seed(seed, sigma), tuple(batch.latents.shape[1:])
    noise = torch.stack([sample_noise(noise_seed, position, shape) for position in batch.positions])
    return replace(batch, noise=noise, sigmas=torch.full((len(noise),), sigma, dtype=torch.float32))


def sigma_noise_seed(seed: int, sigma: float) -> int:
    """Seed for the noise of one noise level: differs from that of training and of other levels."""
    return xxhash.xxh3_64_intdigest(struct.pack("<8sqd", b"held-out", seed, sigma)) >> 1


def append_means(rows: Sequence[HeldOutLoss]) -> list[HeldOutLoss]:
    """The rows of each expert, each followed by the expert's mean; last the mean over all rows, equally weighted."""
    experts: dict[str | None, list[HeldOutLoss]] = {}
    for row in rows:
        experts.setdefault(row.expert, []).append(row)
    with_expert_means = []
    for expert, expert_rows in experts.items():
        with_expert_means += [*expert_rows, HeldOutLoss(expert, None, exact_mean([row.loss for row in expert_rows]))]
    return [*with_expert_means, HeldOutLoss(None, None, exact_mean([row.loss for row in rows]))] if rows else []


def exact_mean(losses: Sequence[float]) -> float:
    """The correctly rounded mean, independent of the order: batches may be split differently."""
    return fsum(losses) / len(losses)


def encode_row(step: int, row: HeldOutLoss) -> bytes:
    """A line of validation.jsonl. Numbers are written as Python's repr, which reads back to the same bits."""
    fields = {"step": step, "expert": row.expert, "level": row.sigma, "loss": finite_or_none(row.loss)}
    return (json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n").encode()
