"""Baselines that are valid across machines: training time and memory as multiples of those of a peer script.

A peer is a script of the user's that does the same work in the simplest way. Both run in turns, so a slow or busy
machine slows both. Medians are compared, or the quickest tenth of each kind of step where other processes disturb the
medians too much. Only ratios and losses are stored, no times: `baseline/NAME/ratios.json`.
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
from supertuner.sinks.jsonlines import now_text, readable_time
from supertuner.tools.baseline import code_versions as code
from supertuner.tools.baseline.baseline_capture import (
    PREPARATION_STEPS,
    build_scenario,
    load_settings,
    require_single_process,
)
from supertuner.tools.baseline.confidence_interval import RatioInterval
from supertuner.tools.baseline.loss_comparison import DEFAULT_ROUNDING, LossComparison, compare_loss_values, loss_values
from supertuner.tools.baseline.measured_process import JobCommand, exit_on_sigterm, run_job, scratch_dir
from supertuner.tools.baseline.record import MeasuredJob, finite_or_none
from supertuner.tools.baseline.regression import (
    START_LIMIT,
    ComparedFigure,
    ComparisonResult,
    RegressionVerdict,
    judge_interval,
    judge_jobs,
)
from supertuner.tools.baseline.rounds import (
    ComparisonOptions,
    ComparisonSide,
    JobPairs,
    choose_turn_steps,
    run_rounds,
)
from supertuner.tools.baseline.store import RATIOS_FILE, baseline_path, require_writable
from supertuner.tools.baseline.tables import markdown_table

FORMAT: Final = "supertuner baseline of ratios"
VERSION: Final = 1
DEFAULT_STEPS: Final = 100
MAX_INTERVAL_WIDTH: Final = math.log1p(0.05)
"""A ratio whose interval is wider than this is not precise enough to be stored."""
COMPARED_FIGURES: Final = ("step", "time per sample", "start", "peak process.resident")
"""Figures that a peer reports too."""
REQUIRED_FIGURES: Final = COMPARED_FIGURES[:2]
"""Figures that every baseline of ratios has."""


@dataclass(frozen=True, slots=True)
class PeerRatios:
    captured_at: str
    steps: int
    figures: Mapping[str, RatioInterval]
    """SuperTuner's figure divided by the peer's."""
    losses: tuple[float, ...]
    """Losses of SuperTuner's first repeat; NaN where a loss is not finite."""
    versions: Mapping[str, str]
    rounds: int = 0
    method: str = ""


def new_ratios_path(folder: Path, name: str, replace_old: bool) -> Path:
    """The folder of a new baseline of ratios. Raises OptionError if it exists already, unless `replace_old`."""
    path = baseline_path(folder, name)
    if (path / RATIOS_FILE).exists() and not replace_old:
        raise OptionError(f"{path} exists already; give --replace to capture it again")
    require_writable(folder)
    return path


def capture_ratios(
    path: Path,
    config: Path,
    peer: Path,
    options: ComparisonOptions,
    *,
    sets: Sequence[str],
    environ: Mapping[str, str],
    progress: Progress,
) -> PeerRatios:
    """Measure in turns with the peer and store the ratios in the folder `path`."""
    measured = measure_ratios(config, peer, options, _needs_more_rounds, sets=sets, environ=environ, progress=progress)
    path.mkdir(parents=True, exist_ok=True)
    save_ratios(path / RATIOS_FILE, measured)
    return measured


def check_ratios(
    path: Path,
    config: Path,
    peer: Path,
    options: ComparisonOptions,
    *,
    sets: Sequence[str],
    environ: Mapping[str, str],
    progress: Progress,
) -> ComparisonResult:
    """Measure in turns with the peer and judge the ratios by the stored ones. More rounds follow while undecided."""
    stored = load_ratios(path / RATIOS_FILE)
    run_options = replace(options, steps=options.steps or stored.steps)

    def undecided(now: PeerRatios) -> bool:
        return bool(compare_ratios(stored, now, options.limit).undecided)

    now = measure_ratios(config, peer, run_options, undecided, sets=sets, environ=environ, progress=progress)
    return compare_ratios(stored, now, options.limit)


def measure_ratios(
    config: Path,
    peer: Path,
    options: ComparisonOptions,
    undecided: Callable[[PeerRatios], bool],
    *,
    sets: Sequence[str],
    environ: Mapping[str, str],
    progress: Progress,
) -> PeerRatios:
    """Run SuperTuner and the peer in turns. The peer receives the schedule of SuperTuner's first run, so that each of
    its steps processes the same number of samples."""
    require_single_process(environ)
    if not peer.is_file():
        raise OptionError(f"--peer {peer} is not a file; name the script to compare with")
    steps = options.steps or DEFAULT_STEPS
    baseline_scenario = build_scenario(config, sets, steps, load_settings(config, sets).config, "peer")
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        out = Path(stack.enter_context(scratch_dir()))
        stack.callback(baseline_scenario.remove_run_folders)
        own_command, peer_command = code.current_code(environ), _peer_command(peer, environ)
        with progress.phase("preparing data and caches"):
            prepared_job = run_job(own_command, baseline_scenario.request(out, "prepare"))
        with progress.phase(f"preparing {peer.name}"):
            run_job(
                peer_command,
                ComparisonSide(peer_command, baseline_scenario, prepared_job.schedule[:PREPARATION_STEPS]).request(
                    out, "prepare-peer"
                ),
            )
        turn_steps = choose_turn_steps([prepared_job], steps)

        def ratios_of_pairs(pairs: JobPairs) -> PeerRatios:
            method = f"in turns of {turn_steps} steps"
            terms = replace(options.comparison_terms(turn_steps), prefer_quickest=True)
            result = judge_jobs(pairs.old, pairs.new, terms, precision="fp32", method=method)
            return _build_ratios(result, pairs.new)

        pairs = run_rounds(
            ComparisonSide(peer_command, baseline_scenario, prepared_job.schedule),
            ComparisonSide(own_command, baseline_scenario),
            out,
            options,
            turn_steps,
            undecided=lambda pairs: undecided(ratios_of_pairs(pairs)),
            progress=progress,
        )
        return ratios_of_pairs(pairs)


