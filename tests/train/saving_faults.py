"""Saves checkpoints with a kill or an error at each of their system calls; a program for a preloaded process.

test_checkpoint_faults.py runs it with saving_faults.c preloaded, and it prints its observations as JSON. Each save runs
in a forked child, so that nothing has to be imported again.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from supertuner.core.errors import CheckpointError
from supertuner.core.host import HostFacts
from supertuner.train.checkpoint.load import find_checkpoints
from supertuner.train.checkpoint.resume import load_latest
from supertuner.train.checkpoint.write_files import CheckpointSharding
from tests.arena.arena_helpers import fork, wait
from tests.train.checkpoints import bytes_of, parts_at, save_parts, state_at, tree

COUNT, KILL_BEFORE, KILL_AFTER, KILL_INSIDE, FAIL_ONCE, FAIL_ON, SHORT = range(1, 8)
NAMES = {
    KILL_BEFORE: "killed before",
    KILL_AFTER: "killed after",
    KILL_INSIDE: "killed inside",
    FAIL_ONCE: "failed once",
    FAIL_ON: "disk full from here on",
    SHORT: "half written",
}
REFUSED = 3
SAID = "said"


@dataclass(frozen=True)
class SaveScenario:
    """The state of the folder before a save, and the save."""

    name: str
    prepare: Callable[[Path], None]
    keep: int
    step: int = 30
    shared: bool = False

    def save(self, folder: Path) -> None:
        if self.shared:
            save_in_turns(folder, self.step, self.keep)
        else:
            save_parts(folder, self.step, few_parts(self.step), state_at(self.step), keep=self.keep, host=HostFacts())


def save_in_turns(folder: Path, step: int, keep: int) -> None:
    """Two ranks write one checkpoint; here rank 1 writes when rank 0 begins to wait for it. So their system calls are
    the same in every run, and a fault of one ends both."""
    written = False

    def second() -> None:
        nonlocal written
        here = folder / f".saving-step-{step:08d}"
        done = [name for name in few_parts(step) if (here / f"{name}.shard-00000-of-00002.safetensors").exists()]
        if not written and len(done) == len(few_parts(step)):
            written = True
            save_share(folder, step, keep, 1, lambda: None)

    save_share(folder, step, keep, 0, second)


def save_share(folder: Path, step: int, keep: int, rank: int, go_on: Callable[[], None]) -> None:
    own: dict[str, dict[str, Tensor]] = {}
    begins: dict[str, dict[str, int]] = {}
    for part, tensors in few_parts(step).items():
        cut = {name: len(one) // 2 for name, one in tensors.items()}
        own[part] = {name: one[cut[name] :] if rank else one[: cut[name]] for name, one in tensors.items()}
        begins[part] = {name: cut[name] * rank for name in tensors}
    sharers = CheckpointSharding(rank, 2, "a-1", begins)
    save_parts(
        folder, step, own, state_at(step), keep=keep, host=HostFacts(), raise_if_abandoned=go_on, sharding=sharers
    )


def earlier(folder: Path, *steps: int, seed: int = 0) -> None:
    for step in steps:
        save_parts(folder, step, few_parts(step, seed), state_at(step), keep=9, host=HostFacts())


def few_parts(step: int, seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Enough parts for a first, a next and a last file; each further one adds three calls of the same kind."""
    return {name: tensors for name, tensors in parts_at(step, seed).items() if name.startswith("adapter.")}


def leave_remains(folder: Path) -> None:
    """Create what kills in earlier saves may have left."""
    earlier(folder, 10, 20)
    shutil.copytree(folder / "step-00000020", folder / ".saving-step-00000030")
    (folder / ".saving-step-00000030" / "manifest.json").unlink()
    shutil.copytree(folder / "step-00000010", folder / ".removing-step-00000005")
    (folder / ".removing-step-00000005" / "state.json").unlink()


def leave_without_name(folder: Path) -> None:
    """After a kill between the two renames of a replacement: the only complete checkpoint has a hidden name."""
    earlier(folder, 30, seed=1)
    os.rename(folder / "step-00000030", folder / ".replaced-step-00000030")
    shutil.copytree(folder / ".replaced-step-00000030", folder / ".saving-step-00000030")


SCENARIOS = (
    SaveScenario("the first", lambda folder: None, keep=2),
    SaveScenario("the next, and the oldest goes", lambda folder: earlier(folder, 10, 20), keep=2),
    SaveScenario("the same step, the only one, with other content", lambda folder: earlier(folder, 30, seed=1), keep=1),
    SaveScenario("the same step again", lambda folder: earlier(folder, 20, 30), keep=1),
    SaveScenario("over the remains of killed saves", leave_remains, keep=1),
    SaveScenario("over a replacement that was cut in two", leave_without_name, keep=1),
    SaveScenario("by two processes", lambda folder: earlier(folder, 10, 20), keep=2, shared=True),
)


