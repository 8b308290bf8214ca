"""Collects everything that the doctor's checks read: the machine, torch, the environment. Judges nothing."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from supertuner.config.sources import environment
from supertuner.config.sources import gh200_exports as exports
from supertuner.config.sources.load import load_config
from supertuner.core.errors import ConfigError, ConfigProblem
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON
from supertuner.memory.driver import Driver, NotAvailable
from supertuner.memory.hints.enabled import HintDecision, decide_hints, hint_support
from supertuner.memory.nvml import NvmlLibrary
from supertuner.memory.probe import MachineFacts, host_available_bytes, probe_machine, read_meminfo
from supertuner.tools.doctor.torch_probe import ALLOCATOR_VARIABLES, TorchProbeResult, probe_torch

DriverKind: TypeAlias = Literal["cuda", "none"]
FigureOrigin: TypeAlias = Literal["measured", "modelled", "stand-in"]
COMPILERS: Final = ("cc", "gcc", "clang")
KERNEL_DRIVER: Final = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg", "dev/nvmap")
"""Files that exist where NVIDIA's kernel driver is loaded: its version, its device, WSL's device, Tegra's device."""


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """Which driver described the GPU."""

    driver_kind: DriverKind
    library: str | None
    """The file that is loaded as libcuda.so.1."""
    figure_origin: FigureOrigin
    """What a measured time describes: a GPU, the software model, or a library without an NVIDIA kernel driver."""


@dataclass(frozen=True, slots=True)
class SettingVariable:
    """One environment variable that sets a setting."""

    name: str
    given: str | None
    setting: str
    value: JSON
    """The setting's value with only this variable set; the default if the variable is unset or invalid."""
    problem: str | None


@dataclass(frozen=True, slots=True)
class HostResources:
    """Memory, disk and limits that the operating system grants this process."""

    machine_memory: int | None
    """MemTotal of the machine, ignoring a container's limit."""
    host_available: int | None
    """Host memory that can be allocated, without GPU memory that the kernel lists as a NUMA node."""
    shm_bytes: int | None
    shm_free: int | None
    folder: str
    folder_free: int | None
    open_files: int | None
    """The soft limit (RLIMIT_NOFILE); None if unlimited."""
    compiler: str | None


@dataclass(frozen=True, slots=True)
class SystemSnapshot:
    facts: MachineFacts
    driver: DriverIdentity
    torch: TorchProbeResult
    variables: tuple[SettingVariable, ...]
    allocator_variables: Mapping[str, str]
    """Those of torch's allocator variables that are set."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES, which hides GPUs from the driver and from torch; None if unset."""
    setting_variables: tuple[str, ...]
    """Names of the SUPERTUNER_ variables that are set."""
    settings_problems: tuple[str, ...]
    resources: HostResources
    overflow_library: Path | NotAvailable
    hints: HintDecision
    """Whether hints would be on in a run whose configuration does not mention them."""


def take_snapshot(
    host: HostFacts,
    driver: Driver | NotAvailable,
    nvml: NvmlLibrary | NotAvailable,
    environ: Mapping[str, str],
    *,
    folder: Path,
    library: str | None = None,
    torch: Callable[[Mapping[str, str]], TorchProbeResult] = probe_torch,
) -> SystemSnapshot:
    """Collect the snapshot. A child process imports torch meanwhile, because that takes seconds.

    `folder` is the working directory, whose free disk space is recorded; `torch` probes torch in an environment.
    """
    from supertuner.memory.overflow_allocator.plugin import find_plugin

    with ThreadPoolExecutor(1) as threads:
        torch_facts = threads.submit(torch, environ)
        facts = probe_machine(host, driver, nvml)
        variables = tuple(_read_setting_variable(export.name, environ) for export in exports.GH200_EXPORTS)
        prefix = environment.VARIABLE_PREFIX
        own_variables = {name: value for name, value in environ.items() if name.startswith(prefix) and value}
        return SystemSnapshot(
            facts=facts,
            driver=DriverIdentity("none" if isinstance(driver, NotAvailable) else "cuda", library, figure_origin(host)),
            torch=torch_facts.result(),
            variables=variables,
            allocator_variables={name: environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)},
            visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
            setting_variables=tuple(sorted(own_variables)),
            settings_problems=tuple(
                str(problem).removeprefix("environment: ") for problem in _setting_problems(own_variables)
            ),
            resources=_host_resources(host, facts, environ, folder),
            overflow_library=find_plugin(),
            hints=decide_hints(None, _hints_setting(environ, variables), _cache_types(), hint_support(driver)),
        )


