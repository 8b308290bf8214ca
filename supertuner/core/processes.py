"""What the system says of a process by its number: running, stopped or gone, and what this one takes of the machine."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

ProcessState: TypeAlias = Literal["alive", "stopped", "gone"]


def process_start_ticks(pid: int) -> int:
    """When a process was begun, in the system's ticks; 0: there is none, or the system does not say."""
    return (_stat_fields(pid) or ("", 0))[1]


def process_state(pid: int, start_ticks: int) -> ProcessState:
    """Of the process that was begun at `since`. One that ended and was not fetched yet is gone."""
    fields = _stat_fields(pid)
    if fields is None or fields[1] != start_ticks or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "alive"


def boot_id() -> str:
    """What this machine is known by since it was started; empty where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace_id() -> str:
    """The same for processes that see each other under the same numbers."""
    machine_boot_id = boot_id()
    try:
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pid_namespace = ""
    # Nobody is looked at by number where the system does not say both.
    return f"{machine_boot_id} {pid_namespace}" if machine_boot_id and pid_namespace else f"only {os.getpid()}"


def process_io_bytes() -> int:
    """Read and written by this process so far, files and pipes; 0 where the system does not say."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counters = dict(line.split(":") for line in file)
    except (OSError, ValueError):
        return 0
    return int(counters.get("rchar", 0)) + int(counters.get("wchar", 0))


def _stat_fields(pid: int) -> tuple[str, int] | None:
    """State and time of birth. A name may hold anything: what counts comes after its last bracket."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return after[0].decode("ascii"), int(after[19])
