"""Whether training got worse: a baseline against the code here, or two baselines against each other.

Where the old code can run here too, both run in turns and the machine's weather is the same for both. Where it cannot,
what is measured now is judged by what was kept, and that is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import supertuner
from supertuner.core.errors import BaselineError, OptionError
from supertuner.core.events import Progress
from supertuner.core.host import HostFacts
from supertuner.sinks.jsonlines import readable_time
from supertuner.tools.baseline import code_versions as code
from supertuner.tools.baseline import machine_facts as machine
from supertuner.tools.baseline.baseline_capture import (
    DEFAULT_REPEATS,
    BaselineScenario,
    build_scenario,
    load_settings,
    measure_repeat,
    require_single_process,
    run_preparation,
)
from supertuner.tools.baseline.measured_process import JobCommand, exit_on_sigterm, scratch_dir
from supertuner.tools.baseline.record import MeasuredJob
from supertuner.tools.baseline.regression import DEFAULT_LIMIT, ComparisonResult, ComparisonTerms, judge_jobs
from supertuner.tools.baseline.rounds import (
    ComparisonSide,
    JobPairs,
    both_fit,
    choose_turn_steps,
    count_looks,
    is_judged_after,
    run_rounds,
)
from supertuner.tools.baseline.store import Baseline, find_baseline, load_baseline, require_config_file

TIME_FIGURES: Final = ("step", "time per sample", "start")
MEASURED_APART_NOTE: Final = "captured apart, so the machine's weather is in this"


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """How a comparison is to be made."""

    limit: float = DEFAULT_LIMIT
    rounds: int = DEFAULT_REPEATS
    max_rounds: int = 3 * DEFAULT_REPEATS
    steps: int | None = None
    """None: as many as the baseline has."""

    def __post_init__(self) -> None:
        if self.max_rounds < self.rounds:
            raise OptionError(
                f"--most {self.max_rounds} is below --repeats {self.rounds}; raise it, or lower --repeats"
            )

    def comparison_terms(self, turn_steps: int) -> ComparisonTerms:
        return ComparisonTerms(turn_steps, self.limit, count_looks(self.rounds, self.max_rounds))


def check_baseline(
    folder: Path,
    name: str,
    options: ComparisonOptions,
    *,
    config: Path | None = None,
    sets: Sequence[str] = (),
    against: str | None = None,
    stored: bool = False,
    environ: Mapping[str, str],
    progress: Progress,
) -> tuple[Path, ComparisonResult]:
    """Run a baseline's scenario with the code here, and judge it. `config` and `sets` say where its data are now."""
    require_single_process(environ)
    path = find_baseline(folder, name)
    base = load_baseline(path)
    config_path = config or require_config_file(path)
    settings = load_settings(config_path, sets)
    baseline_scenario = build_scenario(config_path, sets, _step_count(options, base), settings.config, base.name)
    notes = _changed_settings_note(base, settings.config.model_dump(mode="json"))
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        out = Path(stack.enter_context(scratch_dir()))
        stack.callback(baseline_scenario.remove_run_folders)
        old_code, reason = _old_code(base, against, stored, environ)
        if old_code is None:
            return path, _compare_with_stored(
                base, baseline_scenario, out, options, (*notes, reason), environ, progress
            )
        old_side = ComparisonSide(stack.enter_context(old_code), baseline_scenario)
        new_side = ComparisonSide(code.current_code(environ), baseline_scenario)
        return path, _compare_in_rounds(old_side, new_side, out, options, (*notes, reason), base.precision, progress)


def compare_baselines(
    folder: Path, names: tuple[str, str], options: ComparisonOptions
) -> tuple[Path, ComparisonResult]:
    """Two baselines by what was kept of them."""
    path, (old, new) = find_baseline(folder, names[1]), (load_baseline(find_baseline(folder, name)) for name in names)
    notes = (f"{MEASURED_APART_NOTE}; --again runs both now, in turns",)
    result = judge_jobs(
        old.jobs,
        new.jobs,
        ComparisonTerms(turn_steps=-1, limit=options.limit),
        precision=old.precision,
        method=f"{_stored_text(old)}, and {_stored_text(new)}",
        notes=notes,
    )
    differences = [
        *machine.differences(old.machine, new.machine),
        *machine.differences(old.environment, new.environment, machine.COMPARED_VARIABLES),
    ]
    return path, _without_times(result, differences) if differences else result


