"""Who started this process, and which of how many it is: what torchrun and `accelerate launch` put into variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from supertuner.core.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Launched:
    """Where this process stands among those of its job."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    error_file: Path | None = None
    """Where the launcher looks for why this process failed."""

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and speaks for all."""
        return self.rank == 0


ALONE = Launched()
RANK, RANKS, LOCAL_RANK, LOCAL_RANKS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
COUNTS: Mapping[str, str] = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""How many processes others than torchrun have started, and who did."""
BY_ACCELERATE_ALONE = "ACCELERATE_USE_CPU"
"""Set where `accelerate launch` starts its command once, whatever number it was given."""
HOW = "start with torchrun, once on each node, as docs/scaling.md shows"


def launched(environ: Mapping[str, str]) -> Launched:
    """This process as its launcher numbered it; without a launcher it is alone. Refused: processes that would each
    train the whole run, because nobody told them of each other."""
    if RANK not in environ and RANKS not in environ:
        _require_alone(environ)
        return ALONE
    names = (RANK, RANKS, LOCAL_RANK, LOCAL_RANKS)
    if missing := [name for name in names if not environ.get(name, "").strip()]:
        there = ", ".join(f"{name}={environ[name]}" for name in names if name not in missing)
        raise _refused(", ".join(missing), f"not set, beside {there or 'nothing'}: which process is this? {HOW}")
    rank, ranks, local_rank, local_ranks = (_number(environ, name) for name in names)
    if not (0 <= rank < ranks and 0 <= local_rank < local_ranks <= ranks and local_rank <= rank):
        said = f"{RANK}={rank} {RANKS}={ranks} {LOCAL_RANK}={local_rank} {LOCAL_RANKS}={local_ranks}"
        raise _refused("", f"{said} is no place among processes; {HOW}")
    if ranks > 1 and (missing := [name for name in (ADDRESS, PORT) if not environ.get(name)]):
        raise _refused(", ".join(missing), f"not set: where do the {ranks} processes meet? {HOW}")
    error_file = environ.get(ERROR_FILE)
    return Launched(rank, ranks, local_rank, local_ranks, Path(error_file) if error_file else None)


def require_one_process(environ: Mapping[str, str], command: str) -> None:
    """Refuse a command that works for itself where a launcher started it several times: each would do the same, to the
    same files. Both numbers are a launcher's own; a container may have one of its job's in all its shells."""
    count = environ.get(RANKS, "").strip()
    if environ.get(LOCAL_RANK, "").strip() and count.isdecimal() and int(count) > 1:
        remedy = f"start `supertuner {command}` without torchrun or accelerate launch"
        what = f"{count} processes of `supertuner {command}` were started, which is for one"
        raise _refused(RANKS, f"{what}; {remedy}; training stages and encodes by itself, with all its processes")


def _require_alone(environ: Mapping[str, str]) -> None:
    for name, starter in COUNTS.items():
        count = environ.get(name, "").strip()
        if count.isdecimal() and int(count) > 1:
            what = f"{starter} started {count} processes that do not know of each other: {RANK} and {RANKS} are not set"
            raise _refused(name, f"{what}, and each would train the whole run; {HOW}")
    if environ.get(BY_ACCELERATE_ALONE) and environ.get(PORT):
        what = "accelerate was asked for more than one process, and started this one alone"
        remedy = "give it a configuration of distributed_type FSDP or MULTI_GPU and do not say --cpu, or start torchrun"
        raise _refused(PORT, f"{environ[PORT]} without {RANK}: {what}; {remedy}")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise _refused(name, f"{text!r} is not a number; {HOW}")
    return int(text)


def _refused(name: str, message: str) -> ConfigError:
    return ConfigError("the environment", [Problem(name, message)])
