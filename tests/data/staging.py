"""Helpers for tests of staging: a sink that records, a stager, and a host described by files."""

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
    """A sink and progress that record everything. `on_phase` is called when a phase begins, e.g. to change files."""

    def __init__(self, on_phase: Callable[[str], None] = lambda title: None) -> None:
        self.events: list[Event] = []
        self.phases: list[tuple[str, int, int]] = []
        self._on_phase = on_phase

    def emit(self, event: Event, /) -> None:
        self.events.append(event)

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> ProgressPhase:
        self.phases.append((title, items, nbytes))
        self._on_phase(title)
        return super().phase(title)

    def set_aside(self) -> dict[str, str]:
        return {event.file: event.reason for event in self.events if isinstance(event, SetAsideEvent)}

    def warnings(self) -> str:
        return "\n".join(f"{event.what} {event.message}" for event in self.events if isinstance(event, WarningEvent))

    def decisions(self) -> dict[str, object]:
        return {event.what: event.value for event in self.events if isinstance(event, DecisionEvent)}


def dataset(folder: Path, /, **settings) -> DatasetSettings:
    return DatasetSettings.model_validate({"id": "set", "instance_data_dir": folder, **settings})


def stager(home: Path, sink: RecordingSink | None = None, host: HostFacts | None = None) -> DatasetStager:
    sink = sink or RecordingSink()
    return DatasetStager(ArenaHome(home), RunContext(home, sink, sink, host or HostFacts()))


def contents(home: Path, arena: str) -> dict[str, tuple[bytes, tuple[str, ...]]]:
    """Key → bytes and captions of every staged sample."""
    with StagedDataset.open(ArenaHome(home), arena) as staged:
        return {staged.key(i): (bytes(staged.media(i)), staged.captions(i)) for i in range(len(staged))}


def names(home: Path) -> list[str]:
    """All files in a home except its marker, including leftovers."""
    return sorted(name for name in os.listdir(home) if name != HOME_MARKER) if home.exists() else []


def machine(root: Path, *, total: int, available: int, tmpfs: Path, cgroup: int | None = None) -> HostFacts:
    """A host with this memory, on which the folder `tmpfs` is a tmpfs."""
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