def compare_by_rerunning(
    folder: Path, names: tuple[str, str], options: ComparisonOptions, *, environ: Mapping[str, str], progress: Progress
) -> tuple[Path, ComparisonResult]:
    """Two baselines, both run here again: each with its own settings and its own code."""
    require_single_process(environ)
    paths = [find_baseline(folder, name) for name in names]
    old, new = (load_baseline(path) for path in paths)
    steps = options.steps or min(old.steps, new.steps)
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        out = Path(stack.enter_context(scratch_dir()))
        sides = []
        for path, base in zip(paths, (old, new), strict=True):
            config = require_config_file(path)
            baseline_scenario = build_scenario(config, (), steps, load_settings(config, ()).config, base.name)
            stack.callback(baseline_scenario.remove_run_folders)
            command = stack.enter_context(_baseline_code(base, environ))
            sides.append(ComparisonSide(replace(command, title=f"{base.name} ({command.title})"), baseline_scenario))
        return paths[1], _compare_in_rounds(sides[0], sides[1], out, options, (), old.precision, progress)


def _compare_in_rounds(
    old: ComparisonSide,
    new: ComparisonSide,
    out: Path,
    options: ComparisonOptions,
    notes: tuple[str, ...],
    precision: str,
    progress: Progress,
) -> ComparisonResult:
    prepared_jobs = [
        run_preparation(side.command, side.scenario, out, progress, label) for side, label in ((old, "a"), (new, "b"))
    ]
    _require_expected_code(old.command, prepared_jobs[0])
    _require_expected_code(new.command, prepared_jobs[1])
    gpu = _gpu_bytes() if any("gpu.reserved" in job.peaks for job in prepared_jobs) else None
    fit_together = both_fit([job.peaks for job in prepared_jobs], HostFacts(), gpu)
    turn_steps = choose_turn_steps(prepared_jobs, min(old.scenario.steps, new.scenario.steps)) if fit_together else 0
    method = (
        f"in turns of {turn_steps} steps" if turn_steps else "one after the other: both do not fit into memory at once"
    )
    method = f"{old.command.title} and {new.command.title}, {method}"

    def judge_pairs(pairs: JobPairs) -> ComparisonResult:
        return judge_jobs(
            pairs.old, pairs.new, options.comparison_terms(turn_steps), precision=precision, method=method, notes=notes
        )

    pairs = run_rounds(
        old,
        new,
        out,
        turn_steps=turn_steps,
        rounds=options.rounds,
        max_rounds=options.max_rounds,
        undecided=lambda pairs: bool(judge_pairs(pairs).undecided),
        progress=progress,
    )
    return judge_pairs(pairs)


def _compare_with_stored(
    base: Baseline,
    scenario: BaselineScenario,
    out: Path,
    options: ComparisonOptions,
    notes: tuple[str, ...],
    environ: Mapping[str, str],
    progress: Progress,
) -> ComparisonResult:
    """The code here, measured now, by what was kept then."""
    command = code.current_code(environ)
    notes = (*notes, f"{MEASURED_APART_NOTE}; --against CODE runs old code beside, in turns")
    run_preparation(command, scenario, out, progress)
    jobs: list[MeasuredJob] = []
    while True:
        repeat = len(jobs) + 1
        jobs.append(measure_repeat(command, scenario, out, repeat, max(repeat, options.rounds), progress))
        if repeat < options.max_rounds and not is_judged_after(repeat, options.rounds):
            continue
        result = judge_jobs(
            base.jobs,
            jobs,
            options.comparison_terms(-1),
            precision=base.precision,
            method=_stored_text(base),
            notes=notes,
        )
        if not result.undecided or repeat >= options.max_rounds:
            break
    facts_here = machine.comparable_facts(machine.doctor_report(HostFacts(), environ))
    differences = [
        *machine.differences(base.machine, facts_here),
        *machine.differences(base.environment, machine.compared_variables(environ), machine.COMPARED_VARIABLES),
    ]
    return _without_times(result, differences) if differences else result


