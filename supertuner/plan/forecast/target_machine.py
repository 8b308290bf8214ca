"""Which machine a forecast is for, and what it has: a row of the table by its name, or this one as it is now."""

from __future__ import annotations

from dataclasses import replace

from supertuner.core.errors import OptionError
from supertuner.core.host import Host
from supertuner.core.types import bytes_text
from supertuner.memory.cuda import open_cuda
from supertuner.memory.machines import MACHINES, Figure, Machine
from supertuner.memory.probe import Facts, GpuFacts, free_gpu_bytes, host_available_bytes, probe
from supertuner.memory.telemetry.nvml import open_nvml
from supertuner.plan.forecast.model import Room

THIS = "this"
DEFAULT = "gh200-96"


def room_of(name: str | None, host: Host, device: int = 0) -> Room:
    """The machine of that name; without one, this machine if it has a GPU, else a GH200. `device` is which of this
    machine's GPUs."""
    if name is not None and name != THIS:
        return known(name)
    driver = open_cuda()
    facts = probe(host, driver, open_nvml())
    if facts.gpus:
        gpu = next((one for one in facts.gpus if one.device.number == device), facts.gpus[0])
        free = free_gpu_bytes(facts, driver, host, gpu.device.number)
        return _this_gpu(facts, gpu, free, host_available_bytes(facts, host))
    if name is None:
        room = known(DEFAULT)
        return replace(room, source=f"no GPU here, so a {room.title} is taken; --machine names another, or this")
    available = host.memory_available()
    text = "available now; there is no GPU" if available is not None else "there is no GPU, and nobody tells its memory"
    return Room(MACHINES["cpu"], "this machine", None, available, text)


def known(name: str) -> Room:
    """A row of the table. A miss lists the hits."""
    if name not in MACHINES or name == "cpu":
        there = ", ".join(key for key in MACHINES if key != "cpu")
        raise OptionError(f"--machine {name}: not a machine that is known here; there are {there}, and this")
    machine = MACHINES[name]
    return Room(
        machine, machine.title, _bytes(machine.gpu_bytes), _bytes(machine.host_bytes), "as the table of machines says"
    )


def _this_gpu(facts: Facts, gpu: GpuFacts, free: int | None, host_free: int | None) -> Room:
    total = gpu.device.total_bytes
    machine = facts.machine or _unknown(gpu.device.name, total, bool(facts.one_pool))
    usable = total if free is None else free
    source = "free now" if usable == total else f"free now, of {bytes_text(total)}"
    return Room(machine, f"this machine ({gpu.device.name})", usable, host_free, source)


def _unknown(name: str, total: int, one_pool: bool) -> Machine:
    """A GPU that the table does not have: its memory is known, its speed is not."""
    memory = Figure(float(total), "what its driver says")
    return replace(MACHINES["cpu"], key=THIS, title=name, gpu_bytes=memory, one_pool=one_pool)


def _bytes(figure: Figure) -> int | None:
    return None if figure.value is None else int(figure.value)
