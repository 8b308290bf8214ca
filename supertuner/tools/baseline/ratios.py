"""Baselines that carry over between machines: what training takes as a multiple of what a peer takes beside it.

A peer is a script of one's own that does the same work in the plainest way. Both run in turns, so a slow machine, or a
busy one, slows both; medians are compared, or the quickest tenth of each kind of step where others disturb too much for
them. Only ratios are kept, and losses, which are not times: `baseline/NAME/ratios.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from supertuner.core.durable import write_json
from supertuner.core.errors import BaselineError, OptionError
from supertuner.core.events import Progress
from supertuner.core.types import JSON
from supertuner.sinks.jsonlines import now_text, people_time
from supertuner.tools.baseline import code
from supertuner.tools.baseline.capturing import PREPARED_STEPS, require_alone, scenario, settings_of
from supertuner.tools.baseline.checking import Asked
from supertuner.tools.baseline.judging import START_LIMIT, Figure, Judged, Verdict, judge, verdict
from supertuner.tools.baseline.losses import ROUNDING_ELSE, Losses, compare_courses, course
from supertuner.tools.baseline.record import Job, finite
from supertuner.tools.baseline.rounds import Pairs, Side, run_rounds, turn_steps_of
from supertuner.tools.baseline.statistics import Interval
from supertuner.tools.baseline.store import RATIOS, named, require_writable
from supertuner.tools.baseline.tables import table
from supertuner.tools.baseline.turns import Command, ended_by_sigterm, run_alone, scratch

FORMAT: Final = "supertuner baseline of ratios"
VERSION: Final = 1
STEPS: Final = 100
WIDE: Final = math.log1p(0.05)
KEPT: Final = ("step", "time per sample", "start", "peak process.resident")
"""Figures that a peer has too."""
NEEDED: Final = KEPT[:2]
"""Those that are always there."""


@dataclass(frozen=True, slots=True)
class Ratios:
    made_at: str
    steps: int
    figures: Mapping[str, Interval]
    """Ours over the peer's."""
    losses: tuple[float, ...]
    """Of our first repeat."""
    versions: Mapping[str, str]
    rounds: int = 0
    how: str = ""


def capture(
    folder: Path,
    name: str,
    config: Path,
    peer: Path,
    asked: Asked,
    *,
    sets: Sequence[str],
    replace_old: bool,
    environ: Mapping[str, str],
    progress: Progress,
) -> Ratios:
    """Measure beside the peer, and keep the ratios."""
    path = named(folder, name)
    if (path / RATIOS).exists() and not replace_old:
        raise OptionError(f"{path} is captured already; --replace captures it anew")
    require_writable(folder)
    found = measure(config, peer, asked, _wide, sets=sets, environ=environ, progress=progress)
    path.mkdir(parents=True, exist_ok=True)
    save(path / RATIOS, found)
    return found


def check(
    path: Path,
    config: Path,
    peer: Path,
    asked: Asked,
    *,
    sets: Sequence[str],
    environ: Mapping[str, str],
    progress: Progress,
) -> Judged:
    """Measure beside the peer, and judge the ratios by those that were kept. More rounds follow while undecided."""
    kept = load(path / RATIOS)
    whole = replace(asked, steps=asked.steps or kept.steps)

    def undecided(now: Ratios) -> bool:
        return bool(against(kept, now, asked.limit).undecided)

    now = measure(config, peer, whole, undecided, sets=sets, environ=environ, progress=progress)
    return against(kept, now, asked.limit)


def measure(
    config: Path,
    peer: Path,
    asked: Asked,
    undecided: Callable[[Ratios], bool],
    *,
    sets: Sequence[str],
    environ: Mapping[str, str],
    progress: Progress,
) -> Ratios:
    """Ours and the peer's in turns. The peer gets the schedule of our first run: as many samples in each step."""
    require_alone(environ)
    if not peer.is_file():
        raise OptionError(f"{peer} is no script to compare with")
    steps = asked.steps or STEPS
    work = scenario(config, sets, steps, settings_of(config, sets).config, "peer")
    with ExitStack() as opened:
        opened.enter_context(ended_by_sigterm())
        out = Path(opened.enter_context(scratch()))
        opened.callback(work.forget)
        ours, theirs = code.here(environ), _peer(peer, environ)
        with progress.phase("preparing data and caches"):
            first = run_alone(ours, work.order(out, "prepare"))
        with progress.phase(f"preparing {peer.name}"):
            run_alone(theirs, Side(theirs, work, first.schedule[:PREPARED_STEPS]).order(out, "prepare-peer"))
        turn = turn_steps_of([first], steps)

        def ratios(pairs: Pairs) -> Ratios:
            how = f"in turns of {turn} steps"
            terms = replace(asked.terms(turn), quick=True)
            found = judge(pairs.old, pairs.new, terms, precision="fp32", how=how)
            return _ratios(found, pairs.new)

        pairs = run_rounds(
            Side(theirs, work, first.schedule),
            Side(ours, work),
            out,
            turn_steps=turn,
            rounds=asked.rounds,
            most=asked.most,
            undecided=lambda pairs: undecided(ratios(pairs)),
            progress=progress,
        )
        return ratios(pairs)


