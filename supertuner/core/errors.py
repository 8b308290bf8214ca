"""Every error that a user can cause, as one tree; each message names the place, the value and the remedy.

    SuperTunerError                 anything that ends a command with a message instead of a traceback
    ├── ConfigError                 the configuration; carries every problem found in one pass (exit code 2)
    ├── OptionError                 an option of a command (exit code 2, as for options that the parser refuses)
    ├── RunFolderError              a run folder that is in use, or holds another run
    ├── SourceError                 a dataset's files as a whole: no such folder, nothing in it, unreadable metadata
    ├── StageError                  a dataset could not be staged
    │   ├── DoesNotFit              memory, tmpfs, disk or `memory_limit_gb` is too small; says how much is missing
    │   └── TooManyBroken           more files were set aside than `max_broken_share` allows
    ├── BrokenMedia                 one file's bytes are not what they should be; becomes a line in the set-aside list
    ├── ModelError                  a model: missing, gated, broken, of another family, or not made for this data
    ├── CacheError                  a cache of encoded samples cannot be made or trusted
    ├── MemoryEngineError           what was asked of the machine's memory cannot be had here: overflow, hints, a fact
    ├── TrainError                  training cannot begin or go on
    │   └── NotFinite               losses or gradients that are not numbers, too many times in a row
    ├── CheckpointError             a checkpoint cannot be written, or is not what was written
    ├── PeerError                   another process that works on the same run failed or is gone; its words are here
    ├── OutOfStep                   this one failed at what all processes must do together, so none of them can go on
    ├── BaselineError               a baseline cannot be captured, read, or run again (exit code 2: 1 is a regression)
    └── ArenaError                  an arena on this node
        ├── ArenaMissing            nothing committed under that name
        ├── ArenaExists             it is built already
        ├── ArenaBusy               another process is building, reading or removing it
        ├── ArenaFull               the memory or disk below it ran out
        └── ArenaDamaged            header, index or payload is not what was written, or comes from the future

Programming mistakes are assertions, not errors of this tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class SuperTunerError(Exception):
    """A user's problem, ready to print."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing wrong in a configuration."""

    path: str
    """Where: `datasets[0].in_memory.memory_limt_gb`; empty for the file as a whole."""
    message: str
    """What is wrong, the value, and what is allowed."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(SuperTunerError):
    exit_code = 2

    def __init__(self, source: str, problems: Sequence[ConfigProblem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = f"{len(self.problems)} error" + ("s" if len(self.problems) != 1 else "")
        lines = [f"config error in {source}", *(f"  {p}" for p in self.problems), f"{count}; nothing was started"]
        super().__init__("\n".join(lines))


class OptionError(SuperTunerError):
    exit_code = 2


class RunFolderError(SuperTunerError):
    pass


class SourceError(SuperTunerError):
    pass


class StageError(SuperTunerError):
    pass


class DoesNotFitError(StageError):
    pass


class TooManyBrokenFilesError(StageError):
    pass


class BrokenMediaError(SuperTunerError):
    pass


class ModelError(SuperTunerError):
    pass


class CacheError(SuperTunerError):
    pass


class MemoryEngineError(SuperTunerError):
    pass


class TrainError(SuperTunerError):
    pass


class NonFiniteError(TrainError):
    pass


class CheckpointError(SuperTunerError):
    pass


class PeerError(SuperTunerError):
    pass


class CollectiveError(SuperTunerError):
    pass


class BaselineError(SuperTunerError):
    exit_code = 2


class ArenaError(SuperTunerError):
    pass


class ArenaMissingError(ArenaError):
    pass


class ArenaExistsError(ArenaError):
    pass


class ArenaBusyError(ArenaError):
    pass


class ArenaFullError(ArenaError):
    pass


class ArenaDamagedError(ArenaError):
    """`file` is not what was written: `what`. The remedy is always to remove it and build it again."""

    def __init__(self, file: object, description: str, remedy: str = "") -> None:
        self.file = str(file)
        self.description = description
        self.remedy = remedy or "remove it with `supertuner arena rm` and stage again"
        super().__init__(f"{self.file}: {description}; {self.remedy}")