def _old_code(base: Baseline, against: str | None, stored: bool, environ: Mapping[str, str]) -> tuple[Any, str]:
    """The code that the baseline was captured with, if it can be run here, and why that is or is not so."""
    if against is not None:
        if stored:
            raise OptionError("--against runs other code, --stored runs none; give one of them")
        return code.other_code(against, environ), f"the old side is {against}, as asked"
    if stored:
        return None, "judged by what was kept, as asked"
    commit, here = base.commit, code.current_commit()
    if commit is None:
        return None, "captured by an installed package, which is not here any more: judged by what was kept"
    if commit.endswith("+"):
        return None, "captured with changes that were not committed: judged by what was kept"
    if commit == here:
        return None, f"the code is the same as then, {commit[:10]}: judged by what was kept"
    if code.resolve_commit(commit) is None:
        return None, f"{commit[:10]} is not in this checkout: judged by what was kept"
    return code.other_code(commit, environ), f"captured at {commit[:10]}, which this checkout has: it ran again beside"


@contextmanager
def _baseline_code(base: Baseline, environ: Mapping[str, str]) -> Iterator[JobCommand]:
    here, version = code.current_commit(), base.jobs[0].versions.get("supertuner")
    if base.commit == here and (here is not None or version == supertuner.__version__):
        yield code.current_code(environ)
        return
    if base.commit is None or code.resolve_commit(base.commit) is None:
        what = version if base.commit is None else base.commit[:10]
        raise BaselineError(
            f"{base.name} was captured by code that is not here ({what}"
            f"{', with changes' if (base.commit or '').endswith('+') else ''}); compare without --again"
        )
    with code.other_code(base.commit, environ) as command:
        yield command


def _step_count(options: ComparisonOptions, base: Baseline) -> int:
    if options.steps is not None and options.steps > base.steps:
        raise OptionError(f"--steps {options.steps} is more than the {base.steps} of {base.name}; capture it with more")
    return options.steps or base.steps


def _require_expected_code(command: JobCommand, job: MeasuredJob) -> None:
    """Python may have found another package than the one it was given: then nothing of what follows would be true."""
    if command.code_path is not None and Path(job.code).resolve().parent != command.code_path.resolve():
        raise BaselineError(f"{command.title} was to run from {command.code_path}, and ran from {job.code}")


def _changed_settings_note(base: Baseline, now: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings that are others than those of the baseline; names and folders may be."""
    before = {name: block for name, block in base.resolved.items() if name not in ("run", "arena")}
    changed = [name for name, block in before.items() if json.dumps(now.get(name)) != json.dumps(block)]
    return (f"settings are not those of the baseline: {', '.join(changed)}",) if changed else ()


def _without_times(result: ComparisonResult, reasons: Sequence[str]) -> ComparisonResult:
    """On another machine times say nothing."""
    figures = tuple(one for one in result.figures if one.name not in TIME_FIGURES)
    note = f"times are not compared: {'; '.join(reasons)}"
    return replace(result, figures=figures, notes=(*result.notes, note), times_comparable=False)


def _stored_text(base: Baseline) -> str:
    return f"{len(base.jobs)} repeats of {base.name}, kept {readable_time(base.captured_at)}"


def _gpu_bytes() -> int | None:
    from supertuner.memory.cuda import open_cuda
    from supertuner.memory.driver import NotAvailable

    driver = open_cuda()
    devices = () if isinstance(driver, NotAvailable) else driver.devices()
    return devices[0].total_bytes if devices else None
