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
from supertuner.core.host import Host
from supertuner.sinks.jsonlines import people_time
from supertuner.tools.baseline import code, machine
from supertuner.tools.baseline.capturing import (
    REPEATS,
    Scenario,
    measure,
    prepare,
    require_alone,
    scenario,
    settings_of,
)
from supertuner.tools.baseline.judging import LIMIT, Judged, Terms, judge
from supertuner.tools.baseline.record import Job
from supertuner.tools.baseline.rounds import Pairs, Side, both_fit, due, looks, run_rounds, turn_steps_of
from supertuner.tools.baseline.store import Baseline, find, load, require_config
from supertuner.tools.baseline.turns import Command, ended_by_sigterm, scratch

TIMES: Final = ("step", "time per sample", "start")
APART: Final = "captured apart, so the machine's weather is in this"


@dataclass(frozen=True, slots=True)
class Asked:
    """How a comparison is to be made."""

    limit: float = LIMIT
    rounds: int = REPEATS
    most: int = 3 * REPEATS
    steps: int | None = None
    """None: as many as the baseline has."""

    def __post_init__(self) -> None:
        if self.most < self.rounds:
            raise OptionError(f"--most {self.most} is below --repeats {self.rounds}; raise it, or lower --repeats")

    def terms(self, turn_steps: int) -> Terms:
        return Terms(turn_steps, self.limit, looks(self.rounds, self.most))


def check(
    folder: Path,
    name: str,
    asked: Asked,
    *,
    config: Path | None = None,
    sets: Sequence[str] = (),
    against: str | None = None,
    stored: bool = False,
    environ: Mapping[str, str],
    progress: Progress,
) -> tuple[Path, Judged]:
    """Run a baseline's scenario with the code here, and judge it. `config` and `sets` say where its data are now."""
    require_alone(environ)
    path = find(folder, name)
    base = load(path)
    given = config or require_config(path)
    settings = settings_of(given, sets)
    work = scenario(given, sets, _steps(asked, base), settings.config, base.name)
    notes = _changed(base, settings.config.model_dump(mode="json"))
    with ExitStack() as opened:
        opened.enter_context(ended_by_sigterm())
        out = Path(opened.enter_context(scratch()))
        opened.callback(work.forget)
        old, why = _old_code(base, against, stored, environ)
        if old is None:
            return path, _against_kept(base, work, out, asked, (*notes, why), environ, progress)
        side = Side(opened.enter_context(old), work)
        new = Side(code.here(environ), work)
        return path, _in_rounds(side, new, out, asked, (*notes, why), base.precision, progress)


def compare(folder: Path, names: tuple[str, str], asked: Asked) -> tuple[Path, Judged]:
    """Two baselines by what was kept of them."""
    path, (old, new) = find(folder, names[1]), (load(find(folder, name)) for name in names)
    notes = (f"{APART}; --again runs both now, in turns",)
    judged = judge(
        old.jobs,
        new.jobs,
        Terms(turn_steps=-1, limit=asked.limit),
        precision=old.precision,
        how=f"{_kept_text(old)}, and {_kept_text(new)}",
        notes=notes,
    )
    other = [
        *machine.differences(old.machine, new.machine),
        *machine.differences(old.environment, new.environment, machine.VARIABLES),
    ]
    return path, _without_times(judged, other) if other else judged


def compare_again(
    folder: Path, names: tuple[str, str], asked: Asked, *, environ: Mapping[str, str], progress: Progress
) -> tuple[Path, Judged]:
    """Two baselines, both run here again: each with its own settings and its own code."""
    require_alone(environ)
    paths = [find(folder, name) for name in names]
    old, new = (load(path) for path in paths)
    steps = asked.steps or min(old.steps, new.steps)
    with ExitStack() as opened:
        opened.enter_context(ended_by_sigterm())
        out = Path(opened.enter_context(scratch()))
        sides = []
        for path, base in zip(paths, (old, new), strict=True):
            config = require_config(path)
            work = scenario(config, (), steps, settings_of(config, ()).config, base.name)
            opened.callback(work.forget)
            command = opened.enter_context(_code_of(base, environ))
            sides.append(Side(replace(command, title=f"{base.name} ({command.title})"), work))
        return paths[1], _in_rounds(sides[0], sides[1], out, asked, (), old.precision, progress)


def _in_rounds(
    old: Side, new: Side, out: Path, asked: Asked, notes: tuple[str, ...], precision: str, progress: Progress
) -> Judged:
    first = [prepare(side.command, side.work, out, progress, label) for side, label in ((old, "a"), (new, "b"))]
    _require_code(old.command, first[0])
    _require_code(new.command, first[1])
    gpu = _gpu_bytes() if any("gpu.reserved" in job.peaks for job in first) else None
    together = both_fit([job.peaks for job in first], Host(), gpu)
    turn = turn_steps_of(first, min(old.work.steps, new.work.steps)) if together else 0
    how = f"in turns of {turn} steps" if turn else "one after the other: both do not fit into memory at once"
    how = f"{old.command.title} and {new.command.title}, {how}"

    def judged(pairs: Pairs) -> Judged:
        return judge(pairs.old, pairs.new, asked.terms(turn), precision=precision, how=how, notes=notes)

    pairs = run_rounds(
        old,
        new,
        out,
        turn_steps=turn,
        rounds=asked.rounds,
        most=asked.most,
        undecided=lambda pairs: bool(judged(pairs).undecided),
        progress=progress,
    )
    return judged(pairs)


