"""Single changes that would make a run fit, or make it faster, and what each would cost: from one table. Pure.

Changes of where things live and of what is done again are worked out block by block. Changes of sizes (batch, frames,
number formats) are scaled from the trace of the settings as they are, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from supertuner.core.types import MediaKind, bytes_text
from supertuner.memory.machines import MACHINES, Machine
from supertuner.plan.forecast.context import Situation, as_configured, needed, plain_seconds, scaled
from supertuner.plan.forecast.model import HOST_SHARE, TIGHT_SHARE, Change
from supertuner.plan.placement.choice import Choice
from supertuner.plan.placement.plan_step import place
from supertuner.plan.placement.step_table import Block, StepTable
from supertuner.plan.placement.throughput import Limits, Rates

STATE_8BIT = 0.25
"""Of AdamW's fp32 moments: one byte for each of four, blocks' scales left out."""
MOST_SHOWN = 8
NOT_MUCH_SLOWER = 1.2
FASTER = 0.99
FORECAST_ONLY = ("mi300a",)
"""Machines that have no driver here: nobody is sent to them."""


def changes(now: Situation) -> tuple[Change, ...]:
    """The best first. Of a run that does not fit, those that fit or need less; of one that fits, those that make it
    faster and change nothing else."""
    found = [*_placements(now), *_sizes(now), *_machines(now)]
    worst = max(now.peak_bytes, now.other_bytes)
    if now.fits:
        helpful = [one for one in found if one.fits and one.same_result and one.time and one.time < FASTER]
    else:
        helpful = [one for one in found if one.fits or (one.gpu_bytes is not None and one.gpu_bytes < worst)]
    return tuple(sorted(helpful, key=_rank)[:MOST_SHOWN])


def _rank(change: Change) -> tuple[bool, bool, bool, float, int]:
    """What fits; of that, what changes time and memory alone; of that, the quickest; of that, the smallest."""
    time = 0.0 if change.time is None else round(change.time, 3)
    return not change.fits, not change.same_result, change.time is None, time, change.gpu_bytes or 0


# ── where things live, and what is done again ────────────────────────────────────────────────────────────────────────


def _placements(now: Situation) -> Iterator[Change]:
    """A run that follows a plan has the best of these already."""
    config, table = now.config, now.table
    if table.idle_bytes:
        alone = replace(table, idle_bytes=0)
        yield _changed(now, "model.experts=high_noise", alone, now.choice, "one expert at a time: two runs")
    if not config.memory.overflow.enabled and not now.room.one_pool and now.room.gpu_bytes is not None:
        yield from _overflow(now, now.room.gpu_bytes)
    if now.acts:
        return
    wanted = not config.train.gradient_checkpointing
    price = "each block's forward pass twice" if wanted else "activations are kept"
    choice = as_configured(table, checkpointing=wanted)
    yield _changed(now, f"train.gradient_checkpointing={str(wanted).lower()}", table, choice, price)
    if now.plan is not None and now.plan.fits and now.plan.modelled is not None:
        modelled, before = now.plan.modelled, now.seconds
        time = None if before is None else modelled.seconds / before
        price = f"{bytes_text(modelled.host_peak_bytes)} of host memory"
        host = now.host_bytes + modelled.host_peak_bytes
        yield Change("plan.act=auto", modelled.gpu_peak_bytes, host, True, time, price)


def _overflow(now: Situation, limit: int) -> Iterator[Change]:
    """What does not fit lies in managed memory. Every byte of it crosses the link at least once each way in a step."""
    over = now.peak_bytes - limit
    if over <= 0:
        return
    host = now.host_bytes + over
    fits = now.room.host_bytes is not None and host <= now.room.host_bytes
    time = None
    if now.rates is not None and now.rates.to_device_bytes_s and now.rates.to_host_bytes_s:
        crossing = over / now.rates.to_device_bytes_s + over / now.rates.to_host_bytes_s
        plain = plain_seconds(now.table, now.choice, now.rates)
        time = (plain + now.table.micro_batches * crossing) / (now.seconds or plain)
    yield Change("memory.overflow.enabled=true", limit, host, fits, time, "at least that: pages are fetched on demand")


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sizes(now: Situation) -> Iterator[Change]:
    config, table = now.config, now.table
    kind = config.adapter.type
    if kind not in ("full", "diff") and not config.adapter.dora and config.model.base_weights == "as_computed":
        eight = replace(
            table,
            blocks=tuple(replace(block, frozen_bytes=block.frozen_bytes // 2) for block in table.blocks),
            idle_bytes=table.idle_bytes // 2,
        )
        price = "weights of 8 bits, unpacked at every use: slower, and a little coarser"
        yield _changed(
            now, "model.base_weights=int8", eight, now.choice, price, exact=False, timed=False, same_result=False
        )
    if config.optimizer.name == "adamw":
        less = replace(table, blocks=tuple(_with_state(block, STATE_8BIT) for block in table.blocks))
        price = "moments of 8 bits: other steps than AdamW's"
        yield _changed(now, "optimizer.name=adamw8bit", less, now.choice, price, exact=False, same_result=False)
    batch = config.train.batch_size
    if batch > 1:
        alone = scaled(table, 1 / batch)
        several = replace(alone, micro_batches=table.micro_batches * batch)
        sets = (
            f"train.batch_size=1 train.gradient_accumulation_steps={config.train.gradient_accumulation_steps * batch}"
        )
        yield _changed(now, sets, several, now.choice, "the same window in smaller pieces", exact=False)
    yield from _smaller(now)
    if kind == "full":
        yield _adapter_instead(now)


def _smaller(now: Situation) -> Iterator[Change]:
    """Of the dataset with the largest samples: as many frames, or as large a side, as fits. Half, if nothing does."""
    for number, dataset in enumerate(now.config.datasets):
        if dataset.held_out or now.room.gpu_bytes is None:
            continue
        if dataset.dataset_type is MediaKind.VIDEO and max(dataset.frames) > 1:
            most = max(dataset.frames)
            choices = [count for count in range(most - 4, 0, -4) if count % 4 == 1] or [1]
            shares = [((count - 1) // 4 + 1) / ((most - 1) // 4 + 1) for count in choices]
            name, price = f"datasets[{number}].frames", "shorter clips"
        else:
            most = max(dataset.resolution)
            step = max(64, dataset.bucket_step)
            choices = list(range(most - step, step - 1, -step))
            shares = [(side / most) ** 2 for side in choices]
            name, price = f"datasets[{number}].resolution", "smaller pictures"
        if choices:
            yield _largest_that_fits(now, name, price, choices, shares)


def _largest_that_fits(
    now: Situation, name: str, price: str, choices: Sequence[int], shares: Sequence[float]
) -> Change:
    """In proportion to the tokens of a sample: so are activations. Attention is more than in proportion, so that the
    time is at most what is said."""

    def tried(number: int) -> Change:
        table = scaled(now.table, shares[number])
        told = f"{price}; at most that time"
        return _changed(now, f"{name}={choices[number]}", table, now.choice, told, exact=False, same_result=False)

    low, high = 0, len(choices)  # the first that fits, as choices fall
    while low < high:
        middle = (low + high) // 2
        if tried(middle).fits:
            high = middle
        else:
            low = middle + 1
    if low < len(choices):
        return tried(low)
    return tried(min(range(len(shares)), key=lambda number: abs(shares[number] - 0.5)))


def _adapter_instead(now: Situation) -> Change:
    """The trained weights as frozen ones in 16 bits; the adapter itself is small beside them and left out."""
    blocks = tuple(
        replace(
            block,
            frozen_bytes=block.frozen_bytes + block.trained_bytes // 2,
            trained_bytes=0,
            gradient_bytes=0,
            state_bytes=0,
        )
        for block in now.table.blocks
    )
    table = replace(now.table, blocks=blocks, idle_bytes=0, update_peak_bytes=0)
    price = "an adapter, not the weights"
    return _changed(now, "adapter.type=lora", table, now.choice, price, exact=False, timed=False, same_result=False)


def _with_state(block: Block, share: float) -> Block:
    return replace(block, state_bytes=round(block.state_bytes * share))


# ── other machines ───────────────────────────────────────────────────────────────────────────────────────────────────


def _machines(now: Situation) -> Iterator[Change]:
    """The smallest known machine that takes the run as it is; rather one that is not much slower."""
    need = max(now.peak_bytes, now.other_bytes)
    if now.room.gpu_bytes is None or now.fits:
        return
    if now.acts:
        yield from _by_a_plan(now)
        return
    fitting = [machine for machine in MACHINES.values() if _holds(machine, need, now.host_bytes)]
    times = {machine.key: _time_on(now, machine) for machine in fitting}
    quick = [machine for machine in fitting if (time := times[machine.key]) is not None and time <= NOT_MUCH_SLOWER]
    if chosen := quick or fitting:
        smallest = min(chosen, key=lambda machine: machine.gpu_bytes.value or 0)
        time = times[smallest.key]
        yield Change(f"--machine {smallest.key}", need, now.host_bytes, True, time, f"a {smallest.title}")


def _by_a_plan(now: Situation) -> Iterator[Change]:
    """The smallest known machine with two memories on which a plan fits."""
    for machine in sorted(MACHINES.values(), key=lambda one: one.gpu_bytes.value or 0):
        gpu, host = machine.gpu_bytes.value, machine.host_bytes.value
        if gpu is None or host is None or machine.one_pool or machine.key == now.room.machine.key:
            continue
        rates = Rates.of(machine, now.config.train.mixed_precision)
        limits = Limits(int(gpu * TIGHT_SHARE), max(0, int(host * HOST_SHARE) - now.host_bytes))
        plan = place(now.table, machine, limits, rates=rates)
        if plan.fits and now.other_bytes <= gpu:
            modelled, before = plan.modelled, now.seconds
            time = None if modelled is None or not before else modelled.seconds / before
            peak = None if modelled is None else max(modelled.gpu_peak_bytes, now.other_bytes)
            host_bytes = now.host_bytes + (0 if modelled is None else modelled.host_peak_bytes)
            price = f"a {machine.title}, {bytes_text(host_bytes)} of its host memory"
            yield Change(f"--machine {machine.key}", peak, host_bytes, True, time, price)
            return


def _time_on(now: Situation, machine: Machine) -> float | None:
    rates = Rates.of(machine, now.config.train.mixed_precision)
    if now.rates is None or rates.unknown:
        return None
    return plain_seconds(now.table, now.choice, rates) / plain_seconds(now.table, now.choice, now.rates)


def _holds(machine: Machine, gpu_bytes: int, host_bytes: int) -> bool:
    has = machine.gpu_bytes.value
    if has is None or machine.key in FORECAST_ONLY:
        return False
    return gpu_bytes + (host_bytes if machine.one_pool else 0) <= has


def _changed(
    now: Situation,
    what: str,
    table: StepTable,
    choice: Choice,
    price: str,
    *,
    exact: bool = True,
    timed: bool = True,
    same_result: bool = True,
) -> Change:
    """The table's difference, on top of what was traced; by a plan of its own, if the run follows plans."""
    limits, before = now.limits, now.seconds
    if now.acts and limits is not None:
        plan = place(table, now.room.machine, limits, rates=now.rates)
        modelled = plan.modelled
        peak = modelled.gpu_peak_bytes if modelled is not None else now.peak_bytes
        host = now.host_bytes + (0 if modelled is None else modelled.host_peak_bytes)
        fits = plan.fits and now.other_bytes <= limits.gpu_bytes
        time = modelled.seconds / before if timed and plan.fits and modelled is not None and before else None
        everything = now.peak_bytes + needed(table, choice) - needed(now.table, now.choice)
        size = max(peak if plan.fits else everything, now.other_bytes)
        return Change(what, size, host, fits, time, price, exact, same_result)
    peak = now.peak_bytes + needed(table, choice) - needed(now.table, now.choice)
    worst = max(peak, now.other_bytes)
    has = now.room.gpu_bytes
    time = None
    if timed and now.rates is not None and before:
        time = plain_seconds(table, choice, now.rates) / before
    fits = has is not None and worst + now.pooled_bytes <= has
    return Change(what, worst, now.host_bytes, fits, time, price, exact, same_result)
