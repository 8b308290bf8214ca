"""Torch, the environment and our own parts, judged. Pure: a situation in, checks out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from supertuner.config.sources import alloc_conf
from supertuner.memory.driver import Missing
from supertuner.tools.doctor.check import Check, Mark, absent, bad, good, warning
from supertuner.tools.doctor.situation import Situation, Variable

TORCH, ENVIRONMENT, PARTS = "torch", "environment", "SuperTuner"
CUDA_TORCH: Final = "`pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130`"
SOURCE_SCRIPT: Final = "`. scripts/setup_gh200_env.sh`"


def software_checks(situation: Situation) -> Iterator[Check]:
    yield torch(situation)
    yield patched(situation)
    yield allocator(situation)
    yield fraction(situation)
    for one in situation.variables:
        yield variable(one)
    yield settings(situation)
    yield hints(situation)
    yield overflow(situation)
    yield compiler(situation)


def torch(situation: Situation) -> Check:
    found, here = situation.torch, bool(situation.facts.gpus)
    if found.problem is not None:
        remedy = "`make setup` installs the tested one; a CUDA build also needs its NVIDIA packages (`pip check`)"
        return bad(TORCH, "torch", f"does not work: {found.problem}", remedy)
    if found.cuda is None:
        build = f"{found.version}, a build for ROCm" if found.hip else f"{found.version}, a build without CUDA"
        if here:
            return bad(TORCH, "torch", f"{build}: it cannot use the GPU that is here", CUDA_TORCH)
        return good(TORCH, "torch", f"{build}, which is right without a GPU")
    text = f"{found.version}, for CUDA {found.cuda}"
    if found.sees:
        return good(TORCH, "torch", f"{text}; sees {found.sees} GPU{'s' if found.sees != 1 else ''}")
    if not here:
        return absent(TORCH, "torch", f"{text}; sees no GPU, and there is none")
    version = situation.facts.driver_version
    if version is not None and version // 1000 < int(found.cuda.split(".")[0]):
        finding = f"{text}: newer than the driver (CUDA {version // 1000}), so it sees no GPU"
        remedy = f"a newer driver, or a torch for it: {CUDA_TORCH.replace('cu130', 'cu126')}"
        return bad(TORCH, "torch", finding, remedy)
    remedy = '`python -c "import torch; torch.cuda.init()"` says why; look at CUDA_VISIBLE_DEVICES too'
    return bad(TORCH, "torch", f"{text}: sees no GPU, though the driver has one", remedy)


def patched(situation: Situation) -> Check:
    """By what torch's own reader of allocator settings says to `use_uvm` (torch_probe.py)."""
    if situation.torch.patched is None:
        why = "a build without CUDA takes any setting" if situation.torch.cuda is None else "it takes any setting"
        return absent(TORCH, "patches", f"stock or patched cannot be told: {why}")
    if situation.torch.patched:
        finding = "a patched torch: its allocator knows use_uvm; its unified memory and ours must not both be on"
        remedy = "use ours (memory.overflow.enabled) and `unset PYTORCH_CUDA_ALLOC_CONF`, or leave ours off"
        return warning(TORCH, "patches", finding, remedy)
    return good(TORCH, "patches", "stock: use_uvm is refused, as it should be")