def against(kept: Ratios, now: Ratios, limit: float) -> Judged:
    """The ratios of now by those that were kept."""
    figures = []
    for name, then in kept.figures.items():
        if name not in now.figures:
            continue
        found = now.figures[name].minus(then)
        most = max(limit, START_LIMIT) if name == "start" else limit
        judged = verdict(found, most)
        if name == "start" and judged is Verdict.UNDECIDED:
            judged = Verdict.UNJUDGED
        figures.append(Figure(name, "× peer", then.ratio, now.figures[name].ratio, found, most, judged))
    losses: Losses = compare_courses([kept.losses], [now.losses], ROUNDING_ELSE)
    notes = (f"all figures are multiples of what the peer takes beside us; kept {people_time(kept.made_at)}",)
    return Judged(tuple(figures), losses, None, now.rounds, f"ours and the peer, {now.how}", notes)


def as_text(ratios: Ratios) -> list[str]:
    """A table of the ratios."""
    rows = []
    for name, one in ratios.figures.items():
        low, high = one.between
        rows.append([name, f"{one.ratio:.3f}", f"{low:.3f} to {high:.3f}"])
    return [*table(["figure", "times the peer's", "95 % between"], rows), "", f"{ratios.how}, {ratios.rounds} rounds"]


def save(file: Path, ratios: Ratios) -> None:
    figures: dict[str, JSON] = {
        name: {"ratio": one.ratio, "low": one.between[0], "high": one.between[1]}
        for name, one in ratios.figures.items()
    }
    write_json(
        file,
        {
            "format": FORMAT,
            "version": VERSION,
            "made_at": ratios.made_at,
            "steps": ratios.steps,
            "rounds": ratios.rounds,
            "how": ratios.how,
            "ours_over_peer": figures,
            "versions": dict(ratios.versions),
            "losses": [None if math.isnan(loss) else loss for loss in ratios.losses],
        },
    )


def load(file: Path) -> Ratios:
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise BaselineError(f"{file} is no baseline of ratios that this program reads; capture it again")
        given = found["ours_over_peer"]
        figures = {name: _interval(given[name]) for name in KEPT if name in given or name in NEEDED}
        losses = tuple(math.nan if finite(loss) is None else float(loss) for loss in found["losses"])
        counts = int(found["steps"]), int(found["rounds"])
        return Ratios(
            str(found["made_at"]), counts[0], figures, losses, dict(found["versions"]), counts[1], str(found["how"])
        )
    except KeyError as error:
        raise BaselineError(f"{file} lacks {error}; capture it again") from error
    except (OSError, ValueError, TypeError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); capture it again") from error


def _interval(one: Mapping[str, float]) -> Interval:
    low, middle, high = (math.log(one[name]) for name in ("low", "ratio", "high"))
    if not -math.inf < low <= middle <= high < math.inf:
        raise ValueError(f"{one} is no ratio with its interval")
    return Interval(middle, low, high)


def _ratios(judged: Judged, jobs: Sequence[Job]) -> Ratios:
    figures = {one.name: one.found for one in judged.figures if one.name in KEPT}
    losses = tuple(course(jobs[0]))
    return Ratios(now_text(), len(losses), figures, losses, jobs[0].versions, judged.rounds, judged.how)


def _peer(peer: Path, environ: Mapping[str, str]) -> Command:
    ours = code.here(environ)
    return Command(peer.name, (ours.words[0], str(peer.absolute())), ours.environ)


def _wide(found: Ratios) -> bool:
    """Whether a ratio is not known well enough to be kept: later ones are judged by it."""
    return any(found.figures[name].high - found.figures[name].low > WIDE for name in NEEDED)