class FaultTrial:
    """One scenario, prepared once and copied for each fault."""

    def __init__(self, work: Path, scenario: SaveScenario) -> None:
        self.scenario = scenario
        self.before, self.now = work / "before", work / "now"
        self.before.mkdir()
        scenario.prepare(self.before / "checkpoints")
        self.reset()
        found = load_latest(self.folder)
        self.old = None if found is None else bytes_of(found.path)
        scenario.save(self.folder)  # once, so that lazy imports are done
        self.reset()
        self.calls = self.count()
        self.finished = tree(self.folder)
        self.new = bytes_of(self.folder / f"step-{scenario.step:08d}")

    @property
    def folder(self) -> Path:
        return self.now / "checkpoints"

    def reset(self) -> None:
        shutil.rmtree(self.now, ignore_errors=True)
        shutil.copytree(self.before, self.now)

    def count(self) -> list[list[str]]:
        """Every call of an undisturbed save, in order: call, path, target."""
        log = os.open(self.now / "log", os.O_RDWR | os.O_CREAT, 0o644)
        ctypes.CDLL(None).faults_arm(COUNT, 0, 0, log)
        self.scenario.save(self.folder)
        counted = int(ctypes.CDLL(None).faults_calls())
        ctypes.CDLL(None).faults_arm(0, 0, 0, -1)
        os.close(log)
        calls = [line.split("\t") for line in (self.now / "log").read_text().splitlines()]
        assert len(calls) == counted
        return calls

    def run(self, mode: int, at: int, code: int = 0) -> str:
        """One save with one fault; returns whether the old or the new checkpoint was the latest afterwards."""
        where = f"{self.scenario.name}, mode {mode}, call {at}"
        self.reset()
        status = wait(fork(lambda: self._child(mode, at, code)))
        expected = {0, REFUSED} if mode in (FAIL_ONCE, FAIL_ON) else {0} if mode == SHORT else {-signal.SIGKILL}
        assert status in expected, f"{where}: the save ended with {status}"
        if status == REFUSED:
            said = (self.now / SAID).read_text()
            comfort = ("intact", "none yet", "not touched")
            # "exists": remains that could not be removed; the reason was reported when that was tried.
            reasons = (os.strerror(code), os.strerror(errno.EEXIST))
            assert any(r in said for r in reasons) and any(word in said for word in comfort), f"{where}: {said}"
        # A reader without the run's lock never finds an incomplete checkpoint, either.
        assert all(found.problem is None for found in find_checkpoints(self.folder)), (
            f"{where}: {find_checkpoints(self.folder)}"
        )
        found = load_latest(self.folder)
        content = None if found is None else bytes_of(found.path)
        assert content in (self.old, self.new), f"{where}: neither the old one nor the new one"
        assert status != 0 or content == self.new, f"{where}: it said that all went well"
        self.scenario.save(self.folder)
        assert tree(self.folder) == self.finished, f"{where}: the next save left {sorted(tree(self.folder))}"
        return "refused" if status == REFUSED else "new" if content == self.new else "old"

    def _child(self, mode: int, at: int, code: int) -> None:
        library = ctypes.CDLL(None)
        library.faults_arm(mode, at, code, -1)
        try:
            self.scenario.save(self.folder)
        except CheckpointError as error:
            library.faults_arm(0, 0, 0, -1)
            (self.now / SAID).write_text(str(error))
            os._exit(REFUSED)
        os._exit(0)


def faults_of(calls: list[list[str]], thorough: bool) -> list[tuple[int, int, int]]:
    """(mode, call, errno) for every call. The disk after one call is the disk before the next one."""
    everywhere = range(len(calls))
    last = everywhere if thorough else everywhere[-1:]
    writes = [at for at, (what, *_) in enumerate(calls) if what == "write"]
    changes = [at for at, (what, *_) in enumerate(calls) if what not in ("open", "openat", "opendir", "statvfs")]
    roomy = [at for at, (what, *_) in enumerate(calls) if what in ("create", "write", "fsync", "mkdir", "rename")]
    return [
        *((KILL_BEFORE, at, 0) for at in everywhere),
        *((KILL_AFTER, at, 0) for at in last),
        *((KILL_INSIDE, at, 0) for at in writes),
        *((SHORT, at, 0) for at in writes),
        *((FAIL_ONCE, at, errno.EIO) for at in (everywhere if thorough else changes)),
        *((FAIL_ONCE, at, errno.ENOSPC) for at in (everywhere if thorough else roomy)),
        *((FAIL_ON, at, errno.ENOSPC) for at in roomy),
    ]


def main(work: Path, thorough: bool) -> None:
    seen = {}
    for number, scenario in enumerate(SCENARIOS):
        place = work / f"{number}"
        place.mkdir()
        trial = FaultTrial(place, scenario)
        outcomes: dict[str, Counter[str]] = {}
        for mode, at, code in faults_of(trial.calls, thorough):
            outcomes.setdefault(NAMES[mode], Counter())[trial.run(mode, at, code)] += 1
        seen[scenario.name] = {"outcomes": outcomes, "calls": trial.calls}
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), thorough="thorough" in sys.argv)
