"""Single changes that would make a run fit, or make it faster, with the cost of each: evaluated from one step table.
Pure.

Changes of placement and recomputation are evaluated block by block. Changes of sizes (batch, frames, number formats)
are scaled from the trace of the current settings, and marked as not exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from supertuner.core.types import MediaKind, bytes_text
from supertuner.memory.machines import MACHINES, ONE_POOL_SHARE, MachineSpec
from supertuner.plan.forecast.results import HOST_SHARE, TIGHT_SHARE, SuggestedChange
from supertuner.plan.forecast.suggestion_baseline import SuggestionBaseline, configured_choice, seconds_without_plan
from supertuner.plan.placement.choice import PlacementChoice, TimedStep
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.memory_needs import compute_memory_needs
from supertuner.plan.placement.step_table import BlockCosts, OperatorWork, StepTable
from supertuner.plan.placement.throughput import MachineRates, MemoryLimits

ADAMW_8BIT_STATE_SHARE = 0.25
"""State of 8-bit AdamW relative to fp32 moments: one byte instead of four; the scales of its blocks are left out."""
MAX_SUGGESTIONS = 8
MAX_SLOWDOWN = 1.2
"""A suggested machine takes at most this many times as long, if there is such a machine."""
FASTER_THAN = 0.99
"""A change counts as faster if the time is below this share of the current time."""
FORECAST_ONLY_MACHINES = ("mi300a",)
"""Machines that can be forecast but not trained on: they are not suggested."""

PLACEHOLDER_RATES = MachineRates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, one_pool=False)
"""For memory needs, which do not depend on rates."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A change to evaluate: the step table after it, and what it costs."""

    what: str
    table: StepTable
    price: str
    choice: PlacementChoice | None = None
    """How the step runs without a plan; None: as configured."""
    exact: bool = True
    timed: bool = True
    """False: the table does not tell how long the changed step takes."""
    same_result: bool = True


def suggest_changes(baseline: SuggestionBaseline) -> tuple[SuggestedChange, ...]:
    """The best changes first.

    If the run does not fit: changes that make it fit or reduce its memory. If it fits: changes that make it faster and
    leave the training result unchanged.
    """
    changes = [*_placement_changes(baseline), *_size_changes(baseline), *_machine_changes(baseline)]
    worst = max(baseline.peak_bytes, baseline.other_phases_bytes)
    if baseline.fits:
        helpful = [one for one in changes if one.fits and one.same_result and one.time and one.time < FASTER_THAN]
    else:
        helpful = [one for one in changes if one.fits or (one.gpu_bytes is not None and one.gpu_bytes < worst)]
    return tuple(sorted(helpful, key=_rank)[:MAX_SUGGESTIONS])


def _rank(change: SuggestedChange) -> tuple[bool, bool, bool, float, int]:
    """Sorts by: it fits; the result stays the same; its time is known; time; memory."""
    time = 0.0 if change.time is None else round(change.time, 3)
    return not change.fits, not change.same_result, change.time is None, time, change.gpu_bytes or 0


# ── placement and recomputation ──────────────────────────────────────────────────────────────────────────────────────


def _placement_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    """A run that follows a plan already has the best placement: for it, only experts and overflow remain."""
    config, table = baseline.config, baseline.table
    if table.idle_bytes:
        price = f"one expert at a time: {len(baseline.experts)} runs"
        candidate = _Candidate(f"model.experts={baseline.experts[0]}", replace(table, idle_bytes=0), price)
        yield _evaluate(baseline, candidate)
    gpu_bytes = baseline.capacity.gpu_bytes
    if not config.memory.overflow.enabled and not baseline.capacity.one_pool and gpu_bytes is not None:
        yield from _overflow_change(baseline, gpu_bytes)
    if baseline.follows_plans:
        return
    checkpointing = not config.train.gradient_checkpointing
    price = "each block's forward pass twice" if checkpointing else "activations are kept"
    choice = configured_choice(table, checkpointing=checkpointing)
    setting = f"train.gradient_checkpointing={str(checkpointing).lower()}"
    yield _evaluate(baseline, _Candidate(setting, table, price, choice))
    if baseline.plan is not None and baseline.plan.fits and baseline.plan.modelled is not None:
        modelled, before = baseline.plan.modelled, baseline.window_seconds
        time = None if before is None else modelled.seconds / before
        price = f"{bytes_text(modelled.host_peak_bytes)} of host memory"
        if baseline.capacity.one_pool:
            price = "only as many blocks as needed are recomputed"
        host = baseline.host_bytes + modelled.host_peak_bytes
        yield SuggestedChange("plan.act=auto", modelled.gpu_bytes, host, True, time, price)


