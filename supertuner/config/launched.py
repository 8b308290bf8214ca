"""Who started this process, and which of how many it is: what torchrun and `accelerate launch` put into variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from supertuner.core.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Launched:
    """Where this process stands among those of its job."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and speaks for all."""
        return self.rank == 0


ALONE = Launched()
RANK, RANKS, LOCAL_RANK, LOCAL_RANKS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def launched(environ: Mapping[str, str]) -> Launched:
    """This process as its launcher numbered it; without a launcher it is alone."""
    if RANK not in environ and RANKS not in environ:
        return ALONE
    rank, ranks = _number(environ, RANK, 0), _number(environ, RANKS, 1)
    local_rank, local_ranks = _number(environ, LOCAL_RANK, rank), _number(environ, LOCAL_RANKS, ranks)
    if not (0 <= rank < ranks and 0 <= local_rank < local_ranks <= ranks):
        said = f"{RANK}={rank} {RANKS}={ranks} {LOCAL_RANK}={local_rank} {LOCAL_RANKS}={local_ranks}"
        problem = Problem("", f"{said} is no place among processes; start them with torchrun")
        raise ConfigError("the environment", [problem])
    return Launched(rank, ranks, local_rank, local_ranks)


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return otherwise
    if not text.isdecimal():
        raise ConfigError("the environment", [Problem(name, f"{text!r} is not a number; start with torchrun")])
    return int(text)
