"""Runs a configuration's training for some steps, several times over, and keeps what it took.

Each repeat is a process of its own that trains as `supertuner train` does. A short one comes first: it stages and
encodes what is not there yet, so that the repeats start alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from supertuner.config.settings.tree import RunConfig
from supertuner.config.sources.launcher import launched
from supertuner.config.sources.load import load as load_config
from supertuner.core.durable import write_json
from supertuner.core.errors import OptionError
from supertuner.core.events import Progress
from supertuner.core.host import Host
from supertuner.sinks.jsonlines import now_text
from supertuner.tools.baseline import code, machine, nvidia_smi
from supertuner.tools.baseline.job import EVENTS
from supertuner.tools.baseline.record import Job, Order
from supertuner.tools.baseline.report import baseline_report
from supertuner.tools.baseline.store import Baseline, place_for, save
from supertuner.tools.baseline.turns import Command, ended_by_sigterm, run_alone, scratch

STEPS: Final = 1000
REPEATS: Final = 3
PREPARED_STEPS: Final = 5
TRACE: Final = "trace.json.gz"
TRACE_STEPS: Final = 10
SAMPLES: Final = 50
"""Memory events of a measured run, about."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is run: settings, for so many steps. The run's folders are of names that nobody else has, and go away."""

    config: Path
    sets: tuple[str, ...]
    steps: int
    output_dir: Path
    name: str

    def order(self, out: Path, label: str, stop_after: int = 0) -> Order:
        sets = (
            *self.sets,
            f"run.name={self.name}-{label}",
            f"train.max_steps={self.steps}",
            "train.num_epochs=null",
            "checkpoints.resume=never",
            "report.wandb=null",
            f"report.memory_every_steps={max(1, self.steps // SAMPLES)}",
        )
        config = str(self.config.absolute())
        return Order(out=str(out / label), begun=0.0, config=config, sets=sets, stop_after=stop_after)

    def forget(self) -> None:
        """Remove the folders of its runs."""
        for folder in self.output_dir.glob(f"{self.name}-*"):
            shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration as it was given and as it is in force."""

    given: Mapping[str, Any]
    config: RunConfig


def settings_of(config: Path, sets: Sequence[str]) -> Settings:
    loaded = load_config(config, sets=sets)
    return Settings(loaded.config.model_dump(mode="json", exclude_unset=True), loaded.config)


def scenario(config: Path, sets: Sequence[str], steps: int, settings: RunConfig, name: str) -> Scenario:
    run = f"baseline-{name}-{token_hex(4)}"
    return Scenario(config, tuple(sets), steps, settings.run.output_dir, run)


def require_alone(environ: Mapping[str, str]) -> None:
    if launched(environ).ranks > 1:
        raise OptionError("a baseline starts its processes itself; give the command without torchrun or accelerate")


def capture(
    folder: Path,
    name: str,
    config: Path,
    *,
    sets: Sequence[str] = (),
    steps: int = STEPS,
    repeats: int = REPEATS,
    replace_old: bool = False,
    profile: bool = False,
    environ: Mapping[str, str],
    progress: Progress,
) -> tuple[Path, Baseline]:
    """Measure and keep; nothing is kept of a capture that fails or is stopped."""
    require_alone(environ)
    path = place_for(folder, name, replace_old)
    if profile and steps < TRACE_STEPS:
        raise OptionError(f"--profile needs {TRACE_STEPS} steps, and --steps is {steps}")
    settings = settings_of(config, sets)
    work = scenario(config, sets, steps, settings.config, name)
    with ExitStack() as opened:
        opened.enter_context(ended_by_sigterm())
        out = Path(opened.enter_context(scratch()))
        opened.callback(work.forget)
        report = machine.diagnostics(Host(), environ)
        write_json(out / "diagnostics.json", report)
        log = out / nvidia_smi.LOG
        unwatched = opened.enter_context(nvidia_smi.logged(log, environ))
        command = code.here(environ)
        cold = prepare(command, work, out, progress)
        jobs = [measure(command, work, out, at, repeats, progress) for at in range(1, repeats + 1)]
        trace = traced(command, work, out, progress) if profile else None
        notes = (unwatched,) if unwatched is not None else tuple(nvidia_smi.summary(log))
        baseline = Baseline(
            name=name,
            captured_at=now_text(),
            steps=min(len(job.steps) for job in jobs),
            jobs=tuple(jobs),
            cold_start_s=cold.start.first_step_s if cold.start.cold else None,
            machine=machine.facts(report),
            commit=code.commit_here(),
            config=settings.given,
            resolved=settings.config.model_dump(mode="json"),
            environment=machine.variables(environ),
            notes=notes,
        )
        extras = {"diagnostics.json": out / "diagnostics.json", EVENTS: out / "1" / EVENTS}
        extras |= {nvidia_smi.LOG: log} if log.is_file() else {}
        extras |= {TRACE: trace} if trace is not None else {}
        save(path, baseline, baseline_report(baseline, sorted(extras)), extras)
    return path, baseline


def prepare(command: Command, work: Scenario, out: Path, progress: Progress, label: str = "prepare") -> Job:
    """The first few steps of the run, which leave caches filled for all of it, and files in memory."""
    with progress.phase(f"preparing data and caches, {command.title}"):
        return _alone(command, work, work.order(out, label, min(work.steps, PREPARED_STEPS)))


def measure(command: Command, work: Scenario, out: Path, at: int, of: int, progress: Progress) -> Job:
    with progress.phase(f"measuring {work.steps:,} steps, {at} of {of}"):
        return _alone(command, work, work.order(out, str(at)))


def traced(command: Command, work: Scenario, out: Path, progress: Progress) -> Path:
    """A run of its own under torch's profiler: being watched takes time."""
    trace = out / TRACE
    with progress.phase(f"tracing {TRACE_STEPS} steps"):
        order = work.order(out, "trace", TRACE_STEPS)
        _alone(command, work, replace(order, trace=str(trace)))
    return trace


def _alone(command: Command, work: Scenario, order: Order) -> Job:
    """One run, whose folder goes away at once: its checkpoint may be large, and others follow."""
    job = run_alone(command, order)
    work.forget()
    return job
