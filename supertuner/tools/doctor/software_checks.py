"""Checks of torch, environment variables and SuperTuner's own parts. Pure: a snapshot in, checks out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from supertuner.config.sources import alloc_conf
from supertuner.memory.driver import NotAvailable
from supertuner.tools.doctor.check_result import CheckResult, absent, bad, good, warning
from supertuner.tools.doctor.system_snapshot import SettingVariable, SystemSnapshot

TORCH, ENVIRONMENT, PARTS = "torch", "environment", "SuperTuner"
CUDA_TORCH_REMEDY: Final = (
    "`make setup TORCH=cuda`, or without a clone "
    "`pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130`"
)
SOURCE_SCRIPT_REMEDY: Final = "`. scripts/setup_gh200_env.sh`"


def software_checks(snapshot: SystemSnapshot) -> Iterator[CheckResult]:
    for check in (check_torch, check_torch_patches, check_allocator_settings, check_memory_fraction):
        yield check(snapshot)
    yield from map(check_setting_variable, snapshot.variables)
    for check in (check_own_variables, check_hints, check_overflow_allocator, check_compiler):
        yield check(snapshot)


def check_torch(snapshot: SystemSnapshot) -> CheckResult:
    facts, has_gpu = snapshot.torch, bool(snapshot.facts.gpus)
    if facts.problem is not None:
        remedy = "install the tested version: `make setup`; a CUDA build also needs its NVIDIA packages (`pip check`)"
        return bad(TORCH, "torch", f"cannot be imported: {facts.problem}", remedy)
    if facts.cuda is None:
        build = f"{facts.version}, a build for ROCm" if facts.hip else f"{facts.version}, a build without CUDA"
        if has_gpu:
            return bad(TORCH, "torch", f"{build}: it cannot use this machine's GPU", CUDA_TORCH_REMEDY)
        return good(TORCH, "torch", f"{build}, which is right without a GPU")
    text = f"{facts.version}, for CUDA {facts.cuda}"
    if facts.sees:
        return good(TORCH, "torch", f"{text}; sees {facts.sees} GPU{'s' if facts.sees != 1 else ''}")
    if not has_gpu:
        return absent(TORCH, "torch", f"{text}; sees no GPU, because there is none")
    version = snapshot.facts.driver_version
    if version is not None and version // 1000 < int(facts.cuda.split(".")[0]):
        finding = f"{text}: newer than the driver (CUDA {version // 1000}), so it sees no GPU"
        remedy = (
            "install a newer driver (branch 580 for CUDA 13), or a torch for this one: "
            "`pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126`"
        )
        return bad(TORCH, "torch", finding, remedy)
    remedy = 'run `python -c "import torch; torch.cuda.init()"` for the reason, and check CUDA_VISIBLE_DEVICES'
    return bad(TORCH, "torch", f"{text}: sees no GPU, although the driver lists one", remedy)


def check_torch_patches(snapshot: SystemSnapshot) -> CheckResult:
    """Whether torch is patched: whether its parser of allocator settings accepts `use_uvm` (torch_probe.py)."""
    if snapshot.torch.patched is None:
        why = "a build without CUDA accepts any setting" if snapshot.torch.cuda is None else "it accepts any setting"
        return absent(TORCH, "patches", f"unknown whether stock or patched: {why}")
    if snapshot.torch.patched:
        finding = "a patched torch, which accepts use_uvm; its unified memory and memory.overflow must not both be on"
        remedy = "to use memory.overflow.enabled, `unset PYTORCH_CUDA_ALLOC_CONF`; otherwise leave it off"
        return warning(TORCH, "patches", finding, remedy)
    return good(TORCH, "patches", "stock: it rejects use_uvm, as it should")


def check_allocator_settings(snapshot: SystemSnapshot) -> CheckResult:
    name, variables = "allocator settings", snapshot.allocator_variables
    if not variables:
        return good(TORCH, name, "none set")
    if snapshot.torch.refuses:
        unknown = f"torch does not know {', '.join(snapshot.torch.refuses)} and fails at its first use of the GPU"
        return bad(TORCH, name, unknown, f"correct it, or `unset {' '.join(variables)}`")
    keys = {
        var: [entry.key for entry in alloc_conf.parse_entries(text) if entry.is_uvm_key]
        for var, text in variables.items()
    }
    holding = [var for var, uvm_keys in keys.items() if uvm_keys]
    if not holding:
        return good(TORCH, name, ", ".join(f"{var}={text}" for var, text in variables.items()))
    keys_text = "; ".join(f"{var} contains {', '.join(keys[var])}" for var in holding)
    script_effect = "which sets ratio and pattern in separate variables"
    remedy = f"`unset {' '.join(holding)}`, then {SOURCE_SCRIPT_REMEDY}, {script_effect}"
    problems = {var: alloc_conf.alloc_conf_problems(variables[var]) for var in holding}
    wrong = [f"{var}: {problem}" for var, found in problems.items() for problem in found]
    if snapshot.torch.patched:
        return good(TORCH, name, f"{keys_text}, which this patched torch accepts")
    if wrong:
        return bad(TORCH, name, "; ".join(wrong), remedy)
    finding = f"{keys_text}: SuperTuner reads it as memory.overflow settings and hides it from torch"
    if snapshot.torch.cuda is None:
        return warning(TORCH, name, f"{finding}; other programs fail if torch is a stock CUDA build", remedy)
    return bad(TORCH, name, f"{finding}; in other programs stock torch fails at its first use of the GPU", remedy)


def check_memory_fraction(snapshot: SystemSnapshot) -> CheckResult:
    variables = snapshot.allocator_variables.items()
    var = next((var for var, text in variables if alloc_conf.memory_fraction(text) is not None), None)
    if var is None:
        return good(TORCH, "memory fraction", "not set")
    effect = "which also limits overflowed bytes; memory.overflow cannot be enabled together with it"
    remedy = f"remove it from {var}, or `unset {var}`; memory.overflow.gpu_reserve_gb keeps GPU memory free"
    return warning(TORCH, "memory fraction", f"{var} sets {alloc_conf.MEMORY_FRACTION_KEY}, {effect}", remedy)


def check_setting_variable(variable: SettingVariable) -> CheckResult:
    value = "nothing" if variable.value is None else json.dumps(variable.value)
    label = variable.setting.rsplit("_", 1)[1] + " variable"
    if variable.problem is not None:
        remedy = f"`unset {variable.name}`, then {SOURCE_SCRIPT_REMEDY}"
        return bad(ENVIRONMENT, label, f"{variable.name}: {variable.problem}", remedy)
    if not variable.given:
        state = "unset" if variable.given is None else "empty"
        rest = "" if variable.value is None else f": {variable.setting} is {value}"
        return absent(ENVIRONMENT, label, f"{variable.name} is {state}{rest}")
    return good(ENVIRONMENT, label, f"{variable.name} sets {variable.setting} = {value}")


def check_own_variables(snapshot: SystemSnapshot) -> CheckResult:
    name, count = "SUPERTUNER_…", len(snapshot.setting_variables)
    if snapshot.settings_problems:
        remedy = "list the settings with `supertuner config show CONFIG`, and unset the others"
        return bad(ENVIRONMENT, name, "; ".join(snapshot.settings_problems), remedy)
    if not count:
        return absent(ENVIRONMENT, name, "no SUPERTUNER_ variable is set")
    return good(ENVIRONMENT, name, f"{count} set: {', '.join(snapshot.setting_variables)}")


def check_hints(snapshot: SystemSnapshot) -> CheckResult:
    enabled = snapshot.hints
    if enabled.on:
        return good(PARTS, "hints", f"would be on: {enabled.reason}")
    values = [variable.value for variable in snapshot.variables if variable.setting.endswith("enable_uvm_hints")]
    if True in values and enabled.asked and snapshot.facts.gpus:
        return warning(PARTS, "hints", f"would be off: {enabled.reason}", "`unset SIMPLETUNER_GH200_ENABLE_UVM_HINTS`")
    not_requested = enabled.asked is None and bool(snapshot.facts.gpus)
    return absent(PARTS, "hints", f"would be off: {enabled.reason}", SOURCE_SCRIPT_REMEDY if not_requested else "")


def check_overflow_allocator(snapshot: SystemSnapshot) -> CheckResult:
    if not isinstance(snapshot.overflow_library, NotAvailable):
        return good(PARTS, "overflow allocator", f"built: {snapshot.overflow_library.name}")
    remedy = "install a C compiler (`sudo apt install gcc`), then build: `pip install -e .` in SuperTuner's folder"
    judge = warning if snapshot.facts.gpus else absent
    return judge(PARTS, "overflow allocator", "not built; everything else works", remedy)


def check_compiler(snapshot: SystemSnapshot) -> CheckResult:
    if snapshot.resources.compiler is not None:
        return good(PARTS, "compiler", snapshot.resources.compiler)
    finding = "none: the overflow allocator cannot be built, and torch.compile does not work"
    return warning(PARTS, "compiler", finding, "`sudo apt install gcc`")
