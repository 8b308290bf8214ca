"""The signal-to-noise ratio under every scheduler that diffusers ships: numbers or a reason, no AttributeError."""

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
"""What cannot be left out when these are made."""
NEED_OTHER_PACKAGES = {"CosineDPMSolverMultistepScheduler", "DPMSolverSDEScheduler"}
"""Not importable without torchsde, which nothing here needs."""


def shipped() -> dict[str, type]:
    """Every scheduler of the installed diffusers, found in its modules and not in its list of names."""
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


def made(name: str, **settings: Any) -> Any:
    with warnings.catch_warnings():  # some say at birth that they are old, or that a default will change
        warnings.simplefilter("ignore")
        return SHIPPED[name](**NEEDED.get(name, {}), **settings)


def ratios(scheduler: object, levels: torch.Tensor = LEVELS) -> torch.Tensor:
    found = scheduler_snr(scheduler, levels)
    assert isinstance(found, torch.Tensor), found
    return found


def test_diffusers_schedulers_are_really_found() -> None:
    assert len(SHIPPED) > 40 and {"DDPMScheduler", "FlowMatchEulerDiscreteScheduler", "VQDiffusionScheduler"} <= set(
        SHIPPED
    )


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_scheduler_has_ratios_that_fall_as_noise_grows_or_a_reason(name: str) -> None:
    found = scheduler_snr(made(name), LEVELS)
    if isinstance(found, NoSnr):
        assert name in SCHEDULERS_WITHOUT_SNR and found.reason.startswith(f"{name}: ")
        return
    assert found.shape == LEVELS.shape and found.dtype == torch.float32
    assert found.isfinite().all() and (found >= 0).all() and (found.diff() <= 0).all()
    assert found[0] > 100 * found[-1]


def test_the_tables_name_no_scheduler_that_is_not_there() -> None:
    assert set(SNR_FORMULAS) | set(SCHEDULERS_WITHOUT_SNR) <= set(SHIPPED) | NEED_OTHER_PACKAGES


@pytest.mark.parametrize("name", WITH_TABLE)
def test_a_table_gives_what_diffusers_computes_from_it(name: str) -> None:
    scheduler = made(name)
    if name == "ConsistencyDecoderScheduler":
        return  # its table has another name, which diffusers' function does not know
    count = len(scheduler.alphas_cumprod)
    timesteps = torch.arange(0, count, 13)
    torch.testing.assert_close(
        ratios(scheduler, (timesteps + 0.5) / count), compute_snr(scheduler, timesteps), rtol=2e-3, atol=1e-9
    )


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"])
def test_the_ratio_of_a_flow_is_that_of_what_its_scheduler_mixes(name: str) -> None:
    scheduler = made(name, shift=3.0)
    picked, one, none = [1, 300, 998], torch.ones(3, 1), torch.zeros(3, 1)
    signal = scheduler.scale_noise(one, scheduler.timesteps[picked], none)
    noise = scheduler.scale_noise(none, scheduler.timesteps[picked], one)
    found = ratios(scheduler, scheduler.sigmas[picked])
    torch.testing.assert_close(found, (signal / noise).square()[:, 0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
def test_a_solver_set_to_flow_has_the_ratios_of_flow_and_not_of_its_unused_table(name: str) -> None:
    solver = made(name, use_flow_sigmas=True, prediction_type="flow_prediction")
    assert torch.equal(ratios(solver), ratios(made("FlowMatchEulerDiscreteScheduler")))
    assert not torch.equal(ratios(solver), ratios(made(name)))


@pytest.mark.parametrize("name", ["EDMEulerScheduler", "CMStochasticIterativeScheduler", "ScoreSdeVeScheduler"])
def test_exploding_noise_has_the_ratio_of_the_schedulers_own_sigmas(name: str) -> None:
    scheduler = made(name)
    sigmas = scheduler.discrete_sigmas if name == "ScoreSdeVeScheduler" else scheduler.sigmas.flip(0)
    sigmas = sigmas[sigmas > 0].double().sort().values
    levels = torch.linspace(0, 1, len(sigmas), dtype=torch.float64)
    torch.testing.assert_close(ratios(scheduler, levels), (1 / sigmas.square()).float(), rtol=2e-3, atol=0)


def test_wuerstchens_cosine_is_its_own() -> None:
    for scaler in (0.5, 1.0, 2.0):
        scheduler = made("DDPMWuerstchenScheduler", scaler=scaler)
        signal = scheduler.add_noise(torch.ones(37, 1), torch.zeros(37, 1), LEVELS)
        noise = scheduler.add_noise(torch.zeros(37, 1), torch.ones(37, 1), LEVELS)
        torch.testing.assert_close(ratios(scheduler), (signal / noise).square()[:, 0], rtol=1e-3, atol=1e-9)


def test_the_ratio_of_ipndm_is_that_of_its_own_timesteps() -> None:
    scheduler = made("IPNDMScheduler")
    alphas, sigmas = scheduler.alphas[1:-1], scheduler.betas[1:-1]
    torch.testing.assert_close(
        ratios(scheduler, scheduler.timesteps[1:]), (alphas / sigmas).square(), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("name", ["DDIMScheduler", "EDMEulerScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_preparing_to_sample_changes_no_ratio(name: str) -> None:
    scheduler = made(name)
    before = ratios(scheduler)
    scheduler.set_timesteps(7)
    assert torch.equal(ratios(scheduler), before)


def test_a_scheduler_of_ones_own_is_what_it_was_made_from_and_a_stranger_is_told_apart() -> None:
    own = type("MyScheduler", (SHIPPED["FlowMatchEulerDiscreteScheduler"],), {})()
    assert torch.equal(ratios(own), ratios(made("FlowMatchEulerDiscreteScheduler")))
    stranger = scheduler_snr(object(), LEVELS)
    assert isinstance(stranger, NoSnr) and "object: it has no table" in stranger.reason
