"""StageResult: the figures of a staged dataset; and the check that not too many of its files are broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.errors import StageError, TooManyBrokenFilesError
from supertuner.core.events import SetAsideEvent
from supertuner.core.types import JSON, MediaKind, escape_for_terminal

_MAX_LISTED = 10


@dataclass(slots=True)
class FormatFigures:
    """Files and bytes of one file format."""

    files: int = 0
    nbytes: int = 0
    stored_bytes: int = 0
    codec: str = "raw"

    def add(self, files: int, nbytes: int, stored: int) -> None:
        self.files += files
        self.nbytes += nbytes
        self.stored_bytes += stored

    def as_json(self) -> dict[str, JSON]:
        return {
            "files": self.files,
            "bytes": self.nbytes,
            "stored_bytes": self.stored_bytes,
            "codec": self.codec,
            "ratio": round(self.nbytes / self.stored_bytes, 4) if self.stored_bytes else 1.0,
        }


@dataclass(frozen=True, slots=True)
class StageResult:
    """How a dataset was staged or reused."""

    dataset: str
    kind: MediaKind
    arena: str
    """Name of the arena in `home`."""
    home: str
    fingerprint: str
    reused: bool
    files: int
    nbytes: int
    """Bytes of the files before compression."""
    stored_bytes: int
    """Bytes that the arena occupies, with index and padding."""
    seconds: float
    """Duration of staging, or of finding that nothing had changed."""
    formats: Mapping[str, JSON]
    set_aside: tuple[SetAsideEvent, ...]
    without_caption: int
    reuse_reason: str = ""
    older_arenas: tuple[tuple[str, int], ...] = ()
    """Names and sizes of arenas of earlier versions of this dataset, which are kept until the user removes them."""

    def figures(self) -> dict[str, JSON]:
        """What `--json` prints."""
        rate = None if self.reused or not self.seconds else 1 / self.seconds
        return {
            "dataset": self.dataset,
            "kind": self.kind.value,
            "arena": self.arena,
            "home": self.home,
            "fingerprint": self.fingerprint,
            "reused": self.reused,
            "files": self.files,
            "bytes": self.nbytes,
            "stored_bytes": self.stored_bytes,
            "seconds": round(self.seconds, 4),
            "files_per_s": None if rate is None else float(f"{self.files * rate:.4g}"),
            "bytes_per_s": None if rate is None else round(self.nbytes * rate, 1),
            "formats": dict(self.formats),
            "set_aside": len(self.set_aside),
            "without_caption": self.without_caption,
        }


def require_few_broken(
    dataset: DatasetSettings, set_aside: Sequence[SetAsideEvent], staged_count: int, key_path: str
) -> None:
    """Raise TooManyBrokenFilesError if the settings do not allow this many broken files, or StageError if no file is
    usable. The message lists the first ones."""
    name, total = f"datasets[{dataset.id}]", staged_count + len(set_aside)
    share = len(set_aside) / total if total else 0.0
    if set_aside and dataset.strict:
        count = "1 file is" if len(set_aside) == 1 else f"{len(set_aside)} files are"
        remedy = f"repair or remove them, or set {key_path}.strict to false to skip them"
        lines = _broken_lines(set_aside, len(set_aside))
        raise TooManyBrokenFilesError(f"{name} is strict and {count} broken:\n{lines}\n{remedy}")
    if share > dataset.max_broken_share:
        remedy = f"repair or remove them, or set {key_path}.max_broken_share={_rounded_up(share)}"
        allowed = f"{share:.1%}, at most {dataset.max_broken_share:.1%} are allowed"
        broken, lines = f"{len(set_aside)} of {total} files are broken", _broken_lines(set_aside, _MAX_LISTED)
        raise TooManyBrokenFilesError(f"{name}: {broken} ({allowed}):\n{lines}\n{remedy}")
    if not staged_count:
        raise StageError(f"{name}: none of its {total} files is usable:\n{_broken_lines(set_aside, _MAX_LISTED)}")


def _broken_lines(set_aside: Sequence[SetAsideEvent], limit: int) -> str:
    lines = [f"  {escape_for_terminal(broken.file)}: {broken.reason}" for broken in set_aside[:limit]]
    if len(set_aside) > limit:
        lines.append(f"  and {len(set_aside) - limit} more")
    return "\n".join(lines)


def _rounded_up(share: float) -> float:
    """The share rounded up to a whole percent, so that it is short to type and sufficient."""
    return min(1.0, -(-share * 100 // 1) / 100)
