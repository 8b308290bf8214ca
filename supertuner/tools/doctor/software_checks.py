"""Torch, the environment and our own parts, judged. Pure: a situation in, checks out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from supertuner.config.sources import alloc_conf
from supertuner.memory.driver import NotAvailable
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus, absent, bad, good, warning
from supertuner.tools.doctor.system_snapshot import SettingVariable, SystemSnapshot

TORCH, ENVIRONMENT, PARTS = "torch", "environment", "SuperTuner"
CUDA_TORCH_REMEDY: Final = "`pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130`"
SOURCE_SCRIPT_REMEDY: Final = "`. scripts/setup_gh200_env.sh`"


def software_checks(snapshot: SystemSnapshot) -> Iterator[CheckResult]:
    yield check_torch(snapshot)
    yield check_torch_patches(snapshot)
    yield check_allocator_settings(snapshot)
    yield check_memory_fraction(snapshot)
    for setting_variable in snapshot.variables:
        yield check_setting_variable(setting_variable)
    yield check_own_variables(snapshot)
    yield check_hints(snapshot)
    yield check_overflow_allocator(snapshot)
    yield check_compiler(snapshot)


def check_torch(snapshot: SystemSnapshot) -> CheckResult:
    facts, has_gpu = snapshot.torch, bool(snapshot.facts.gpus)
    if facts.problem is not None:
        remedy = "`make setup` installs the tested one; a CUDA build also needs its NVIDIA packages (`pip check`)"
        return bad(TORCH, "torch", f"does not work: {facts.problem}", remedy)
    if facts.cuda is None:
        build = f"{facts.version}, a build for ROCm" if facts.hip else f"{facts.version}, a build without CUDA"
        if has_gpu:
            return bad(TORCH, "torch", f"{build}: it cannot use the GPU that is here", CUDA_TORCH_REMEDY)
        return good(TORCH, "torch", f"{build}, which is right without a GPU")
    text = f"{facts.version}, for CUDA {facts.cuda}"
    if facts.sees:
        return good(TORCH, "torch", f"{text}; sees {facts.sees} GPU{'s' if facts.sees != 1 else ''}")
    if not has_gpu:
        return absent(TORCH, "torch", f"{text}; sees no GPU, and there is none")
    version = snapshot.facts.driver_version
    if version is not None and version // 1000 < int(facts.cuda.split(".")[0]):
        finding = f"{text}: newer than the driver (CUDA {version // 1000}), so it sees no GPU"
        remedy = f"a newer driver, or a torch for it: {CUDA_TORCH_REMEDY.replace('cu130', 'cu126')}"
        return bad(TORCH, "torch", finding, remedy)
    remedy = '`python -c "import torch; torch.cuda.init()"` says why; look at CUDA_VISIBLE_DEVICES too'
    return bad(TORCH, "torch", f"{text}: sees no GPU, though the driver has one", remedy)


def check_torch_patches(snapshot: SystemSnapshot) -> CheckResult:
    """By what torch's own reader of allocator settings says to `use_uvm` (torch_probe.py)."""
    if snapshot.torch.patched is None:
        why = "a build without CUDA takes any setting" if snapshot.torch.cuda is None else "it takes any setting"
        return absent(TORCH, "patches", f"stock or patched cannot be told: {why}")
    if snapshot.torch.patched:
        finding = "a patched torch: its allocator knows use_uvm; its unified memory and ours must not both be on"
        remedy = "use ours (memory.overflow.enabled) and `unset PYTORCH_CUDA_ALLOC_CONF`, or leave ours off"
        return warning(TORCH, "patches", finding, remedy)
    return good(TORCH, "patches", "stock: use_uvm is refused, as it should be")


def check_allocator_settings(snapshot: SystemSnapshot) -> CheckResult:
    name = "allocator settings"
    if not snapshot.allocator_variables:
        return good(TORCH, name, "none set")
    if snapshot.torch.refuses:
        unknown = f"torch knows no {', '.join(snapshot.torch.refuses)}, and stops at its first use of the GPU"
        return bad(TORCH, name, unknown, f"mend it, or `unset {' '.join(snapshot.allocator_variables)}`")
    keys = {
        var: [one.key for one in alloc_conf.parse_entries(text) if one.is_uvm_key]
        for var, text in snapshot.allocator_variables.items()
    }
    holding = [var for var, found in keys.items() if found]
    if not holding:
        return good(TORCH, name, ", ".join(f"{var}={text}" for var, text in snapshot.allocator_variables.items()))
    keys_text = "; ".join(f"{var} holds {', '.join(keys[var])}" for var in holding)
    remedy = (
        f"`unset {' '.join(holding)}`, then {SOURCE_SCRIPT_REMEDY}: ratio and pattern travel in variables of their own"
    )
    wrong = [
        f"{var}: {what}"
        for var in holding
        for what in alloc_conf.alloc_conf_problems(snapshot.allocator_variables[var])
    ]
    if snapshot.torch.patched:
        return good(TORCH, name, f"{keys_text}, which this patched torch knows")
    if wrong:
        return bad(TORCH, name, "; ".join(wrong), remedy)
    finding = f"{keys_text}: SuperTuner takes that as settings of memory.overflow and keeps it from torch"
    if snapshot.torch.cuda is None:
        return warning(TORCH, name, f"{finding}; other programs stop as soon as torch is a stock CUDA build", remedy)
    return bad(
        TORCH, name, f"{finding}; in any other program stock torch refuses it at its first use of the GPU", remedy
    )


