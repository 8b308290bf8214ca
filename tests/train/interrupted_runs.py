"""Runs that signals interrupt at a chosen place; `python -m tests.train.interrupted_runs` is a fork server for them.

A file beside a run's configuration (`NAME.interrupt`) says where the run sends itself signals: at a random moment after
a part of the run has begun (a timer), or at a chosen call inside it (Python's profile hook). Nothing of the product is
replaced: each hooked function starts the timer or the hook, and then does what it always does.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tests.ctrl_c import READS_TENSOR, CtrlC, call_of
from tests.train.runs import TrainingForkServer, artefacts, config

PLACES = {
    "run": ("supertuner.api.training", "train"),
    "staging": ("supertuner.data.staging.stager", "DatasetStager.open"),
    "encoding": ("supertuner.train.encoding.corpus_caches", "CorpusCaches.open"),
    "loading": ("supertuner.train.setup", "load_experts"),
    "resuming": ("supertuner.train.setup", "find_resume_checkpoint"),
    "validation": ("supertuner.train.loop", "validate"),
    "saving": ("supertuner.train.checkpoint.async_saver", "CheckpointSaver.save"),
    "writing": ("supertuner.train.checkpoint.async_saver", "save_checkpoint"),
    "export": ("supertuner.train.export.export", "RunExporter.finish"),
}
"""Part of a run → the function that does it, in the module where it is looked up."""
IN_LOOP = ("validation", "saving", "writing")
"""Places of the training loop, in which the first Ctrl-C only requests to save and stop."""
REPEATED = (*IN_LOOP, "staging", "encoding")
"""Places that a run reaches at least twice."""
TROUBLE = ("Traceback", "damaged", "broken", "cannot be", "skipped", "set aside", "not loaded completely", "fail")
"""Words of messages about files that are not sound, and of errors."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """Where and when a run sends itself signals."""

    place: str
    occurrence: int = 1
    """The function's first, second, … call."""
    seconds: float | None = None
    """After the begin of the place; None: none by time."""
    call: str = ""
    """Instead of a time: a function that is called inside the place; its `number`-th call."""
    number: int = 1
    is_lost: bool = False
    """Instead of a time: the signal comes at once, inside a weak-reference callback, where Python ignores what is
    raised."""
    before: int = 0
    """SIGINTs at the begin of the place, before the one at the moment: 1 in the loop, which only a second one ends."""


def write_interruption(file: Path, interruption: Interruption | None) -> None:
    """Say where the next run of this configuration is interrupted; None: nowhere."""
    file.with_suffix(".fired").unlink(missing_ok=True)
    spec = file.with_suffix(".interrupt")
    if interruption is None:
        spec.unlink(missing_ok=True)
    else:
        spec.write_text(json.dumps(asdict(interruption)))


def small_config(folder: Path, name: str) -> Path:
    """A run of two steps, with a validation and a checkpoint after each."""
    return config(
        folder,
        name,
        train={"max_steps": 2, "batch_size": 1},
        gh200_optimizations={"enable_batch_size_rampup": False},
        checkpoints={"every_steps": 1, "keep": 5},
        validation={"at_start": False, "every_steps": 1, "inference_steps": 1},
    )


def interrupt(parent: TrainingForkServer, file: Path, interruption: Interruption) -> tuple[bool, int, str]:
    """Start the run and interrupt it: (whether the signal was sent, exit code, everything that it printed)."""
    write_interruption(file, interruption)
    code, printed = parent.code_and_output("train", str(file))
    fired = file.with_suffix(".fired").exists()
    write_interruption(file, None)
    return fired, code, printed


