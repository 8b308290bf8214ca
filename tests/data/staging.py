"""What tests of staging share: a home, a stager that remembers what it was told, and a machine described by files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from supertuner.arena.home import HOME_MARKER, ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import DatasetSettings
from supertuner.core.events import DecisionEvent, Event, NullSink, ProgressPhase, SetAsideEvent, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.data.staging.staged_dataset import StagedDataset
from supertuner.data.staging.stager import DatasetStager


class RecordingSink(NullSink):
    """A sink and progress that keep everything; `when` is called as a phase begins, to change the world in between."""

    def __init__(self, when: Callable[[str], None] = lambda title: None) -> None:
        self.events: list[Event] = []
        self.phases: list[tuple[str, int, int]] = []
        self._when = when

    def emit(self, event: Event, /) -> None:
        self.events.append(event)

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        self.phases.append((title, items, nbytes))
        self._when(title)
        return super().phase(title)

    def set_aside(self) -> dict[str, str]:
        return {event.file: event.reason for event in self.events if isinstance(event, SetAsideEvent)}

    def warnings(self) -> str:
        return "\n".join(f"{event.what} {event.message}" for event in self.events if isinstance(event, WarningEvent))

    def decided(self) -> dict[str, object]:
        return {event.what: event.value for event in self.events if isinstance(event, DecisionEvent)}


def dataset(folder: Path, /, **settings) -> DatasetSettings:
    return DatasetSettings.model_validate({"id": "set", "instance_data_dir": folder, **settings})


def stager(home: Path, sink: RecordingSink | None = None, host: HostFacts | None = None) -> DatasetStager:
    sink = sink or RecordingSink()
    return DatasetStager(ArenaHome(home), RunContext(home, sink, sink, host or HostFacts()))


def contents(home: Path, arena: str) -> dict[str, tuple[bytes, tuple[str, ...]]]:
    """Everything staged: bytes and captions by key."""
    with StagedDataset.open(ArenaHome(home), arena) as staged:
        return {staged.key(i): (bytes(staged.media(i)), staged.captions(i)) for i in range(len(staged))}


def names(home: Path) -> list[str]:
    """What lies in a home, remains included, beside the mark that makes it one."""
    return sorted(name for name in os.listdir(home) if name != HOME_MARKER) if home.exists() else []


def machine(root: Path, *, total: int, available: int, tmpfs: Path, cgroup: int | None = None) -> HostFacts:
    """A host with that memory, on which `tmpfs` is one."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/mountinfo").write_text(
        f"1 0 0:1 / / rw - ext4 /dev/x rw\n2 1 0:2 / {tmpfs.resolve()} rw,nosuid shared:1 - tmpfs tmpfs rw\n"
    )
    (root / "proc/self/cgroup").write_text("0::/box\n" if cgroup is not None else "")
    if cgroup is not None:
        (root / "sys/fs/cgroup/box").mkdir(parents=True)
        (root / "sys/fs/cgroup/box/memory.max").write_text(f"{cgroup}\n")
        (root / "sys/fs/cgroup/box/memory.current").write_text("0\n")
    return HostFacts(root)
