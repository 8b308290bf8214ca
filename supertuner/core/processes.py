"""Facts about processes from /proc: their state by process id, and the I/O of this process."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

ProcessState: TypeAlias = Literal["alive", "stopped", "gone"]


def process_start_ticks(pid: int) -> int:
    """When process `pid` was started, in clock ticks since boot; 0 if it does not exist or that is unknown."""
    return (_stat_fields(pid) or ("", 0))[1]


def process_state(pid: int, start_ticks: int) -> ProcessState:
    """The state of the process `pid` that was started at `start_ticks`. A zombie counts as gone."""
    fields = _stat_fields(pid)
    if fields is None or fields[1] != start_ticks or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "alive"


def boot_id() -> str:
    """An id of this machine since its last boot; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace_id() -> str:
    """An id of this boot and PID namespace; processes with equal ids see each other under the same process ids."""
    machine_boot_id = boot_id()
    try:
        pid_namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pid_namespace = ""
    # If either is unknown, the id is unique to this process, so that process ids are not compared.
    return f"{machine_boot_id} {pid_namespace}" if machine_boot_id and pid_namespace else f"only {os.getpid()}"


def process_io_bytes() -> int:
    """Bytes that this process has read and written, including pipes; 0 if unknown."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counters = dict(line.split(":") for line in file)
    except (OSError, ValueError):
        return 0
    return int(counters.get("rchar", 0)) + int(counters.get("wchar", 0))


def _stat_fields(pid: int) -> tuple[str, int] | None:
    """(state, start ticks) of a process; None if it does not exist. The process name may contain any character, so the
    fields are parsed after its last closing parenthesis."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return after[0].decode("ascii"), int(after[19])