def check_memory_fraction(snapshot: SystemSnapshot) -> CheckResult:
    holding = [
        var for var, text in snapshot.allocator_variables.items() if alloc_conf.memory_fraction(text) is not None
    ]
    if not holding:
        return good(TORCH, "memory fraction", "not set")
    finding = f"{holding[0]} sets {alloc_conf.MEMORY_FRACTION_KEY}: it counts spilled bytes too, so overflow is refused together with it"
    remedy = (
        f"take it out of {holding[0]}, or `unset {holding[0]}`; memory.overflow.gpu_reserve_gb keeps GPU memory free"
    )
    return warning(TORCH, "memory fraction", finding, remedy)


def check_setting_variable(variable: SettingVariable) -> CheckResult:
    value = "nothing" if variable.value is None else json.dumps(variable.value)
    label = variable.setting.rsplit("_", 1)[1] + " variable"
    if variable.problem is not None:
        return bad(
            ENVIRONMENT,
            label,
            f"{variable.name}: {variable.problem}",
            f"`unset {variable.name}`, then {SOURCE_SCRIPT_REMEDY}",
        )
    if not variable.given:
        state = "unset" if variable.given is None else "empty"
        rest = "" if variable.value is None else f": {variable.setting} is {value}"
        return absent(ENVIRONMENT, label, f"{variable.name} is {state}{rest}")
    return good(ENVIRONMENT, label, f"{variable.name} gives {variable.setting} = {value}")


def check_own_variables(snapshot: SystemSnapshot) -> CheckResult:
    name, count = "SUPERTUNER_…", len(snapshot.setting_variables)
    if snapshot.settings_problems:
        remedy = "`supertuner config show CONFIG` names the settings; unset what is not one"
        return bad(ENVIRONMENT, name, "; ".join(snapshot.settings_problems), remedy)
    if not count:
        return absent(ENVIRONMENT, name, "no setting is given by a variable of ours")
    return good(ENVIRONMENT, name, f"{count} set: {', '.join(snapshot.setting_variables)}")


def check_hints(snapshot: SystemSnapshot) -> CheckResult:
    enabled = snapshot.hints
    if enabled.on:
        return good(PARTS, "hints", f"would be on: {enabled.reason}")
    requested_by_variable = any(
        one.setting.endswith("enable_uvm_hints") and one.value is True for one in snapshot.variables
    )
    if requested_by_variable and enabled.asked and snapshot.facts.gpus:
        return warning(PARTS, "hints", f"would be off: {enabled.reason}", "`unset SIMPLETUNER_GH200_ENABLE_UVM_HINTS`")
    unasked = enabled.asked is None and bool(snapshot.facts.gpus)
    return absent(PARTS, "hints", f"would be off: {enabled.reason}", SOURCE_SCRIPT_REMEDY if unasked else "")


def check_overflow_allocator(snapshot: SystemSnapshot) -> CheckResult:
    if not isinstance(snapshot.overflow_library, NotAvailable):
        return good(PARTS, "overflow allocator", f"built: {snapshot.overflow_library.name}")
    check = warning(PARTS, "overflow allocator", "not built; everything else works", BUILD_REMEDY)
    return check if snapshot.facts.gpus else replace(check, status=CheckStatus.ABSENT)


BUILD_REMEDY: Final = (
    "install a C compiler (`sudo apt install gcc`), then build: `pip install -e .` in SuperTuner's folder"
)


def check_compiler(snapshot: SystemSnapshot) -> CheckResult:
    if snapshot.resources.compiler is not None:
        return good(PARTS, "compiler", snapshot.resources.compiler)
    finding = "none: the overflow allocator cannot be built, nor anything by torch.compile"
    return warning(PARTS, "compiler", finding, "`sudo apt install gcc`")