def allocator(situation: Situation) -> Check:
    name = "allocator settings"
    if not situation.allocator:
        return good(TORCH, name, "none set")
    if situation.torch.refuses:
        unknown = f"torch knows no {', '.join(situation.torch.refuses)}, and stops at its first use of the GPU"
        return bad(TORCH, name, unknown, f"mend it, or `unset {' '.join(situation.allocator)}`")
    keys = {var: [one.key for one in alloc_conf.entries(text) if one.ours] for var, text in situation.allocator.items()}
    holding = [var for var, found in keys.items() if found]
    if not holding:
        return good(TORCH, name, ", ".join(f"{var}={text}" for var, text in situation.allocator.items()))
    told = "; ".join(f"{var} holds {', '.join(keys[var])}" for var in holding)
    remedy = f"`unset {' '.join(holding)}`, then {SOURCE_SCRIPT}: ratio and pattern travel in variables of their own"
    wrong = [f"{var}: {what}" for var in holding for what in alloc_conf.wrong(situation.allocator[var])]
    if situation.torch.patched:
        return good(TORCH, name, f"{told}, which this patched torch knows")
    if wrong:
        return bad(TORCH, name, "; ".join(wrong), remedy)
    ours = f"{told}: SuperTuner takes that as settings of memory.overflow and keeps it from torch"
    if situation.torch.cuda is None:
        return warning(TORCH, name, f"{ours}; other programs stop as soon as torch is a stock CUDA build", remedy)
    return bad(TORCH, name, f"{ours}; in any other program stock torch refuses it at its first use of the GPU", remedy)


def fraction(situation: Situation) -> Check:
    holding = [var for var, text in situation.allocator.items() if alloc_conf.memory_fraction(text) is not None]
    if not holding:
        return good(TORCH, "memory fraction", "not set")
    finding = (
        f"{holding[0]} sets {alloc_conf.FRACTION}: it counts spilled bytes too, so overflow is refused together with it"
    )
    remedy = (
        f"take it out of {holding[0]}, or `unset {holding[0]}`; memory.overflow.gpu_reserve_gb keeps GPU memory free"
    )
    return warning(TORCH, "memory fraction", finding, remedy)


def variable(one: Variable) -> Check:
    value = "nothing" if one.value is None else json.dumps(one.value)
    label = one.setting.rsplit("_", 1)[1] + " variable"
    if one.problem is not None:
        return bad(ENVIRONMENT, label, f"{one.name}: {one.problem}", f"`unset {one.name}`, then {SOURCE_SCRIPT}")
    if not one.given:
        state = "unset" if one.given is None else "empty"
        rest = "" if one.value is None else f": {one.setting} is {value}"
        return absent(ENVIRONMENT, label, f"{one.name} is {state}{rest}")
    return good(ENVIRONMENT, label, f"{one.name} gives {one.setting} = {value}")


def settings(situation: Situation) -> Check:
    name, count = "SUPERTUNER_…", len(situation.settings)
    if situation.settings_problems:
        remedy = "`supertuner config show CONFIG` names the settings; unset what is not one"
        return bad(ENVIRONMENT, name, "; ".join(situation.settings_problems), remedy)
    if not count:
        return absent(ENVIRONMENT, name, "no setting is given by a variable of ours")
    return good(ENVIRONMENT, name, f"{count} set: {', '.join(situation.settings)}")


def hints(situation: Situation) -> Check:
    found = situation.hints
    if found.on:
        return good(PARTS, "hints", f"would be on: {found.reason}")
    told = any(one.setting.endswith("enable_uvm_hints") and one.value is True for one in situation.variables)
    if told and found.asked and situation.facts.gpus:
        return warning(PARTS, "hints", f"would be off: {found.reason}", "`unset SIMPLETUNER_GH200_ENABLE_UVM_HINTS`")
    unasked = found.asked is None and bool(situation.facts.gpus)
    return absent(PARTS, "hints", f"would be off: {found.reason}", SOURCE_SCRIPT if unasked else "")


def overflow(situation: Situation) -> Check:
    if not isinstance(situation.overflow, Missing):
        return good(PARTS, "overflow allocator", f"built: {situation.overflow.name}")
    check = warning(PARTS, "overflow allocator", "not built; everything else works", BUILD)
    return check if situation.facts.gpus else replace(check, mark=Mark.ABSENT)


BUILD: Final = "install a C compiler (`sudo apt install gcc`), then build: `pip install -e .` in SuperTuner's folder"


def compiler(situation: Situation) -> Check:
    if situation.around.compiler is not None:
        return good(PARTS, "compiler", situation.around.compiler)
    finding = "none: the overflow allocator cannot be built, nor anything by torch.compile"
    return warning(PARTS, "compiler", finding, "`sudo apt install gcc`")
