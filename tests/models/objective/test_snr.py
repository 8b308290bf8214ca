"""The signal-to-noise ratio of the schedulers in diffusers that have a training table; none raises AttributeError."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from typing import Any

import diffusers.schedulers
import pytest
import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.training_utils import compute_snr

from supertuner.models.objective.snr import scheduler_alphas_cumprod, snr_from_alphas_cumprod

LEVELS = torch.linspace(0.001, 0.999, 37)
NEEDED: dict[str, dict[str, Any]] = {
    "AmusedScheduler": {"mask_token_id": 0},
    "VQDiffusionScheduler": {"num_vec_classes": 4},
    "RFD4ProteinaScheduler": {"schedule_mode": "log", "noise_mode": "tan", "tsr_k": 1.0, "tsr_sigma": 1.0},
}
"""Required constructor arguments."""


def shipped() -> dict[str, type]:
    """Every scheduler class in the modules of the installed diffusers."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(diffusers.schedulers.__path__, "diffusers.schedulers."):
        if module.name.endswith("_flax"):
            continue
        try:
            members = vars(importlib.import_module(module.name))
        except ImportError as error:
            assert "torchsde" in str(error), f"{module.name}: {error}"
            continue
        for name, one in members.items():
            if inspect.isclass(one) and issubclass(one, SchedulerMixin) and one is not SchedulerMixin:
                found[name] = one
    return found


SHIPPED = shipped()


def build_scheduler(name: str, **settings: Any) -> Any:
    with warnings.catch_warnings():  # some constructors warn about deprecations
        warnings.simplefilter("ignore")
        return SHIPPED[name](**NEEDED.get(name, {}), **settings)


def ratios(scheduler: object, levels: torch.Tensor = LEVELS) -> torch.Tensor:
    table = scheduler_alphas_cumprod(scheduler)
    assert table is not None
    return snr_from_alphas_cumprod(table, levels)


def test_the_schedulers_of_diffusers_are_found() -> None:
    assert len(SHIPPED) > 40 and {"DDPMScheduler", "EulerDiscreteScheduler", "VQDiffusionScheduler"} <= set(SHIPPED)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_scheduler_has_a_table_with_a_falling_snr_or_none(name: str) -> None:
    scheduler = build_scheduler(name)
    if scheduler_alphas_cumprod(scheduler) is None:
        assert not hasattr(scheduler, "alphas_cumprod") or scheduler.alphas_cumprod is None
        return
    found = ratios(scheduler)
    assert found.shape == LEVELS.shape and found.dtype == torch.float32
    assert found.isfinite().all() and (found >= 0).all() and (found.diff() <= 0).all()
    assert found[0] > 100 * found[-1]


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_snr_of_a_table_equals_that_of_diffusers(name: str) -> None:
    scheduler = build_scheduler(name)
    if getattr(scheduler, "alphas_cumprod", None) is None:
        return  # flow matching, or a table with a name that diffusers' function does not know
    count = len(scheduler.alphas_cumprod)
    timesteps = torch.arange(0, count, 13)
    torch.testing.assert_close(
        ratios(scheduler, (timesteps + 0.5) / count), compute_snr(scheduler, timesteps), rtol=2e-3, atol=1e-9
    )


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler"])
def test_set_timesteps_does_not_change_the_snr(name: str) -> None:
    scheduler = build_scheduler(name)
    before = ratios(scheduler)
    scheduler.set_timesteps(7)
    assert torch.equal(ratios(scheduler), before)


def test_an_object_that_is_no_scheduler_has_no_table() -> None:
    assert scheduler_alphas_cumprod(object()) is None
