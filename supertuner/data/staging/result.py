"""What became of staging a dataset, as figures for people and programs, and whether too much of it was broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from supertuner.config.settings.data import Dataset
from supertuner.core.errors import StageError, TooManyBroken
from supertuner.core.events import SetAside
from supertuner.core.types import JSON, MediaKind, on_screen

_SHOWN = 10


@dataclass(slots=True)
class FormatFigures:
    """What one real format took."""

    files: int = 0
    nbytes: int = 0
    stored: int = 0
    codec: str = "raw"

    def add(self, files: int, nbytes: int, stored: int) -> None:
        self.files += files
        self.nbytes += nbytes
        self.stored += stored

    def as_json(self) -> dict[str, JSON]:
        return {
            "files": self.files,
            "bytes": self.nbytes,
            "stored_bytes": self.stored,
            "codec": self.codec,
            "ratio": round(self.nbytes / self.stored, 4) if self.stored else 1.0,
        }


@dataclass(frozen=True, slots=True)
class StageResult:
    dataset: str
    kind: MediaKind
    arena: str
    """Its name in `home`."""
    home: str
    fingerprint: str
    reused: bool
    files: int
    nbytes: int
    """Of the files, before compression."""
    stored_bytes: int
    """Memory or disk really taken, index and padding included."""
    seconds: float
    """Of this call: staging, or finding that nothing had changed."""
    formats: Mapping[str, JSON]
    set_aside: tuple[SetAside, ...]
    without_caption: int
    why_reused: str = ""
    older: tuple[tuple[str, int], ...] = ()
    """Arenas of this dataset as it was before, and their sizes: kept until somebody removes them."""

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
            "files_per_s": None if rate is None else round(self.files * rate, 1),
            "bytes_per_s": None if rate is None else round(self.nbytes * rate, 1),
            "formats": dict(self.formats),
            "set_aside": len(self.set_aside),
            "without_caption": self.without_caption,
        }


def judge(dataset: Dataset, set_aside: Sequence[SetAside], staged: int, place: str) -> None:
    """TooManyBroken if the settings do not allow so many broken files; the list's first lines are in the message."""
    name, total = f"datasets[{dataset.id}]", staged + len(set_aside)
    share = len(set_aside) / total if total else 0.0
    if set_aside and dataset.strict:
        count = "1 file is" if len(set_aside) == 1 else f"{len(set_aside)} files are"
        remedy = f"mend or remove them, or set {place}.strict to false to leave them out"
        raise TooManyBroken(f"{name} is strict and {count} broken:\n{_lines(set_aside, len(set_aside))}\n{remedy}")
    if share > dataset.max_broken_share:
        remedy = f"mend or remove them, or allow it with --set {place}.max_broken_share={_rounded_up(share)}"
        allowed = f"{share:.1%}, at most {dataset.max_broken_share:.1%} are allowed"
        lines = _lines(set_aside, _SHOWN)
        raise TooManyBroken(f"{name}: {len(set_aside)} of {total} files are broken ({allowed}):\n{lines}\n{remedy}")
    if not staged:
        raise StageError(f"{name}: none of its {total} files can be used:\n{_lines(set_aside, _SHOWN)}")


def _lines(set_aside: Sequence[SetAside], shown: int) -> str:
    lines = [f"  {on_screen(one.file)}: {one.reason}" for one in set_aside[:shown]]
    if len(set_aside) > shown:
        lines.append(f"  and {len(set_aside) - shown} more")
    return "\n".join(lines)


def _rounded_up(share: float) -> float:
    """A share that a person would type, and that is enough."""
    return min(1.0, -(-share * 100 // 1) / 100)
