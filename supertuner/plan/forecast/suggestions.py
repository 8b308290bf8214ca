"""Single changes that would make a run fit, or make it faster, and what each would cost: from one table. Pure.

Changes of where things live and of what is done again are worked out block by block. Changes of sizes (batch, frames,
number formats) are scaled from the trace of the settings as they are, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from supertuner.core.types import MediaKind, bytes_text
from supertuner.memory.machines import MACHINES, MachineSpec
from supertuner.plan.forecast.results import HOST_SHARE, TIGHT_SHARE, SuggestedChange
from supertuner.plan.forecast.suggestion_baseline import (
    SuggestionBaseline,
    configured_choice,
    gpu_bytes_needed,
    scale_tokens,
    window_seconds_without_plan,
)
from supertuner.plan.placement.choice import PlacementChoice
from supertuner.plan.placement.plan_step import plan_step
from supertuner.plan.placement.step_table import BlockCosts, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

ADAMW_8BIT_STATE_SHARE = 0.25
"""Of AdamW's fp32 moments: one byte for each of four, blocks' scales left out."""
MAX_SUGGESTIONS = 8
MAX_SLOWDOWN = 1.2
FASTER_THAN = 0.99
FORECAST_ONLY_MACHINES = ("mi300a",)
"""Machines that have no driver here: nobody is sent to them."""


def suggest_changes(baseline: SuggestionBaseline) -> tuple[SuggestedChange, ...]:
    """The best first. Of a run that does not fit, those that fit or need less; of one that fits, those that make it
    faster and change nothing else."""
    candidates = [*_placement_changes(baseline), *_size_changes(baseline), *_machine_changes(baseline)]
    worst = max(baseline.peak_bytes, baseline.other_phases_bytes)
    if baseline.fits:
        helpful = [one for one in candidates if one.fits and one.same_result and one.time and one.time < FASTER_THAN]
    else:
        helpful = [one for one in candidates if one.fits or (one.gpu_bytes is not None and one.gpu_bytes < worst)]
    return tuple(sorted(helpful, key=_rank)[:MAX_SUGGESTIONS])


def _rank(change: SuggestedChange) -> tuple[bool, bool, bool, float, int]:
    """What fits; of that, what changes time and memory alone; of that, the quickest; of that, the smallest."""
    time = 0.0 if change.time is None else round(change.time, 3)
    return not change.fits, not change.same_result, change.time is None, time, change.gpu_bytes or 0


# ── where things live, and what is done again ────────────────────────────────────────────────────────────────────────


def _placement_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    """A run that follows a plan has the best of these already."""
    config, table = baseline.config, baseline.table
    if table.idle_bytes:
        one_expert_table = replace(table, idle_bytes=0)
        yield _evaluate_change(
            baseline, "model.experts=high_noise", one_expert_table, baseline.choice, "one expert at a time: two runs"
        )
    if (
        not config.memory.overflow.enabled
        and not baseline.capacity.one_pool
        and baseline.capacity.gpu_bytes is not None
    ):
        yield from _overflow_change(baseline, baseline.capacity.gpu_bytes)
    if baseline.follows_plans:
        return
    checkpointing = not config.train.gradient_checkpointing
    price = "each block's forward pass twice" if checkpointing else "activations are kept"
    choice = configured_choice(table, checkpointing=checkpointing)
    yield _evaluate_change(baseline, f"train.gradient_checkpointing={str(checkpointing).lower()}", table, choice, price)
    if baseline.plan is not None and baseline.plan.fits and baseline.plan.modelled is not None:
        modelled, before = baseline.plan.modelled, baseline.window_seconds
        time = None if before is None else modelled.seconds / before
        price = f"{bytes_text(modelled.host_peak_bytes)} of host memory"
        host = baseline.host_bytes + modelled.host_peak_bytes
        yield SuggestedChange("plan.act=auto", modelled.gpu_peak_bytes, host, True, time, price)


def _overflow_change(baseline: SuggestionBaseline, limit: int) -> Iterator[SuggestedChange]:
    """What does not fit lies in managed memory. Every byte of it crosses the link at least once each way in a step."""
    overflow_bytes = baseline.peak_bytes - limit
    if overflow_bytes <= 0:
        return
    host = baseline.host_bytes + overflow_bytes
    fits = baseline.capacity.host_bytes is not None and host <= baseline.capacity.host_bytes
    time = None
    if baseline.rates is not None and baseline.rates.to_device_bytes_s and baseline.rates.to_host_bytes_s:
        transfer_s = overflow_bytes / baseline.rates.to_device_bytes_s + overflow_bytes / baseline.rates.to_host_bytes_s
        plain_s = window_seconds_without_plan(baseline.table, baseline.choice, baseline.rates)
        time = (plain_s + baseline.table.micro_batches * transfer_s) / (baseline.window_seconds or plain_s)
    yield SuggestedChange(
        "memory.overflow.enabled=true", limit, host, fits, time, "at least that: pages are fetched on demand"
    )


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _size_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    config, table = baseline.config, baseline.table
    kind = config.adapter.type
    if kind not in ("full", "diff") and not config.adapter.dora and config.model.base_weights == "as_computed":
        int8_table = replace(
            table,
            blocks=tuple(replace(block, frozen_bytes=block.frozen_bytes // 2) for block in table.blocks),
            idle_bytes=table.idle_bytes // 2,
        )
        price = "weights of 8 bits, unpacked at every use: slower, and a little coarser"
        yield _evaluate_change(
            baseline,
            "model.base_weights=int8",
            int8_table,
            baseline.choice,
            price,
            exact=False,
            timed=False,
            same_result=False,
        )
    if config.optimizer.name == "adamw":
        adamw8bit_table = replace(
            table, blocks=tuple(_scale_state(block, ADAMW_8BIT_STATE_SHARE) for block in table.blocks)
        )
        price = "moments of 8 bits: other steps than AdamW's"
        yield _evaluate_change(
            baseline,
            "optimizer.name=adamw8bit",
            adamw8bit_table,
            baseline.choice,
            price,
            exact=False,
            same_result=False,
        )
    batch = config.train.batch_size
    if batch > 1:
        single_sample_table = scale_tokens(table, 1 / batch)
        accumulated_table = replace(single_sample_table, micro_batches=table.micro_batches * batch)
        sets = (
            f"train.batch_size=1 train.gradient_accumulation_steps={config.train.gradient_accumulation_steps * batch}"
        )
        yield _evaluate_change(
            baseline, sets, accumulated_table, baseline.choice, "the same window in smaller pieces", exact=False
        )
    yield from _smaller_sample_changes(baseline)
    if kind == "full":
        yield _adapter_change(baseline)


def _smaller_sample_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    """Of the dataset with the largest samples: as many frames, or as large a side, as fits. Half, if nothing does."""
    for number, dataset in enumerate(baseline.config.datasets):
        if dataset.held_out or baseline.capacity.gpu_bytes is None:
            continue
        if dataset.dataset_type is MediaKind.VIDEO and max(dataset.frames) > 1:
            current = max(dataset.frames)
            choices = [count for count in range(current - 4, 0, -4) if count % 4 == 1] or [1]
            shares = [((count - 1) // 4 + 1) / ((current - 1) // 4 + 1) for count in choices]
            name, price = f"datasets[{number}].frames", "shorter clips"
        else:
            current = max(dataset.resolution)
            step = max(64, dataset.bucket_step)
            choices = list(range(current - step, step - 1, -step))
            shares = [(side / current) ** 2 for side in choices]
            name, price = f"datasets[{number}].resolution", "smaller pictures"
        if choices:
            yield _largest_that_fits(baseline, name, price, choices, shares)


def _largest_that_fits(
    baseline: SuggestionBaseline, name: str, price: str, choices: Sequence[int], shares: Sequence[float]
) -> SuggestedChange:
    """In proportion to the tokens of a sample: so are activations. Attention is more than in proportion, so that the
    time is at most what is said."""

    def change_to(number: int) -> SuggestedChange:
        table = scale_tokens(baseline.table, shares[number])
        told = f"{price}; at most that time"
        return _evaluate_change(
            baseline, f"{name}={choices[number]}", table, baseline.choice, told, exact=False, same_result=False
        )

    low, high = 0, len(choices)  # the first that fits, as choices fall
    while low < high:
        middle = (low + high) // 2
        if change_to(middle).fits:
            high = middle
        else:
            low = middle + 1
    if low < len(choices):
        return change_to(low)
    return change_to(min(range(len(shares)), key=lambda number: abs(shares[number] - 0.5)))


def _adapter_change(baseline: SuggestionBaseline) -> SuggestedChange:
    """The trained weights as frozen ones in 16 bits; the adapter itself is small beside them and left out."""
    blocks = tuple(
        replace(
            block,
            frozen_bytes=block.frozen_bytes + block.trained_bytes // 2,
            trained_bytes=0,
            gradient_bytes=0,
            state_bytes=0,
        )
        for block in baseline.table.blocks
    )
    table = replace(baseline.table, blocks=blocks, idle_bytes=0, update_peak_bytes=0)
    price = "an adapter, not the weights"
    return _evaluate_change(
        baseline, "adapter.type=lora", table, baseline.choice, price, exact=False, timed=False, same_result=False
    )


def _scale_state(block: BlockCosts, share: float) -> BlockCosts:
    return replace(block, state_bytes=round(block.state_bytes * share))


# ── other machines ───────────────────────────────────────────────────────────────────────────────────────────────────


def _machine_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    """The smallest known machine that takes the run as it is; rather one that is not much slower."""
    need = max(baseline.peak_bytes, baseline.other_phases_bytes)
    if baseline.capacity.gpu_bytes is None or baseline.fits:
        return
    if baseline.follows_plans:
        yield from _machine_change_with_plan(baseline)
        return
    large_enough = [machine for machine in MACHINES.values() if _machine_holds(machine, need, baseline.host_bytes)]
    times = {machine.key: _relative_time_on(baseline, machine) for machine in large_enough}
    quick = [machine for machine in large_enough if (time := times[machine.key]) is not None and time <= MAX_SLOWDOWN]
    if candidates := quick or large_enough:
        smallest = min(candidates, key=lambda machine: machine.gpu_bytes.value or 0)
        time = times[smallest.key]
        yield SuggestedChange(f"--machine {smallest.key}", need, baseline.host_bytes, True, time, f"a {smallest.title}")


def _machine_change_with_plan(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    """The smallest known machine with two memories on which a plan fits."""
    for machine in sorted(MACHINES.values(), key=lambda one: one.gpu_bytes.value or 0):
        gpu, host = machine.gpu_bytes.value, machine.host_bytes.value
        if gpu is None or host is None or machine.one_pool or machine.key == baseline.capacity.machine.key:
            continue
        rates = MachineRates.from_machine(machine, baseline.config.train.mixed_precision)
        limits = MemoryLimits(int(gpu * TIGHT_SHARE), max(0, int(host * HOST_SHARE) - baseline.host_bytes))
        plan = plan_step(baseline.table, machine, limits, rates=rates)
        if plan.fits and baseline.other_phases_bytes <= gpu:
            modelled, before = plan.modelled, baseline.window_seconds
            time = None if modelled is None or not before else modelled.seconds / before
            peak = None if modelled is None else max(modelled.gpu_peak_bytes, baseline.other_phases_bytes)
            host_bytes = baseline.host_bytes + (0 if modelled is None else modelled.host_peak_bytes)
            price = f"a {machine.title}, {bytes_text(host_bytes)} of its host memory"
            yield SuggestedChange(f"--machine {machine.key}", peak, host_bytes, True, time, price)
            return


def _relative_time_on(baseline: SuggestionBaseline, machine: MachineSpec) -> float | None:
    rates = MachineRates.from_machine(machine, baseline.config.train.mixed_precision)
    if baseline.rates is None or rates.unknown_rates:
        return None
    return window_seconds_without_plan(baseline.table, baseline.choice, rates) / window_seconds_without_plan(
        baseline.table, baseline.choice, baseline.rates
    )


def _machine_holds(machine: MachineSpec, gpu_bytes: int, host_bytes: int) -> bool:
    has = machine.gpu_bytes.value
    if has is None or machine.key in FORECAST_ONLY_MACHINES:
        return False
    return gpu_bytes + (host_bytes if machine.one_pool else 0) <= has


def _evaluate_change(
    baseline: SuggestionBaseline,
    what: str,
    table: StepTable,
    choice: PlacementChoice,
    price: str,
    *,
    exact: bool = True,
    timed: bool = True,
    same_result: bool = True,
) -> SuggestedChange:
    """The table's difference, on top of what was traced; by a plan of its own, if the run follows plans."""
    limits, before = baseline.limits, baseline.window_seconds
    if baseline.follows_plans and limits is not None:
        plan = plan_step(table, baseline.capacity.machine, limits, rates=baseline.rates)
        modelled = plan.modelled
        peak = modelled.gpu_peak_bytes if modelled is not None else baseline.peak_bytes
        host = baseline.host_bytes + (0 if modelled is None else modelled.host_peak_bytes)
        fits = plan.fits and baseline.other_phases_bytes <= limits.gpu_bytes
        time = modelled.seconds / before if timed and plan.fits and modelled is not None and before else None
        all_on_gpu_bytes = (
            baseline.peak_bytes + gpu_bytes_needed(table, choice) - gpu_bytes_needed(baseline.table, baseline.choice)
        )
        size = max(peak if plan.fits else all_on_gpu_bytes, baseline.other_phases_bytes)
        return SuggestedChange(what, size, host, fits, time, price, exact, same_result)
    peak = baseline.peak_bytes + gpu_bytes_needed(table, choice) - gpu_bytes_needed(baseline.table, baseline.choice)
    worst = max(peak, baseline.other_phases_bytes)
    has = baseline.capacity.gpu_bytes
    time = None
    if timed and baseline.rates is not None and before:
        time = window_seconds_without_plan(table, choice, baseline.rates) / before
    fits = has is not None and worst + baseline.host_bytes_in_pool <= has
    return SuggestedChange(what, worst, baseline.host_bytes, fits, time, price, exact, same_result)
