"""The signal-to-noise ratio of every scheduler in diffusers: numbers or a reason, never an AttributeError."""

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

from supertuner.models.objective.snr import SCHEDULERS_WITHOUT_SNR, SNR_FORMULAS, NoSnr, scheduler_snr

LEVELS = torch.linspace(0.001, 0.999, 37)
NEEDED: dict[str, dict[str, Any]] = {
    "AmusedScheduler": {"mask_token_id": 0},
    "VQDiffusionScheduler": {"num_vec_classes": 4},
    "RFD4ProteinaScheduler": {"schedule_mode": "log", "noise_mode": "tan", "tsr_k": 1.0, "tsr_sigma": 1.0},
}
"""Required constructor arguments."""
NEED_OTHER_PACKAGES = {"CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler"}
"""Schedulers that cannot be imported without torchsde."""


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
WITH_TABLE = sorted(set(SHIPPED) - set(SNR_FORMULAS) - set(SCHEDULERS_WITHOUT_SNR))


def build_scheduler(name: str, **settings: Any) -> Any:
    with warnings.catch_warnings():  # some constructors warn about deprecations
        warnings.simplefilter("ignore")
        return SHIPPED[name](**NEEDED.get(name, {}), **settings)


def ratios(scheduler: object, levels: torch.Tensor = LEVELS) -> torch.Tensor:
    found = scheduler_snr(scheduler, levels)
    assert isinstance(found, torch.Tensor), found
    return found


def test_the_schedulers_of_diffusers_are_found() -> None:
    assert len(SHIPPED) > 40 and {"DDPMScheduler", "FlowMatchEulerDiscreteScheduler", "VQDiffusionScheduler"} <= set(
        SHIPPED
    )


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_scheduler_has_a_falling_snr_or_a_reason(name: str) -> None:
    found = scheduler_snr(build_scheduler(name), LEVELS)
    if isinstance(found, NoSnr):
        assert name in SCHEDULERS_WITHOUT_SNR and found.reason.startswith(f"{name}: ")
        return
    assert found.shape == LEVELS.shape and found.dtype == torch.float32
    assert found.isfinite().all() and (found >= 0).all() and (found.diff() <= 0).all()
    assert found[0] > 100 * found[-1]


def test_the_tables_name_only_existing_schedulers() -> None:
    assert set(SNR_FORMULAS) | set(SCHEDULERS_WITHOUT_SNR) <= set(SHIPPED) | NEED_OTHER_PACKAGES


@pytest.mark.parametrize("name", WITH_TABLE)
def test_the_snr_of_a_table_equals_that_of_diffusers(name: str) -> None:
    scheduler = build_scheduler(name)
    if name == "ConsistencyDecoderScheduler":
        return  # its table has a name that diffusers' function does not know
    count = len(scheduler.alphas_cumprod)
    timesteps = torch.arange(0, count, 13)
    torch.testing.assert_close(
        ratios(scheduler, (timesteps + 0.5) / count), compute_snr(scheduler, timesteps), rtol=2e-3, atol=1e-9
    )


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"])
def test_the_snr_of_flow_matches_the_noise_of_its_scheduler(name: str) -> None:
    scheduler = build_scheduler(name, shift=3.0)
    picked, one, none = [1, 300, 998], torch.ones(3, 1), torch.zeros(3, 1)
    signal = scheduler.scale_noise(one, scheduler.timesteps[picked], none)
    noise = scheduler.scale_noise(none, scheduler.timesteps[picked], one)
    found = ratios(scheduler, scheduler.sigmas[picked])
    torch.testing.assert_close(found, (signal / noise).square()[:, 0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
def test_a_solver_in_flow_mode_has_the_snr_of_flow(name: str) -> None:
    solver = build_scheduler(name, use_flow_sigmas=True, prediction_type="flow_prediction")
    assert torch.equal(ratios(solver), ratios(build_scheduler("FlowMatchEulerDiscreteScheduler")))
    assert not torch.equal(ratios(solver), ratios(build_scheduler(name)))


@pytest.mark.parametrize("name", ["EDMEulerScheduler", "CMStochasticIterativeScheduler", "ScoreSdeVeScheduler"])
def test_variance_exploding_schedulers_have_the_snr_of_their_own_sigmas(name: str) -> None:
    scheduler = build_scheduler(name)
    sigmas = scheduler.discrete_sigmas if name == "ScoreSdeVeScheduler" else scheduler.sigmas.flip(0)
    sigmas = sigmas[sigmas > 0].double().sort().values
    levels = torch.linspace(0, 1, len(sigmas), dtype=torch.float64)
    torch.testing.assert_close(ratios(scheduler, levels), (1 / sigmas.square()).float(), rtol=2e-3, atol=0)


def test_the_snr_of_wuerstchen_matches_its_scheduler() -> None:
    for scaler in (0.5, 1.0, 2.0):
        scheduler = build_scheduler("DDPMWuerstchenScheduler", scaler=scaler)
        signal = scheduler.add_noise(torch.ones(37, 1), torch.zeros(37, 1), LEVELS)
        noise = scheduler.add_noise(torch.zeros(37, 1), torch.ones(37, 1), LEVELS)
        torch.testing.assert_close(ratios(scheduler), (signal / noise).square()[:, 0], rtol=1e-3, atol=1e-9)


def test_the_snr_of_ipndm_matches_its_timesteps() -> None:
    scheduler = build_scheduler("IPNDMScheduler")
    alphas, sigmas = scheduler.alphas[1:-1], scheduler.betas[1:-1]
    torch.testing.assert_close(
        ratios(scheduler, scheduler.timesteps[1:]), (alphas / sigmas).square(), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("name", ["DDIMScheduler", "EDMEulerScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_set_timesteps_does_not_change_the_snr(name: str) -> None:
    scheduler = build_scheduler(name)
    before = ratios(scheduler)
    scheduler.set_timesteps(7)
    assert torch.equal(ratios(scheduler), before)


def test_a_subclass_is_treated_like_its_base_and_an_unknown_class_has_a_reason() -> None:
    own = type("MyScheduler", (SHIPPED["FlowMatchEulerDiscreteScheduler"],), {})()
    assert torch.equal(ratios(own), ratios(build_scheduler("FlowMatchEulerDiscreteScheduler")))
    stranger = scheduler_snr(object(), LEVELS)
    assert isinstance(stranger, NoSnr) and "object: it has no table" in stranger.reason