def _overflow_change(baseline: SuggestionBaseline, limit: int) -> Iterator[SuggestedChange]:
    """What does not fit is placed in managed memory. Each of its bytes crosses the link at least once in each direction
    per micro-batch."""
    overflow_bytes = baseline.peak_bytes - limit
    if overflow_bytes <= 0:
        return
    host = baseline.host_bytes + overflow_bytes
    fits = baseline.capacity.host_bytes is not None and host <= baseline.capacity.host_bytes
    time, rates = None, baseline.rates
    if rates is not None and rates.to_device_bytes_s and rates.to_host_bytes_s:
        transfer_s = rates.round_trip_s(overflow_bytes)
        plain_s = seconds_without_plan(baseline.table, baseline.choice, rates)
        time = (plain_s + baseline.table.micro_batches * transfer_s) / (baseline.window_seconds or plain_s)
    price = "at least that time: pages are fetched on demand"
    yield SuggestedChange("memory.overflow.enabled=true", limit, host, fits, time, price)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _size_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    config, table = baseline.config, baseline.table
    kind, batch = config.adapter.type, config.train.batch_size
    if kind not in ("full", "diff") and not config.adapter.dora and config.model.base_weights == "as_computed":
        yield _evaluate(baseline, _int8_candidate(table))
    if config.optimizer.name == "adamw":
        yield _evaluate(baseline, _adamw8bit_candidate(table))
    if batch > 1:
        accumulation = config.train.gradient_accumulation_steps * batch
        settings = f"train.batch_size=1 train.gradient_accumulation_steps={accumulation}"
        changed = replace(scale_tokens(table, 1 / batch), micro_batches=table.micro_batches * batch)
        price = "the same window in smaller micro-batches"
        yield _evaluate(baseline, _Candidate(settings, changed, price, exact=False))
    yield from _smaller_sample_changes(baseline)
    if kind == "full":
        yield _evaluate(baseline, _adapter_candidate(table))


def _adamw8bit_candidate(table: StepTable) -> _Candidate:
    share = ADAMW_8BIT_STATE_SHARE
    blocks = tuple(replace(block, state_bytes=round(block.state_bytes * share)) for block in table.blocks)
    price, changed = "8-bit moments: its steps differ from AdamW's", replace(table, blocks=blocks)
    return _Candidate("optimizer.name=adamw8bit", changed, price, exact=False, same_result=False)