def figure_origin(host: HostFacts) -> FigureOrigin:
    """`measured` with NVIDIA's kernel driver; without it libcuda.so.1 is a stand-in, whose times mean nothing."""
    return "measured" if any((host.root / name).exists() for name in KERNEL_DRIVER) else "stand-in"


def mapped_library(host: HostFacts, name: str = "libcuda.so") -> str | None:
    """The path of a shared library that this process has loaded; None if it has not, or /proc is missing."""
    try:
        lines = (host.root / "proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    return next((path for path in paths if Path(path).name.startswith(name)), None)


def _read_setting_variable(name: str, environ: Mapping[str, str]) -> SettingVariable:
    """What one variable sets, computed by the configuration loader itself; an invalid value is reported as problem."""
    setting, value = environment.SETTING_BY_VARIABLE[name], environ.get(name)
    this_variable, suffix = {name: value} if value else {}, f" (from environment: {name})"
    problems = [problem.message.removesuffix(suffix) for problem in _setting_problems(this_variable)]
    effective = _setting_value(setting, {} if problems else this_variable)
    return SettingVariable(name, value, setting, effective, "; ".join(problems) or None)


def _setting_problems(environ: Mapping[str, str]) -> tuple[ConfigProblem, ...]:
    """What the configuration loader rejects in these variables."""
    try:
        load_config(None, environ=environ, check_paths=False)
    except ConfigError as error:
        return error.problems
    return ()


def _setting_value(setting: str, environ: Mapping[str, str]) -> JSON:
    leaves = load_config(None, environ=environ, check_paths=False).iter_settings()
    return next(value for path, value, _ in leaves if path == setting)


def _hints_setting(environ: Mapping[str, str], variables: tuple[SettingVariable, ...]) -> bool | None:
    """`enable_uvm_hints` by the environment: the SUPERTUNER_ variable overrides that of the GH200 forks; an invalid
    one is ignored. None if no variable sets it."""
    name = "gh200_optimizations.enable_uvm_hints"
    own_variable = environment.variable_name(name)
    this_variable = {own_variable: environ[own_variable]} if environ.get(own_variable) else {}
    value = _setting_value(name, this_variable) if this_variable and not _setting_problems(this_variable) else None
    if value is None:
        value = next(variable.value for variable in variables if variable.setting == name)
    return value if isinstance(value, bool) else None


def _cache_types() -> tuple[str, ...]:
    """The default VAE and text cache types."""
    caches = load_config(None, environ={}, check_paths=False).config.cache_config
    return caches.vae_cache_type, caches.text_cache_type


def _host_resources(host: HostFacts, facts: MachineFacts, environ: Mapping[str, str], folder: Path) -> HostResources:
    shm = host.root / "dev/shm"
    path = environ.get("PATH", os.defpath)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostResources(
        machine_memory=read_meminfo(host.root / "proc/meminfo").get("MemTotal"),
        host_available=host_available_bytes(facts, host),
        shm_bytes=_filesystem_bytes(shm),
        shm_free=host.free_bytes(shm) if shm.is_dir() else None,
        folder=str(folder),
        folder_free=host.free_bytes(folder) if folder.is_dir() else None,
        open_files=None if soft == resource.RLIM_INFINITY else soft,
        compiler=next((found for name in COMPILERS if (found := shutil.which(name, path=path))), None),
    )


def _filesystem_bytes(folder: Path) -> int | None:
    if not folder.is_dir():
        return None
    stat = os.statvfs(folder)
    return stat.f_blocks * stat.f_frsize
