"""Measures a baseline: trains a configuration for some steps, several times, and stores times, losses and memory.

Each repeat is a separate process that trains exactly as `supertuner train` does. A short preparation run comes first:
it stages and encodes missing data, so that all repeats start from the same state.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Final

from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.launcher import read_launcher_environment
from supertuner.config.sources.load import load_config
from supertuner.core.durable import write_json
from supertuner.core.errors import OptionError
from supertuner.core.events import Progress
from supertuner.core.host import HostFacts
from supertuner.sinks.jsonlines import now_text
from supertuner.tools.baseline import code_versions as code
from supertuner.tools.baseline import machine_facts as machine
from supertuner.tools.baseline import nvidia_smi
from supertuner.tools.baseline.baseline_report import baseline_report
from supertuner.tools.baseline.job import EVENTS_FILE
from supertuner.tools.baseline.measured_process import JobCommand, MeasurementContext, run_job, scratch_folder
from supertuner.tools.baseline.record import MeasuredJob, MeasurementRequest
from supertuner.tools.baseline.store import Baseline, new_baseline_path, save_baseline

DEFAULT_STEPS: Final = 1000
DEFAULT_REPEATS: Final = 3
PREPARATION_STEPS: Final = 5
TRACE_FILE: Final = "trace.json.gz"
TRACE_STEPS: Final = 10
MEMORY_SAMPLES: Final = 50
"""Approximate number of memory measurements per measured run."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How a baseline is captured."""

    steps: int = DEFAULT_STEPS
    repeats: int = DEFAULT_REPEATS
    replace_old: bool = False
    """Replace an existing baseline of the same name."""
    profile: bool = False
    """Also store a trace of torch's profiler, from a separate run."""

    def __post_init__(self) -> None:
        if self.profile and self.steps < TRACE_STEPS:
            raise OptionError(f"--profile needs {TRACE_STEPS} steps, but --steps is {self.steps}; raise it")


@dataclass(frozen=True, slots=True)
class BaselineScenario:
    """What is run: a configuration for `steps` steps. Its run folders have unique names and are removed afterwards."""

    config: Path
    sets: tuple[str, ...]
    steps: int
    output_dir: Path
    name: str

    def request(self, out: Path, label: str, stop_after: int = 0) -> MeasurementRequest:
        sets = (
            *self.sets,
            f"run.name={self.name}-{label}",
            f"train.max_steps={self.steps}",
            "train.num_epochs=null",
            "checkpoints.resume=never",
            "report.wandb=null",
            f"report.memory_every_steps={max(1, self.steps // MEMORY_SAMPLES)}",
        )
        config = str(self.config.absolute())
        return MeasurementRequest(out=str(out / label), begun=0.0, config=config, sets=sets, stop_after=stop_after)

    def remove_run_folders(self) -> None:
        for folder in self.output_dir.glob(f"{self.name}-*"):
            shutil.rmtree(folder)


def build_scenario(config: RunConfig, path: Path, sets: Sequence[str], steps: int, name: str) -> BaselineScenario:
    """The scenario of a configuration that was loaded from a file with these overrides."""
    return BaselineScenario(path, tuple(sets), steps, config.run.output_dir, f"baseline-{name}-{token_hex(4)}")


def require_single_process(environ: Mapping[str, str]) -> None:
    if read_launcher_environment(environ).world_size > 1:
        raise OptionError("a baseline starts its own processes; run the command without torchrun or accelerate")


def capture_baseline(
    folder: Path, name: str, config: Path, sets: Sequence[str], options: CaptureOptions, context: MeasurementContext
) -> tuple[Path, Baseline]:
    """Measure and store baseline `name` in `folder`. A capture that fails or is interrupted stores nothing.

    Returns (the baseline's folder, the baseline).
    """
    environ = context.environ
    require_single_process(environ)
    path = new_baseline_path(folder, name, options.replace_old)
    settings = load_config(config, sets=sets).config
    scenario = build_scenario(settings, config, sets, options.steps, name)
    with ExitStack() as stack:
        out = stack.enter_context(scratch_folder())
        stack.callback(scenario.remove_run_folders)
        report = machine.doctor_report(HostFacts(), environ)
        write_json(out / "diagnostics.json", report)
        log = out / nvidia_smi.LOG_FILE
        not_logged_reason = stack.enter_context(nvidia_smi.log_gpus(log, environ))
        runner = ScenarioRunner(code.current_code(environ), scenario, out, context.progress)
        preparation = runner.prepare()
        jobs = [runner.measure(repeat, options.repeats) for repeat in range(1, options.repeats + 1)]
        trace = runner.profile() if options.profile else None
        baseline = Baseline(
            name=name,
            captured_at=now_text(),
            steps=min(len(job.steps) for job in jobs),
            jobs=tuple(jobs),
            cold_start_s=preparation.start.first_step_s if preparation.start.cold else None,
            machine=machine.comparable_facts(report),
            commit=code.current_commit(),
            config=settings.model_dump(mode="json", exclude_unset=True),
            resolved=settings.model_dump(mode="json"),
            environment=machine.compared_variables(environ),
            notes=(not_logged_reason,) if not_logged_reason is not None else tuple(nvidia_smi.summarize_log(log)),
        )
        extras = {"diagnostics.json": out / "diagnostics.json", EVENTS_FILE: out / "1" / EVENTS_FILE}
        extras |= {nvidia_smi.LOG_FILE: log} if log.is_file() else {}
        extras |= {TRACE_FILE: trace} if trace is not None else {}
        save_baseline(path, baseline, baseline_report(baseline, sorted(extras)), extras)
    return path, baseline


@dataclass(frozen=True, slots=True)
class ScenarioRunner:
    """Runs a scenario with one version of the code. It removes the run folder of each job at once, because its
    checkpoint may be large."""

    command: JobCommand
    scenario: BaselineScenario
    out: Path
    progress: Progress

    def prepare(self, label: str = "prepare") -> MeasuredJob:
        """Run the first few steps. This fills the caches for the whole run and warms the page cache."""
        with self.progress.phase(f"preparing data and caches, {self.command.title}"):
            return self._run(self.scenario.request(self.out, label, min(self.scenario.steps, PREPARATION_STEPS)))

    def measure(self, repeat: int, repeats: int) -> MeasuredJob:
        with self.progress.phase(f"measuring {self.scenario.steps:,} steps, {repeat} of {repeats}"):
            return self._run(self.scenario.request(self.out, str(repeat)))

    def profile(self) -> Path:
        """Trace a separate run with torch's profiler, whose overhead must not be part of the measured runs."""
        trace = self.out / TRACE_FILE
        with self.progress.phase(f"tracing {TRACE_STEPS} steps"):
            self._run(replace(self.scenario.request(self.out, "trace", TRACE_STEPS), trace=str(trace)))
        return trace

    def _run(self, request: MeasurementRequest) -> MeasuredJob:
        job = run_job(self.command, request)
        self.scenario.remove_run_folders()
        return job