def _int8_candidate(table: StepTable) -> _Candidate:
    blocks = tuple(replace(block, frozen_bytes=block.frozen_bytes // 2) for block in table.blocks)
    changed = replace(table, blocks=blocks, idle_bytes=table.idle_bytes // 2)
    price = "8-bit weights, unpacked at every use: slower, and slightly less precise"
    return _Candidate("model.base_weights=int8", changed, price, exact=False, timed=False, same_result=False)


def _adapter_candidate(table: StepTable) -> _Candidate:
    """The trained weights become frozen 16-bit weights; the adapter is small compared with them and left out."""

    def freeze(block: BlockCosts) -> BlockCosts:
        frozen_bytes = block.frozen_bytes + block.trained_bytes // 2
        return replace(block, frozen_bytes=frozen_bytes, trained_bytes=0, gradient_bytes=0, state_bytes=0)

    changed = replace(table, blocks=tuple(map(freeze, table.blocks)), idle_bytes=0, update_peak_bytes=0)
    price = "trains an adapter, not the weights"
    return _Candidate("adapter.type=lora", changed, price, exact=False, timed=False, same_result=False)


def _smaller_sample_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    """For each dataset: the largest number of frames, or the largest resolution, that fits; if none fits, about
    half."""
    for number, dataset in enumerate(baseline.config.datasets):
        if dataset.held_out or baseline.capacity.gpu_bytes is None:
            continue
        is_video = dataset.dataset_type is MediaKind.VIDEO and max(dataset.frames) > 1
        if is_video:
            current = max(dataset.frames)
            counts = [count for count in range(current - 4, 0, -4) if count % 4 == 1] or [1]
            shares = {f"frames={count}": ((count - 1) // 4 + 1) / ((current - 1) // 4 + 1) for count in counts}
        else:
            current = max(dataset.resolution)
            step = max(64, dataset.bucket_step)
            sides = range(current - step, step - 1, -step)
            shares = {f"resolution={side}": (side / current) ** 2 for side in sides}
        if shares:
            price = "shorter clips" if is_video else "smaller images"
            named = {f"datasets[{number}].{setting}": share for setting, share in shares.items()}
            yield _largest_that_fits(baseline, price, named)


def _largest_that_fits(baseline: SuggestionBaseline, price: str, shares: Mapping[str, float]) -> SuggestedChange:
    """`shares`: changes of a setting → tokens of a sample relative to now, which decrease.

    Memory and time are scaled in proportion to the tokens. Attention grows faster than that, so the real time is at
    most the one shown.
    """

    def change_to(setting: str) -> SuggestedChange:
        table, explained = scale_tokens(baseline.table, shares[setting]), f"{price}; at most that time"
        return _evaluate(baseline, _Candidate(setting, table, explained, exact=False, same_result=False))

    settings = list(shares)
    first = bisect_left(settings, True, key=lambda setting: change_to(setting).fits)
    return change_to(settings[first] if first < len(settings) else min(shares, key=lambda one: abs(shares[one] - 0.5)))


# ── other machines ───────────────────────────────────────────────────────────────────────────────────────────────────


def _machine_changes(baseline: SuggestionBaseline) -> Iterator[SuggestedChange]:
    """The smallest known machine that the run fits; one that is not much slower if there is one."""
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
    """The smallest known machine with separate GPU and host memory on which a plan fits."""
    for machine in sorted(MACHINES.values(), key=lambda one: one.gpu_bytes.value or 0):
        gpu, host = machine.gpu_bytes.value, machine.host_bytes.value
        if gpu is None or host is None or machine.one_pool or machine.key == baseline.capacity.machine.key:
            continue
        rates = MachineRates.from_machine(machine, baseline.config.train.mixed_precision)
        live_bytes = max(0, int(gpu * TIGHT_SHARE) - baseline.plan_gap_bytes)
        limits = MemoryLimits(live_bytes, max(0, int(host * HOST_SHARE) - baseline.host_bytes))
        plan = make_plan(baseline.table, machine, limits, rates=rates)
        if plan.fits and baseline.other_phases_bytes <= gpu:
            modelled, before = plan.modelled, baseline.window_seconds
            time = None if modelled is None or not before else modelled.seconds / before
            live = None if modelled is None else modelled.gpu_peak_bytes + baseline.plan_gap_bytes
            peak = None if live is None else max(live, baseline.other_phases_bytes)
            host_bytes = baseline.host_bytes + (0 if modelled is None else modelled.host_peak_bytes)
            price = f"a {machine.title}, {bytes_text(host_bytes)} of its host memory"
            yield SuggestedChange(f"--machine {machine.key}", peak, host_bytes, True, time, price)
            return


def _relative_time_on(baseline: SuggestionBaseline, machine: MachineSpec) -> float | None:
    rates = MachineRates.from_machine(machine, baseline.config.train.mixed_precision)
    if baseline.rates is None or rates.unknown_rates:
        return None
    before = seconds_without_plan(baseline.table, baseline.choice, baseline.rates)
    return seconds_without_plan(baseline.table, baseline.choice, rates) / before


def _machine_holds(machine: MachineSpec, gpu_bytes: int, host_bytes: int) -> bool:
    has = machine.gpu_bytes.value
    if has is None or machine.key in FORECAST_ONLY_MACHINES:
        return False
    return gpu_bytes <= has * ONE_POOL_SHARE - host_bytes if machine.one_pool else gpu_bytes <= has


def _evaluate(baseline: SuggestionBaseline, candidate: _Candidate) -> SuggestedChange:
    """The effect of a change: under a plan of its own if the run follows plans, otherwise with everything on the GPU.

    Without a plan, the difference of the tables' needs is added to the traced peak.
    """
    table, choice, exact = candidate.table, candidate.choice or baseline.choice, candidate.exact
    limits, before, has = baseline.live_limits, baseline.window_seconds, baseline.capacity.gpu_limit_bytes
    peak = baseline.peak_bytes + _gpu_bytes_needed(table, choice) - _gpu_bytes_needed(baseline.table, baseline.choice)
    host, time = baseline.host_bytes, None
    if baseline.follows_plans and limits is not None:
        plan = make_plan(table, baseline.capacity.machine, limits, rates=baseline.rates)
        fits = plan.fits and baseline.other_phases_bytes <= limits.gpu_bytes
        if plan.fits:
            peak = baseline.peak_bytes
            if plan.modelled is not None:
                peak = plan.modelled.gpu_peak_bytes + baseline.plan_gap_bytes
        if plan.modelled is not None:
            host += plan.modelled.host_peak_bytes
            if candidate.timed and plan.fits and before:
                time = plan.modelled.seconds / before
        worst = max(peak, baseline.other_phases_bytes)
    else:
        worst = max(peak, baseline.other_phases_bytes)
        fits = has is not None and worst + baseline.host_bytes_in_pool <= has
        if candidate.timed and baseline.rates is not None and before:
            time = seconds_without_plan(table, choice, baseline.rates) / before
    return SuggestedChange(candidate.what, worst, host, fits, time, candidate.price, exact, candidate.same_result)


def _gpu_bytes_needed(table: StepTable, choice: PlacementChoice) -> int:
    return compute_memory_needs(TimedStep.from_table(table, PLACEHOLDER_RATES), choice).gpu_bytes


def scale_tokens(table: StepTable, factor: float) -> StepTable:
    """The step with `factor` times the tokens: activations, temporaries and work are scaled in proportion."""
    blocks = tuple(_scale_block(block, factor) for block in table.blocks)
    return replace(table, blocks=blocks, batch_bytes=round(table.batch_bytes * factor))


def _scale_block(block: BlockCosts, factor: float) -> BlockCosts:
    return replace(
        block,
        saved_bytes=round(block.saved_bytes * factor),
        input_bytes=round(block.input_bytes * factor),
        forward_peak_bytes=round(block.forward_peak_bytes * factor),
        backward_peak_bytes=round(block.backward_peak_bytes * factor),
        forward=_scale_work(block.forward, factor),
        backward=_scale_work(block.backward, factor),
    )


def _scale_work(work: OperatorWork, factor: float) -> OperatorWork:
    return OperatorWork(work.matmul_flops * factor, work.other_flops * factor, work.gpu_bytes * factor, work.operators)
