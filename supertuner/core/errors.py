"""The tree of errors that a user can cause. Each message names the file or setting, the value and the remedy.

    SuperTunerError                  ends a command with a message instead of a traceback
    ├── ConfigError                  the configuration is invalid; carries all problems (exit code 2)
    ├── OptionError                  an option of a command is invalid (exit code 2, as for the parser's own errors)
    ├── RunFolderError               a run folder is in use, is damaged, or belongs to another run
    ├── SourceError                  the files of a dataset: the folder is missing or empty, metadata are unreadable
    ├── StageError                   a dataset could not be staged
    │   ├── DoesNotFitError          memory, tmpfs, disk or `memory_limit_gb` is too small; says how much is missing
    │   └── TooManyBrokenFilesError  more files were set aside than `max_broken_share` allows
    ├── BrokenMediaError             the content of one file is broken; the file is set aside
    ├── ModelError                   a model is missing, gated, damaged, of another family, or does not suit the data
    │   └── ModelUnreachableError    the hub does not answer, and the files are not in its cache
    ├── CacheError                   a cache of encoded samples cannot be built or is not valid
    ├── MemoryEngineError            this machine does not support a requested memory feature: overflow, hints
    ├── TrainError                   training cannot start or continue
    │   └── NonFiniteError           losses or gradients are not finite, too many times in a row
    ├── CheckpointError              a checkpoint cannot be written, or is damaged
    ├── PeerError                    another process of the run failed or exited; carries its message
    ├── CollectiveError              this process failed in a collective operation, so no rank can continue
    ├── HubError                     the Hugging Face hub refuses a push, or there is no valid token
    │   └── HubUnreachableError      the hub cannot be reached, or fails; it may work later
    ├── BaselineError                a baseline cannot be captured, read or rerun (exit code 2: 1 means a regression)
    └── ArenaError                   an arena on this node
        ├── ArenaMissingError        no committed arena of that name
        ├── ArenaExistsError         an arena of that name exists already
        ├── ArenaBusyError           another process builds, reads or removes it
        ├── ArenaFullError           the memory or disk is full
        └── ArenaDamagedError        header, index or data are damaged, or written by a later version

Programming errors are assertions, not errors of this tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class SuperTunerError(Exception):
    """An error of a user; its text is printed without a traceback."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem of a configuration."""

    path: str
    """The path of the key, `datasets[0].in_memory.memory_limt_gb`; "" for the file as a whole."""
    message: str
    """What is wrong, the value, and the allowed values."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@dataclass(frozen=True, slots=True)
class ConfigNote:
    """What a valid key of a configuration means here, or why it has no effect."""

    path: str
    """The path of the key; several, separated by commas, if they share the message."""
    message: str

    def __str__(self) -> str:
        return f"note: {self.path}: {self.message}"


class ConfigError(SuperTunerError):
    exit_code = 2

    def __init__(self, source: str, findings: Sequence[ConfigProblem | ConfigNote]) -> None:
        """`findings` are the problems, and notes about other keys, in the order in which they are shown."""
        self.source = source
        self.findings = tuple(findings)
        self.problems = tuple(finding for finding in findings if isinstance(finding, ConfigProblem))
        count = f"{len(self.problems)} error" + ("s" if len(self.problems) != 1 else "")
        # With notes in between, errors are marked; an error that spans several lines would look like a note otherwise.
        mark = "error: " if len(self.findings) > len(self.problems) else ""
        shown = [f"  {mark if isinstance(finding, ConfigProblem) else ''}{finding}" for finding in self.findings]
        super().__init__("\n".join([f"config error in {source}", *shown, f"{count}; nothing was started"]))

    @property
    def notes(self) -> tuple[ConfigNote, ...]:
        return tuple(finding for finding in self.findings if isinstance(finding, ConfigNote))


class OptionError(SuperTunerError):
    exit_code = 2


class RunFolderError(SuperTunerError):
    """A run folder is in use, is damaged, or belongs to another run."""


class SourceError(SuperTunerError):
    """The files of a dataset are unusable: the folder is missing or empty, metadata are unreadable."""


class StageError(SuperTunerError):
    """A dataset could not be staged."""


class DoesNotFitError(StageError):
    """Memory, tmpfs, disk or `memory_limit_gb` is too small; says how much is missing."""


class TooManyBrokenFilesError(StageError):
    """More files were set aside than `max_broken_share` allows."""


class BrokenMediaError(SuperTunerError):
    """The content of one file is broken; the file is set aside."""


class ModelError(SuperTunerError):
    """A model is missing, gated, damaged, of another family, or does not suit the data."""


class ModelUnreachableError(ModelError):
    """The Hugging Face hub does not answer, and the files are not in its cache."""


class CacheError(SuperTunerError):
    """A cache of encoded samples cannot be built or is not valid."""


class MemoryEngineError(SuperTunerError):
    """This machine does not support a requested memory feature: overflow, hints."""


class TrainError(SuperTunerError):
    """Training cannot start or continue."""


class NonFiniteError(TrainError):
    """Losses or gradients are not finite, too many times in a row."""


class CheckpointError(SuperTunerError):
    """A checkpoint cannot be written, or is damaged."""


class PeerError(SuperTunerError):
    """Another process of the run failed or exited; carries its message."""


class CollectiveError(SuperTunerError):
    """This process failed in a collective operation, so no rank can continue."""


class HubError(SuperTunerError):
    """The Hugging Face hub refuses a push, or there is no valid token."""


class HubUnreachableError(HubError):
    """The hub cannot be reached, or fails; it may work later."""


class BaselineError(SuperTunerError):
    exit_code = 2


class ArenaError(SuperTunerError):
    """A problem of an arena on this node."""


class ArenaMissingError(ArenaError):
    """No committed arena of that name."""


class ArenaExistsError(ArenaError):
    """An arena of that name exists already."""


class ArenaBusyError(ArenaError):
    """Another process builds, reads or removes it."""


class ArenaFullError(ArenaError):
    """The memory or disk is full."""


class ArenaDamagedError(ArenaError):
    """`file` of an arena is damaged. The default remedy is to remove the arena and stage again."""

    def __init__(self, file: object, description: str, remedy: str = "") -> None:
        self.file = str(file)
        self.description = description
        self.remedy = remedy or "remove it with `supertuner arena rm` and stage again"
        super().__init__(f"{self.file}: {description}; {self.remedy}")
