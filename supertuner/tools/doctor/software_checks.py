"""Torch, the environment and our own parts, judged. Pure: a situation in, checks out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from supertuner.memory.driver import Missing
from supertuner.tools.doctor.check import Check, Mark, absent, bad, good, warning
from supertuner.tools.doctor.situation import Situation, Variable

TORCH, ENVIRONMENT, PARTS = "torch", "environment", "SuperTuner"
CUDA_TORCH: Final = "`pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130`"
SOURCE_SCRIPT: Final = "`. scripts/setup_gh200_env.sh`"
FRACTION: Final = "per_process_memory_fraction"


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
    foreign = {var: keys for var, text in situation.allocator.items() if (keys := uvm_keys(text))}
    if not foreign:
        return good(TORCH, name, ", ".join(f"{var}={text}" for var, text in situation.allocator.items()))
    told = "; ".join(f"{var} holds {', '.join(keys)}" for var, keys in foreign.items())
    remedy = f"`unset {' '.join(foreign)}`, then {SOURCE_SCRIPT}: ratio and pattern travel in variables of their own"
    if situation.torch.patched:
        return good(TORCH, name, f"{told}, which this patched torch knows")
    if situation.torch.cuda is None:
        finding = f"{told}: a build without CUDA ignores that, a stock CUDA build stops with an error"
        return warning(TORCH, name, finding, remedy)
    return bad(TORCH, name, f"{told}: stock torch refuses that at its first use of the GPU", remedy)


def fraction(situation: Situation) -> Check:
    holding = [var for var, text in situation.allocator.items() if FRACTION in setting_keys(text)]
    if not holding:
        return good(TORCH, "memory fraction", "not set")
    finding = f"{holding[0]} sets {FRACTION}: it counts spilled bytes too, so overflow is refused together with it"
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
        return absent(ENVIRONMENT, label, f"{one.name} is {state}, which gives {value}")
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
    if found.asked and situation.facts.gpus:
        return warning(PARTS, "hints", f"would be off: {found.reason}", "`unset SIMPLETUNER_GH200_ENABLE_UVM_HINTS`")
    unasked = found.asked is None and bool(situation.facts.gpus)
    return absent(PARTS, "hints", f"would be off: {found.reason}", SOURCE_SCRIPT if unasked else "")


def overflow(situation: Situation) -> Check:
    if not isinstance(situation.overflow, Missing):
        return good(PARTS, "overflow allocator", f"built: {situation.overflow.name}")
    check = warning(PARTS, "overflow allocator", f"not built: {situation.overflow.reason}", BUILD)
    return check if situation.facts.gpus else replace(check, mark=Mark.ABSENT)


BUILD: Final = "install a C compiler (`sudo apt install gcc`), then build: `pip install -e .` in SuperTuner's folder"


def compiler(situation: Situation) -> Check:
    if situation.around.compiler is not None:
        return good(PARTS, "compiler", situation.around.compiler)
    finding = "none: the overflow allocator cannot be built, nor anything by torch.compile"
    return warning(PARTS, "compiler", finding, "`sudo apt install gcc`")


def setting_keys(text: str) -> list[str]:
    """The keys of an allocator's settings, `key:value,key:[a:b,c:d]`; what stands in brackets is a value."""
    flat = re.sub(r"\[[^\]]*\]?", "", text)
    return [part.partition(":")[0].strip() for part in flat.split(",") if ":" in part]


def uvm_keys(text: str) -> list[str]:
    """Keys of the seeds' patched torch."""
    return [key for key in setting_keys(text) if key == "use_uvm" or key.startswith("uvm_")]
