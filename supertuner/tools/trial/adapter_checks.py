"""Checks of what is trained, on the full-size model on the meta device: layers, initial files, names of exports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError, SuperTunerError
from supertuner.models import loading
from supertuner.models.adapters import attach as adapters
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.plan.forecast.storage import ExpertStateSizes
from supertuner.step.expert_setup import selected_experts
from supertuner.tools.doctor.check_result import CheckResult, good
from supertuner.tools.trial.findings import WarningCollector, from_error
from supertuner.train import run_checks
from supertuner.train.export.adapter_init import check_initial_adapters

GROUP = "adapter"
FP32_BYTES = 4


@dataclass(slots=True)
class AdapterFindings:
    """What the checks of all experts found."""

    checks: list[CheckResult] = field(default_factory=list)
    sizes: list[ExpertStateSizes] = field(default_factory=list)
    """Of each expert whose layers were found."""


def check_experts(config: RunConfig, family: Family, model: ModelDescription) -> AdapterFindings:
    """Check every expert that is trained."""
    findings, collector = AdapterFindings(), WarningCollector(GROUP)
    try:
        experts = selected_experts(config, model)
        run_checks.require_expert_settings(config, model, collector)
    except SuperTunerError as error:
        findings.checks.append(from_error(GROUP, "experts", error))
        return findings
    for expert in experts:
        findings.checks += _check_expert(config, family, model, expert, findings.sizes)
    findings.checks += collector.warnings
    return findings


def _check_expert(
    config: RunConfig, family: Family, model: ModelDescription, expert: Expert, sizes: list[ExpertStateSizes]
) -> Iterator[CheckResult]:
    try:
        module = loading.build_meta_module(model, expert.component)
        settings = adapters.settings_for_expert(config.adapter, expert.name)
        layers = run_checks.check_layers(config, family, expert, module)
    except ModelError as error:
        yield from_error(GROUP, expert.name, error)
        return
    try:
        check_initial_adapters(config, family, model, expert)
    except SuperTunerError as error:
        yield from_error(GROUP, f"{expert.name}, initial file", error)
    parameter_shapes = [tuple(one.shape) for one in module.parameters()]
    what, exported = f"all {len(parameter_shapes)} weights", None
    if settings.type != "full":
        targets = adapters.resolve_targets(settings, family.target_presets)
        exported = adapters.export_shapes(module, settings, targets, family.export_prefix[expert.component])
        parameter_shapes = [shape for name, shape in exported.items() if not name.endswith(".alpha")]
        what = f"{settings.type} on {len(layers)} layers"
    count = sum(map(prod, parameter_shapes))
    sizes.append(_state_sizes(config, parameter_shapes))
    yield good(GROUP, expert.name, f"{what} of {expert.component}, {count:,} trained parameters")
    if exported is not None:
        yield from _check_exports(config, family, expert, exported)


def _check_exports(
    config: RunConfig, family: Family, expert: Expert, exported: dict[str, tuple[int, ...]]
) -> Iterator[CheckResult]:
    """One problem for each program that has no name for a trained layer."""
    if config.exports_when == "never":
        return
    named = []
    for program in config.exports.formats:
        try:
            run_checks.require_export_format(program, family, exported)
            named.append(program)
        except SuperTunerError as error:
            yield from_error(GROUP, expert.name, error)
    if named:
        yield good(GROUP, expert.name, f"exports for {', '.join(named)} have a name for every trained layer")


def _state_sizes(config: RunConfig, shapes: list[tuple[int, ...]]) -> ExpertStateSizes:
    """Bytes of a checkpoint and an export; the optimizer's state counts as fp32, so at most."""
    import torch

    from supertuner.optim.optimizer_registry import OPTIMIZERS

    trained = FP32_BYTES * sum(map(prod, shapes))
    state = trained if config.train.ema_decay is not None else 0
    state_shapes = OPTIMIZERS[config.optimizer.name].state_shapes
    for shape, repeated in _counted(shapes).items():
        parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
        entries = [max(map(prod, options), default=0) for options in state_shapes(parameter).values()]
        state += FP32_BYTES * repeated * sum(entries)
    halved = config.adapter.type == "full" and config.train.mixed_precision != "fp32"
    return ExpertStateSizes(trained, state, trained // 2 if halved else trained)


def _counted(shapes: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    return counts