def compare_ratios(stored: PeerRatios, now: PeerRatios, limit: float) -> ComparisonResult:
    """Judge the current ratios by the stored ones."""
    figures = []
    for name, stored_interval in stored.figures.items():
        if name not in now.figures:
            continue
        change = now.figures[name].minus(stored_interval)
        figure_limit = max(limit, START_LIMIT) if name == "start" else limit
        figure_verdict = judge_interval(change, figure_limit)
        if name == "start" and figure_verdict is RegressionVerdict.UNDECIDED:
            figure_verdict = RegressionVerdict.UNJUDGED
        figures.append(
            ComparedFigure(
                name, "× peer", stored_interval.ratio, now.figures[name].ratio, change, figure_limit, figure_verdict
            )
        )
    losses: LossComparison = compare_loss_values([stored.losses], [now.losses], DEFAULT_ROUNDING)
    notes = (f"all figures are multiples of the peer's; captured {readable_time(stored.captured_at)}",)
    return ComparisonResult(tuple(figures), losses, None, now.rounds, f"SuperTuner and the peer, {now.method}", notes)


def ratio_lines(ratios: PeerRatios) -> list[str]:
    """The ratios as a Markdown table."""
    rows = []
    for name, interval in ratios.figures.items():
        low, high = interval.bounds
        rows.append([name, f"{interval.ratio:.3f}", f"{low:.3f} to {high:.3f}"])
    return [
        *markdown_table(["figure", "times the peer's", "95 % between"], rows),
        "",
        f"{ratios.method}, {ratios.rounds} rounds",
    ]


def save_ratios(file: Path, ratios: PeerRatios) -> None:
    figures: dict[str, JSON] = {
        name: {"ratio": interval.ratio, "low": interval.bounds[0], "high": interval.bounds[1]}
        for name, interval in ratios.figures.items()
    }
    write_json(
        file,
        {
            "format": FORMAT,
            "version": VERSION,
            "made_at": ratios.captured_at,
            "steps": ratios.steps,
            "rounds": ratios.rounds,
            "how": ratios.method,
            "ours_over_peer": figures,
            "versions": dict(ratios.versions),
            "losses": [None if math.isnan(loss) else loss for loss in ratios.losses],
        },
    )


def load_ratios(file: Path) -> PeerRatios:
    try:
        document: dict[str, Any] = json.loads(file.read_bytes())
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise BaselineError(f"{file} is not a baseline of ratios of version {VERSION}; capture it again")
        stored_figures = document["ours_over_peer"]
        figures = {
            name: _parse_interval(stored_figures[name])
            for name in COMPARED_FIGURES
            if name in stored_figures or name in REQUIRED_FIGURES
        }
        losses = tuple(math.nan if finite_or_none(loss) is None else float(loss) for loss in document["losses"])
        counts = int(document["steps"]), int(document["rounds"])
        return PeerRatios(
            str(document["made_at"]),
            counts[0],
            figures,
            losses,
            dict(document["versions"]),
            counts[1],
            str(document["how"]),
        )
    except KeyError as error:
        raise BaselineError(f"{file} lacks {error}; capture it again") from error
    except (OSError, ValueError, TypeError) as error:
        raise BaselineError(f"{file} cannot be read ({error}); capture it again") from error


def _parse_interval(bounds: Mapping[str, float]) -> RatioInterval:
    low, middle, high = (math.log(bounds[name]) for name in ("low", "ratio", "high"))
    if not -math.inf < low <= middle <= high < math.inf:
        raise ValueError(f"{bounds} is not a ratio inside its interval")
    return RatioInterval(middle, low, high)


def _build_ratios(result: ComparisonResult, jobs: Sequence[MeasuredJob]) -> PeerRatios:
    figures = {figure.name: figure.interval for figure in result.figures if figure.name in COMPARED_FIGURES}
    losses = tuple(loss_values(jobs[0]))
    return PeerRatios(now_text(), len(losses), figures, losses, jobs[0].versions, result.rounds, result.method)


def _peer_command(peer: Path, environ: Mapping[str, str]) -> JobCommand:
    own_command = code.current_code(environ)
    return JobCommand(peer.name, (own_command.arguments[0], str(peer.absolute())), own_command.environ)


def _needs_more_rounds(ratios: PeerRatios) -> bool:
    """Whether a ratio is too imprecise to be stored, since later ratios are judged by it."""
    return any(ratios.figures[name].high - ratios.figures[name].low > MAX_INTERVAL_WIDTH for name in REQUIRED_FIGURES)