def _against_kept(
    base: Baseline,
    work: Scenario,
    out: Path,
    asked: Asked,
    notes: tuple[str, ...],
    environ: Mapping[str, str],
    progress: Progress,
) -> Judged:
    """The code here, measured now, by what was kept then."""
    command = code.here(environ)
    notes = (*notes, f"{APART}; --against CODE runs old code beside, in turns")
    prepare(command, work, out, progress)
    jobs: list[Job] = []
    while True:
        at = len(jobs) + 1
        jobs.append(measure(command, work, out, at, max(at, asked.rounds), progress))
        if at < asked.most and not due(at, asked.rounds):
            continue
        judged = judge(base.jobs, jobs, asked.terms(-1), precision=base.precision, how=_kept_text(base), notes=notes)
        if not judged.undecided or at >= asked.most:
            break
    here = machine.facts(machine.diagnostics(Host(), environ))
    other = [
        *machine.differences(base.machine, here),
        *machine.differences(base.environment, machine.variables(environ), machine.VARIABLES),
    ]
    return _without_times(judged, other) if other else judged


def _old_code(base: Baseline, against: str | None, stored: bool, environ: Mapping[str, str]) -> tuple[Any, str]:
    """The code that the baseline was captured with, if it can be run here, and why that is or is not so."""
    if against is not None:
        if stored:
            raise OptionError("--against runs other code, --stored runs none; give one of them")
        return code.other(against, environ), f"the old side is {against}, as asked"
    if stored:
        return None, "judged by what was kept, as asked"
    commit, here = base.commit, code.commit_here()
    if commit is None:
        return None, "captured by an installed package, which is not here any more: judged by what was kept"
    if commit.endswith("+"):
        return None, "captured with changes that were not committed: judged by what was kept"
    if commit == here:
        return None, f"the code is the same as then, {commit[:10]}: judged by what was kept"
    if code.commit_of(commit) is None:
        return None, f"{commit[:10]} is not in this checkout: judged by what was kept"
    return code.other(commit, environ), f"captured at {commit[:10]}, which this checkout has: it ran again beside"


@contextmanager
def _code_of(base: Baseline, environ: Mapping[str, str]) -> Iterator[Command]:
    here, version = code.commit_here(), base.jobs[0].versions.get("supertuner")
    if base.commit == here and (here is not None or version == supertuner.__version__):
        yield code.here(environ)
        return
    if base.commit is None or code.commit_of(base.commit) is None:
        what = version if base.commit is None else base.commit[:10]
        raise BaselineError(
            f"{base.name} was captured by code that is not here ({what}"
            f"{', with changes' if (base.commit or '').endswith('+') else ''}); compare without --again"
        )
    with code.other(base.commit, environ) as command:
        yield command


def _steps(asked: Asked, base: Baseline) -> int:
    if asked.steps is not None and asked.steps > base.steps:
        raise OptionError(f"--steps {asked.steps} is more than the {base.steps} of {base.name}; capture it with more")
    return asked.steps or base.steps


def _require_code(command: Command, job: Job) -> None:
    """Python may have found another package than the one it was given: then nothing of what follows would be true."""
    if command.code is not None and Path(job.code).resolve().parent != command.code.resolve():
        raise BaselineError(f"{command.title} was to run from {command.code}, and ran from {job.code}")


def _changed(base: Baseline, now: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings that are others than those of the baseline; names and folders may be."""
    before = {name: block for name, block in base.resolved.items() if name not in ("run", "arena")}
    found = [name for name, block in before.items() if json.dumps(now.get(name)) != json.dumps(block)]
    return (f"settings are not those of the baseline: {', '.join(found)}",) if found else ()


def _without_times(judged: Judged, other: Sequence[str]) -> Judged:
    """On another machine times say nothing."""
    figures = tuple(one for one in judged.figures if one.name not in TIMES)
    note = f"times are not compared: {'; '.join(other)}"
    return replace(judged, figures=figures, notes=(*judged.notes, note), times=False)


def _kept_text(base: Baseline) -> str:
    return f"{len(base.jobs)} repeats of {base.name}, kept {people_time(base.captured_at)}"


def _gpu_bytes() -> int | None:
    from supertuner.memory.cuda import open_cuda
    from supertuner.memory.driver import Missing

    driver = open_cuda()
    devices = () if isinstance(driver, Missing) else driver.devices()
    return devices[0].total_bytes if devices else None
