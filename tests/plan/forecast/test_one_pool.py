"""Machines whose CPU and GPU share one memory: how much a run may take, and that nothing is offloaded."""

from __future__ import annotations

import pytest

from supertuner.config.settings.plan import PlanSettings
from supertuner.core.types import GIB
from supertuner.memory.machines import MACHINES, ONE_POOL_SHARE
from supertuner.plan.forecast.results import FitStatus, capacity_text, verdict_text
from supertuner.plan.forecast.storage import StorageItem
from supertuner.plan.forecast.suggestions import suggest_changes
from supertuner.plan.forecast.target_machine import known_machine_capacity
from supertuner.plan.placement.make_plan import make_plan
from supertuner.plan.placement.run_plans import plan_settings_on_machine
from supertuner.plan.placement.throughput import MemoryLimits
from tests.plan.making_forecasts import a_baseline, a_capacity, a_forecast, a_phase, a_table

GB10 = MACHINES["gb10"]
OFFLOADING = {"weights": "streamed", "activations": "send", "optimizer": "host", "idle_experts": "host"}


def test_a_gb10_has_the_memory_that_programs_can_use_not_the_nameplate() -> None:
    capacity = known_machine_capacity("gb10")
    assert capacity.gpu_bytes == capacity.host_bytes == 119 * GIB
    assert GB10.gpu_bytes.origin == "measured by others" and "1358" in GB10.gpu_bytes.source
    assert capacity.gpu_limit_bytes == int(ONE_POOL_SHARE * 119 * GIB)
    assert "one pool of 119 GiB, of which a run may take 107 GiB" in capacity_text(capacity)


def test_a_run_that_would_leave_a_pool_nearly_full_does_not_fit() -> None:
    """A GPU of that size would hold it; a full pool stops the whole machine."""
    pool = a_forecast(a_phase(gpu_gib=110), capacity=a_capacity("gb10"), stored=())
    separate = a_forecast(a_phase(gpu_gib=110), capacity=a_capacity("gh200-144", 119), stored=())
    assert pool.verdict.fit is FitStatus.DOES_NOT_FIT and pool.fits is False
    assert "of the 107 GiB of the pool that a run may take" in verdict_text(pool)
    assert separate.verdict.fit is FitStatus.FITS


def test_host_memory_and_gpu_memory_of_a_pool_add_up() -> None:
    caches = (StorageItem("cache of latents", "memory", 30 * GIB, "many"),)
    together = a_forecast(a_phase(gpu_gib=80, host={"pinned": 5 * GIB}), capacity=a_capacity("gb10"), stored=caches)
    assert together.verdict.need_bytes == 115 * GIB and together.fits is False


def test_both_experts_count_in_the_pool_and_none_goes_to_host_memory() -> None:
    table = a_table(frozen=5, saved=8, idle=20)
    plan = make_plan(table, GB10, MemoryLimits(100 * GIB, 100 * GIB))
    assert plan.fits and not plan.idle_at_home and plan.modelled is not None
    assert plan.modelled.gpu_peak_bytes > 40 * GIB and plan.modelled.host_peak_bytes == 0
    assert not make_plan(table, GB10, MemoryLimits(30 * GIB, 100 * GIB)).fits


@pytest.mark.parametrize(("name", "value"), OFFLOADING.items())
def test_settings_that_offload_have_no_effect_on_a_pool_and_say_why(name: str, value: str) -> None:
    settings = PlanSettings.model_validate({name: value, "ahead": 2})
    used, messages = plan_settings_on_machine(settings, one_pool=True)
    assert used.explicit_choices == {} and used.ahead == 2
    assert len(messages) == 1 and f'plan.{name}: "{value}" has no effect' in messages[0]
    assert "share one memory" in messages[0]
    assert plan_settings_on_machine(settings, one_pool=False) == (settings, ())


def test_settings_that_offload_nothing_are_kept_on_a_pool() -> None:
    settings = PlanSettings.model_validate({"activations": "recompute", "idle_experts": "gpu"})
    assert plan_settings_on_machine(settings, one_pool=True) == (settings, ())


def test_nothing_that_offloads_is_suggested_for_a_pool() -> None:
    baseline = a_baseline(a_table(frozen=20, saved=20, idle=60), a_capacity("gb10"))
    suggested = [change.what for change in suggest_changes(baseline)]
    assert suggested
    assert not [what for what in suggested if "overflow" in what or "offload" in what or "host" in what]
