"""The machine that a forecast is for: a known machine by its name, or this one with the memory that is free now."""

from __future__ import annotations

from dataclasses import replace

from supertuner.core.errors import OptionError
from supertuner.core.host import HostFacts
from supertuner.core.types import bytes_text
from supertuner.memory.cuda import open_cuda
from supertuner.memory.machines import MACHINES, MachineFigure, MachineSpec
from supertuner.memory.nvml import open_nvml
from supertuner.memory.probe import GpuFacts, MachineFacts, free_gpu_bytes, host_available_bytes, probe_machine
from supertuner.plan.forecast.results import MachineCapacity

THIS_MACHINE = "this"
DEFAULT_MACHINE = "gh200-96"


def find_machine_capacity(name: str | None, host: HostFacts, device_index: int = 0) -> MachineCapacity:
    """The memory of the machine with this name; None: of this machine if it has a GPU, otherwise of a GH200.

    `device_index`: which GPU of this machine. Raises OptionError for an unknown name.
    """
    if name is not None and name != THIS_MACHINE:
        return known_machine_capacity(name)
    driver = open_cuda()
    facts = probe_machine(host, driver, open_nvml())
    if facts.gpus:
        gpu = next((one for one in facts.gpus if one.device.number == device_index), facts.gpus[0])
        free = free_gpu_bytes(facts, driver, host, gpu.device.number)
        return _this_gpu_capacity(facts, gpu, free, host_available_bytes(facts, host))
    if name is None:
        capacity = known_machine_capacity(DEFAULT_MACHINE)
        source = f"no GPU here, so a {capacity.title} is assumed; --machine selects another, or this"
        return replace(capacity, source=source)
    available = host.memory_available()
    source = "available now; there is no GPU" if available is not None else "there is no GPU, and its memory is unknown"
    return MachineCapacity(MACHINES["cpu"], "this machine", None, available, source)


def known_machine_capacity(name: str) -> MachineCapacity:
    """The memory of a machine of the table. Raises OptionError for an unknown name, with the known ones."""
    if name not in MACHINES or name == "cpu":
        known_names = ", ".join(key for key in MACHINES if key != "cpu")
        raise OptionError(f"{name!r} is not a known machine; set `machine` to one of {known_names}, or this")
    machine = MACHINES[name]
    gpu_bytes, host_bytes = _figure_bytes(machine.gpu_bytes), _figure_bytes(machine.host_bytes)
    return MachineCapacity(machine, machine.title, gpu_bytes, host_bytes, "from the table of machines")


def _this_gpu_capacity(facts: MachineFacts, gpu: GpuFacts, free: int | None, host_free: int | None) -> MachineCapacity:
    total = gpu.device.total_bytes
    machine = facts.machine or _unlisted_machine(gpu.device.name, total, bool(facts.one_pool))
    usable = total if free is None else free
    source = "free now" if usable == total else f"free now, of {bytes_text(total)}"
    return MachineCapacity(machine, f"this machine ({gpu.device.name})", usable, host_free, source)


def _unlisted_machine(name: str, total: int, one_pool: bool) -> MachineSpec:
    """A GPU that is not in the table: its memory is known, its rates are not."""
    memory = MachineFigure(float(total), "reported by its driver")
    return replace(MACHINES["cpu"], key=THIS_MACHINE, title=name, gpu_bytes=memory, one_pool=one_pool)


def _figure_bytes(figure: MachineFigure) -> int | None:
    return None if figure.value is None else int(figure.value)