def require_stopped_cleanly(run: Path, code: int, printed: str) -> None:
    """The run ended as one that was stopped, and neither it nor its events call a file broken."""
    assert code == 130, (code, printed[-2000:])
    events = (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else ""
    warnings = [line for line in events.splitlines() if '"warning"' in line]
    found = [word for word in TROUBLE if word in printed or any(word in line for line in warnings)]
    assert found == [], (found, printed[-3000:], warnings)


def require_same_result(whole: Path, run: Path) -> None:
    """The resumed run has the files of the uninterrupted one, bit for bit."""
    expected, found = artefacts(whole), artefacts(run)
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


def place_seconds(parent: TrainingForkServer, folder: Path, name: str) -> dict[str, float]:
    """Seconds that each place takes in an undisturbed run of this name, from scratch."""
    file = small_config(folder, name)
    file.with_suffix(".durations").write_text("")
    assert parent.train(file) == 0, parent.output()
    found = [json.loads(line) for line in file.with_suffix(".durations").read_text().splitlines()]
    file.with_suffix(".durations").unlink()
    return {place: max(seconds for at, seconds in found if at == place) for place, _ in found}


def forget(folder: Path, name: str, *, data: bool = False) -> None:
    """Remove the run's folder; with `data`, its caches and all staged arenas as well."""
    shutil.rmtree(folder / name, ignore_errors=True)
    if data:
        for other in (f"cache-{name}", "arenas", "disk-arenas"):
            shutil.rmtree(folder / other, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RandomInterrupts:
    """Interrupts runs at random moments of one place; after each, the run is resumed, and must end with the same bits.

    In the loop the moment is that of a second Ctrl-C, which stops at once; elsewhere that of the first.
    """

    parent: TrainingForkServer
    folder: Path
    place: str
    usual_s: float
    """How long the place takes in an undisturbed run, which is in `folder / "whole"`."""

    def trial(self, rng: random.Random) -> bool:
        """One interrupted and resumed run; whether the signal came before its end."""
        in_loop, name = self.place in IN_LOOP, f"at-{self.place}"
        file = small_config(self.folder, name)
        forget(self.folder, name, data=self.place in ("staging", "encoding", "run"))
        if self.place == "resuming":
            interrupt(self.parent, file, Interruption("validation", 2, call=READS_TENSOR, before=1))
        occurrence = rng.choice((1, 2)) if self.place in REPEATED else 1
        moment = Interruption(self.place, occurrence, seconds=rng.uniform(0, self.usual_s), before=int(in_loop))
        fired, code, printed = interrupt(self.parent, file, moment)
        run = self.folder / name / "run"
        finished = code == 0 and not in_loop and "trained 2 steps" in printed
        if fired and not finished:  # a first Ctrl-C in the last window changes nothing
            require_stopped_cleanly(run, code, printed)
        if self.parent.train(file) != 0:
            raise AssertionError(f"the resumed run failed: {self.parent.output()}")
        require_same_result(self.folder / "whole" / "run", run)
        return fired


# ── inside the run's process ─────────────────────────────────────────────────────────────────────────────────────


class _Signals:
    """Sends the signals of one run to its own process."""

    def __init__(self, file: Path) -> None:
        self._fired_file = file.with_suffix(".fired")
        self._durations = file.with_suffix(".durations")
        spec = file.with_suffix(".interrupt")
        self._spec = Interruption(**json.loads(spec.read_text())) if spec.exists() else None
        self._calls = 0
        signal.signal(signal.SIGALRM, self._on_alarm)

    def hook(self, place: str) -> None:
        """Let the place's function call `_begin` first."""
        owner: Any = importlib.import_module(PLACES[place][0])
        *classes, name = PLACES[place][1].split(".")
        for part in classes:
            owner = getattr(owner, part)
        function: Callable[..., Any] = getattr(owner, name)

        def begin_and_call(*arguments: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            self._begin(place)
            try:
                return function(*arguments, **options)
            finally:
                if self._durations.exists():
                    with self._durations.open("a") as out:
                        out.write(json.dumps([place, time.perf_counter() - started_s]) + "\n")

        setattr(owner, name, begin_and_call)

    def _begin(self, place: str) -> None:
        spec = self._spec
        if spec is None or spec.place != place:
            return
        self._calls += 1
        if self._calls != spec.occurrence:
            return
        for _ in range(spec.before):
            signal.raise_signal(signal.SIGINT)
        if spec.is_lost:
            self._fired_file.touch()
            watched = _Signals.__new__(_Signals)
            reference = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
            del watched
            assert reference() is None
        elif spec.seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, spec.seconds))
        else:
            CtrlC(call_of(spec.call), spec.number, self._fired_file.touch).start()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self._fired_file.touch()
        signal.raise_signal(signal.SIGINT)


def _main_with_signals(main: Callable[[], None]) -> Callable[[], None]:
    def interrupted_main() -> None:
        file = Path(sys.argv[-1])
        if file.with_suffix(".interrupt").exists() or file.with_suffix(".durations").exists():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start its jobs with SIGINT ignored
            signals = _Signals(file)
            for place in PLACES:
                signals.hook(place)
        main()

    return interrupted_main


if __name__ == "__main__":
    import supertuner.cli
    from tests.train.runs import serve

    supertuner.cli.main = _main_with_signals(supertuner.cli.main)  # type: ignore[assignment]
    serve()
