"""Rank and world size of this process, from the variables of torchrun and `accelerate launch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from supertuner.core.errors import ConfigError, ConfigProblem


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """The ranks of this process in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    error_file: Path | None = None
    """The file in which the launcher expects the reason if this process fails."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which writes files and prints for all."""
        return self.rank == 0


SINGLE_PROCESS_ENVIRONMENT = LauncherEnvironment()
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
OTHER_LAUNCHER_BY_VARIABLE: Mapping[str, str] = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""Variables in which other launchers store their number of processes, and the launchers."""
ACCELERATE_SINGLE_START = "ACCELERATE_USE_CPU"
"""Set when `accelerate launch` starts its command only once, regardless of the requested number of processes."""
LAUNCH_REMEDY = "start with torchrun, once on each node, as docs/scaling.md shows"


def read_launcher_environment(environ: Mapping[str, str]) -> LauncherEnvironment:
    """The ranks of this process; those of a single process without a launcher. Raises ConfigError if the variables are
    inconsistent, or if several processes were started without ranks: each would train the whole run."""
    if RANK not in environ and WORLD_SIZE not in environ:
        _refuse_uncoordinated_processes(environ)
        return SINGLE_PROCESS_ENVIRONMENT
    names = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE)
    if missing := [name for name in names if not environ.get(name, "").strip()]:
        present = ", ".join(f"{name}={environ[name]}" for name in names if name not in missing)
        problem = f"not set (set: {present or 'none'}), so the rank is unknown"
        raise _environment_error(", ".join(missing), f"{problem}; {LAUNCH_REMEDY}")
    rank, world_size, local_rank, local_world_size = (_read_number(environ, name) for name in names)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size and local_rank <= rank):
        variables = " ".join(f"{name}={int(environ[name])}" for name in names)
        raise _environment_error("", f"{variables} are inconsistent; {LAUNCH_REMEDY}")
    if world_size > 1 and (missing := [name for name in (MASTER_ADDR, MASTER_PORT) if not environ.get(name)]):
        problem = f"not set, so the {world_size} processes cannot find each other"
        raise _environment_error(", ".join(missing), f"{problem}; {LAUNCH_REMEDY}")
    error_file = environ.get(ERROR_FILE)
    return LauncherEnvironment(rank, world_size, local_rank, local_world_size, Path(error_file) if error_file else None)


def require_single_process(environ: Mapping[str, str], command: str) -> None:
    """Raise ConfigError if a launcher started several processes of a single-process command: all would write the same
    files. Both LOCAL_RANK and WORLD_SIZE must be set, because a container may export one of them in every shell."""
    count = environ.get(WORLD_SIZE, "").strip()
    if environ.get(LOCAL_RANK, "").strip() and count.isdecimal() and int(count) > 1:
        reason = f"{count} processes of `supertuner {command}` were started, but it must run as one"
        remedy = f"start `supertuner {command}` without torchrun or accelerate launch"
        other = "`supertuner train` stages and encodes too, with all its processes"
        raise _environment_error(WORLD_SIZE, f"{reason}; {remedy}; {other}")


def _refuse_uncoordinated_processes(environ: Mapping[str, str]) -> None:
    for name, launcher in OTHER_LAUNCHER_BY_VARIABLE.items():
        count = environ.get(name, "").strip()
        if count.isdecimal() and int(count) > 1:
            reason = f"{launcher} started {count} processes without {RANK} and {WORLD_SIZE}"
            raise _environment_error(name, f"{reason}, and each would train the whole run; {LAUNCH_REMEDY}")
    if environ.get(ACCELERATE_SINGLE_START) and environ.get(MASTER_PORT):
        reason = "accelerate was configured for several processes, but started only one"
        remedy = "use a configuration with distributed_type FSDP or MULTI_GPU and without --cpu, or start with torchrun"
        raise _environment_error(MASTER_PORT, f"{environ[MASTER_PORT]} without {RANK}: {reason}; {remedy}")


def _read_number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise _environment_error(name, f"{text!r} is not a number; {LAUNCH_REMEDY}")
    return int(text)


def _environment_error(name: str, message: str) -> ConfigError:
    return ConfigError("the environment", [ConfigProblem(name, message)])
