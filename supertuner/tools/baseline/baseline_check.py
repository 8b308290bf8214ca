"""Judges whether training got worse: a baseline against the current code, or two baselines against each other.

If the old code can run on this machine too, both run in turns, so that load changes of the machine affect both alike.
Otherwise the new measurements are judged by the stored ones, and a note in the result says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import supertuner
from supertuner.config.sources.load import load_config
from supertuner.core.errors import BaselineError, OptionError
from supertuner.core.events import Progress
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON
from supertuner.sinks.jsonlines import readable_time
from supertuner.tools.baseline import code_versions as code
from supertuner.tools.baseline import machine_facts as machine
from supertuner.tools.baseline.baseline_capture import (
    BaselineScenario,
    ScenarioRunner,
    build_scenario,
    require_single_process,
)
from supertuner.tools.baseline.measured_process import JobCommand, MeasurementContext, scratch_folder
from supertuner.tools.baseline.record import MeasuredJob
from supertuner.tools.baseline.regression import ComparisonResult, ComparisonTerms, judge_jobs
from supertuner.tools.baseline.rounds import (
    ComparisonOptions,
    ComparisonSide,
    JobPairs,
    both_fit,
    choose_turn_steps,
    is_judged_after,
    run_rounds,
)
from supertuner.tools.baseline.store import Baseline, find_baseline, load_baseline, require_config_file

STORED_NOTE: Final = "judged by the stored measurements"
TIME_FIGURES: Final = ("step", "time per sample", "start")
MEASURED_APART_NOTE: Final = (
    "the two sides were measured at different times, so differences in machine load are included"
)


def check_baseline(
    folder: Path,
    name: str,
    options: ComparisonOptions,
    context: MeasurementContext,
    *,
    config: Path | None = None,
    sets: Sequence[str] = (),
) -> tuple[Path, ComparisonResult]:
    """Run a baseline's scenario with the current code and judge it. Returns (the baseline's folder, the result).

    `config` replaces the stored configuration and `sets` overrides settings, for data that have moved since.
    """
    require_single_process(context.environ)
    path = find_baseline(folder, name)
    base = load_baseline(path)
    config = config or require_config_file(path)
    settings = load_config(config, sets=sets).config
    scenario = build_scenario(settings, config, sets, _step_count(options, base), base.name)
    with ExitStack() as stack:
        out = stack.enter_context(scratch_folder())
        stack.callback(scenario.remove_run_folders)
        old_code, reason = _old_code(base, options, context.environ)
        notes = (*_changed_settings_note(base, settings.model_dump(mode="json")), reason)
        if old_code is None:
            return path, _compare_with_stored(base, scenario, out, options, notes, context)
        old_side = ComparisonSide(stack.enter_context(old_code), scenario)
        new_side = ComparisonSide(code.current_code(context.environ), scenario)
        return path, _compare_in_rounds((old_side, new_side), out, options, notes, base.precision, context.progress)


def compare_baselines(folder: Path, names: Sequence[str], options: ComparisonOptions) -> tuple[Path, ComparisonResult]:
    """Compare two baselines by their stored measurements. Returns (folder of the second, the result)."""
    _, path = paths = [find_baseline(folder, name) for name in names]
    old, new = map(load_baseline, paths)
    result = judge_jobs(
        old.jobs,
        new.jobs,
        ComparisonTerms(turn_steps=-1, limit=options.limit),
        precision=old.precision,
        method=f"{_stored_text(old)}, and {_stored_text(new)}",
        notes=(f"{MEASURED_APART_NOTE}; --again runs both now, in turns",),
    )
    return path, _without_incomparable_times(result, old, new.machine, new.environment)


def compare_by_rerunning(
    folder: Path, names: tuple[str, str], options: ComparisonOptions, context: MeasurementContext
) -> tuple[Path, ComparisonResult]:
    """Compare two baselines by running both again, each with its own settings and its own code.

    Returns (folder of the second, the result). Raises BaselineError if the code of one is not available here.
    """
    require_single_process(context.environ)
    paths = [find_baseline(folder, name) for name in names]
    bases = [load_baseline(path) for path in paths]
    steps = options.steps or min(base.steps for base in bases)
    with ExitStack() as stack:
        out = stack.enter_context(scratch_folder())
        sides = []
        for path, base in zip(paths, bases, strict=True):
            config = require_config_file(path)
            scenario = build_scenario(load_config(config).config, config, (), steps, base.name)
            stack.callback(scenario.remove_run_folders)
            command = stack.enter_context(_baseline_code(base, context.environ))
            sides.append(ComparisonSide(replace(command, title=f"{base.name} ({command.title})"), scenario))
        return paths[1], _compare_in_rounds(sides, out, options, (), bases[0].precision, context.progress)


def _compare_in_rounds(
    sides: Sequence[ComparisonSide],
    out: Path,
    options: ComparisonOptions,
    notes: tuple[str, ...],
    precision: str,
    progress: Progress,
) -> ComparisonResult:
    old, new = sides
    prepared_jobs = []
    for side, label in ((old, "a"), (new, "b")):
        prepared_jobs.append(ScenarioRunner(side.command, side.scenario, out, progress).prepare(label))
        _require_expected_code(side.command, prepared_jobs[-1])
    gpu = _gpu_bytes() if any("gpu.reserved" in job.peaks for job in prepared_jobs) else None
    fit_together = both_fit([job.peaks for job in prepared_jobs], HostFacts(), gpu)
    turn_steps = choose_turn_steps(prepared_jobs, min(side.scenario.steps for side in sides)) if fit_together else 0
    one_by_one = "one after the other, because both do not fit into memory at once"
    how = f"in turns of {turn_steps} steps" if turn_steps else one_by_one
    method = f"{old.command.title} and {new.command.title}, {how}"
    terms = options.comparison_terms(turn_steps)

    def judge(pairs: JobPairs) -> ComparisonResult:
        return judge_jobs(pairs.old, pairs.new, terms, precision=precision, method=method, notes=notes)

    return judge(run_rounds(old, new, out, options, turn_steps, lambda pairs: bool(judge(pairs).undecided), progress))


def _compare_with_stored(
    base: Baseline,
    scenario: BaselineScenario,
    out: Path,
    options: ComparisonOptions,
    notes: tuple[str, ...],
    context: MeasurementContext,
) -> ComparisonResult:
    """Measure the current code and judge it by the stored jobs of `base`."""
    runner = ScenarioRunner(code.current_code(context.environ), scenario, out, context.progress)
    terms, method = options.comparison_terms(-1), _stored_text(base)
    notes = (*notes, f"{MEASURED_APART_NOTE}; --against CODE runs old code in turns with the current code")
    runner.prepare()
    jobs: list[MeasuredJob] = []
    while True:
        repeat = len(jobs) + 1
        jobs.append(runner.measure(repeat, max(repeat, options.rounds)))
        if repeat < options.max_rounds and not is_judged_after(repeat, options.rounds):
            continue
        result = judge_jobs(base.jobs, jobs, terms, precision=base.precision, method=method, notes=notes)
        if not result.undecided or repeat >= options.max_rounds:
            break
    facts = machine.comparable_facts(machine.doctor_report(HostFacts(), context.environ))
    return _without_incomparable_times(result, base, facts, machine.compared_variables(context.environ))


def _old_code(
    base: Baseline, options: ComparisonOptions, environ: Mapping[str, str]
) -> tuple[AbstractContextManager[JobCommand] | None, str]:
    """(the code of the old side, or None if it cannot run here; the reason for this choice, as a note)."""
    if options.against is not None:
        return code.other_code(options.against, environ), f"the old side is {options.against}, as requested"
    if options.stored:
        return None, "judged by the stored measurements, as requested"
    commit = base.commit
    if commit is None:
        return None, f"captured by an installed package, not a git checkout: {STORED_NOTE}"
    if commit.endswith("+"):
        return None, f"captured with uncommitted changes: {STORED_NOTE}"
    if commit == code.current_commit():
        return None, f"captured with this same commit, {commit[:10]}: {STORED_NOTE}"
    if code.resolve_commit(commit) is None:
        return None, f"commit {commit[:10]} is not in this checkout: {STORED_NOTE}"
    return code.other_code(commit, environ), f"captured at {commit[:10]}, which this checkout has and which ran again"


@contextmanager
def _baseline_code(base: Baseline, environ: Mapping[str, str]) -> Iterator[JobCommand]:
    here, version = code.current_commit(), base.jobs[0].versions.get("supertuner")
    if base.commit == here and (here is not None or version == supertuner.__version__):
        yield code.current_code(environ)
        return
    if base.commit is None or code.resolve_commit(base.commit) is None:
        code_name = version if base.commit is None else base.commit[:10]
        raise BaselineError(
            f"{base.name} was captured by code that is not available here ({code_name}"
            f"{', with uncommitted changes' if (base.commit or '').endswith('+') else ''}); compare without --again"
        )
    with code.other_code(base.commit, environ) as command:
        yield command


def _step_count(options: ComparisonOptions, base: Baseline) -> int:
    if options.steps is not None and options.steps > base.steps:
        raise OptionError(
            f"--steps {options.steps} is more than the {base.steps} steps of {base.name}; "
            "lower it, or capture the baseline with more"
        )
    return options.steps or base.steps


def _require_expected_code(command: JobCommand, job: MeasuredJob) -> None:
    """Raise if Python imported another supertuner than the requested one: the comparison would be meaningless."""
    if command.code_path is not None and Path(job.code).resolve().parent != command.code_path.resolve():
        raise BaselineError(f"{command.title} should have run from {command.code_path}, but ran from {job.code}")


def _changed_settings_note(base: Baseline, now: Mapping[str, Any]) -> tuple[str, ...]:
    """A note about the blocks of settings that differ from the baseline's; `run` and `arena` may differ."""
    before = {name: block for name, block in base.resolved.items() if name not in ("run", "arena")}
    changed = [name for name, block in before.items() if json.dumps(now.get(name)) != json.dumps(block)]
    return (f"settings differ from those of the baseline in: {', '.join(changed)}",) if changed else ()


def _without_incomparable_times(
    result: ComparisonResult, old: Baseline, facts: Mapping[str, JSON], environment: Mapping[str, str]
) -> ComparisonResult:
    """The result without times if the new side was measured on another machine or in another environment."""
    reasons = [
        *machine.differences(old.machine, facts),
        *machine.differences(old.environment, environment, machine.COMPARED_VARIABLES),
    ]
    if not reasons:
        return result
    figures = tuple(figure for figure in result.figures if figure.name not in TIME_FIGURES)
    note = f"times are not compared: {'; '.join(reasons)}"
    return replace(result, figures=figures, notes=(*result.notes, note), times_comparable=False)


def _stored_text(base: Baseline) -> str:
    return f"{len(base.jobs)} repeats of {base.name}, captured {readable_time(base.captured_at)}"


def _gpu_bytes() -> int | None:
    from supertuner.memory.cuda import open_cuda
    from supertuner.memory.driver import NotAvailable

    driver = open_cuda()
    devices = () if isinstance(driver, NotAvailable) else driver.devices()
    return devices[0].total_bytes if devices else None
