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

from supertuner.config.sources.load import load_config
from supertuner.core.durable import write_json
from supertuner.core.errors import BaselineError, OptionError
from supertuner.sinks.jsonlines import now_text, readable_time
from supertuner.tools.baseline import code_versions as code
from supertuner.tools.baseline import rounds
from supertuner.tools.baseline.baseline_capture import PREPARATION_STEPS, build_scenario, require_single_process
from supertuner.tools.baseline.confidence_interval import RatioInterval
from supertuner.tools.baseline.loss_comparison import DEFAULT_ROUNDING, compare_loss_values, loss_values
from supertuner.tools.baseline.measured_process import JobCommand, MeasurementContext, run_job, scratch_folder
from supertuner.tools.baseline.record import MeasuredJob, finite_or_none
from supertuner.tools.baseline.regression import (
    START_LIMIT,
    ComparedFigure,
    ComparisonResult,
    RegressionVerdict,
    judge_interval,
    judge_jobs,
)
from supertuner.tools.baseline.rounds import ComparisonOptions, ComparisonSide, JobPairs
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
    path: Path, config: Path, sets: Sequence[str], peer: Path, options: ComparisonOptions, context: MeasurementContext
) -> PeerRatios:
    """Measure in turns with the peer and store the ratios in the folder `path`."""
    measured = measure_ratios(config, sets, peer, options, context, _needs_more_rounds)
    path.mkdir(parents=True, exist_ok=True)
    save_ratios(path / RATIOS_FILE, measured)
    return measured


def check_ratios(
    path: Path, config: Path, sets: Sequence[str], peer: Path, options: ComparisonOptions, context: MeasurementContext
) -> ComparisonResult:
    """Measure in turns with the peer and judge the ratios by the stored ones. More rounds follow while undecided."""
    stored = load_ratios(path / RATIOS_FILE)

    def is_undecided(now: PeerRatios) -> bool:
        return bool(compare_ratios(stored, now, options.limit).undecided)

    run_options = replace(options, steps=options.steps or stored.steps)
    now = measure_ratios(config, sets, peer, run_options, context, is_undecided)
    return compare_ratios(stored, now, options.limit)


def measure_ratios(
    config: Path,
    sets: Sequence[str],
    peer: Path,
    options: ComparisonOptions,
    context: MeasurementContext,
    is_undecided: Callable[[PeerRatios], bool],
) -> PeerRatios:
    """Run SuperTuner and the peer in turns. The peer receives the schedule of SuperTuner's first run, so that each of
    its steps processes the same number of samples."""
    require_single_process(context.environ)
    if not peer.is_file():
        raise OptionError(f"--peer {peer} is not a file; name the script to compare with")
    steps, progress = options.steps or DEFAULT_STEPS, context.progress
    scenario = build_scenario(load_config(config, sets=sets).config, config, sets, steps, "peer")
    with ExitStack() as stack:
        out = stack.enter_context(scratch_folder())
        stack.callback(scenario.remove_run_folders)
        own_command = code.current_code(context.environ)
        peer_arguments = (own_command.arguments[0], str(peer.absolute()))
        peer_command = JobCommand(peer.name, peer_arguments, own_command.environ)
        with progress.phase("preparing data and caches"):
            prepared_job = run_job(own_command, scenario.request(out, "prepare"))
        peer_side = ComparisonSide(peer_command, scenario, prepared_job.schedule)
        with progress.phase(f"preparing {peer.name}"):
            request = peer_side.request(out, "prepare-peer")
            run_job(peer_command, replace(request, schedule=request.schedule[:PREPARATION_STEPS]))
        turn_steps = rounds.choose_turn_steps([prepared_job], steps)
        terms = replace(options.comparison_terms(turn_steps), prefer_quickest=True)

        def ratios_of(pairs: JobPairs) -> PeerRatios:
            method = f"in turns of {turn_steps} steps"
            return _build_ratios(judge_jobs(pairs.old, pairs.new, terms, precision="fp32", method=method), pairs.new)

        own_side = ComparisonSide(own_command, scenario)
        return ratios_of(
            rounds.run_rounds(
                peer_side, own_side, out, options, turn_steps, lambda pairs: is_undecided(ratios_of(pairs)), progress
            )
        )


def compare_ratios(stored: PeerRatios, now: PeerRatios, limit: float) -> ComparisonResult:
    """Judge the current ratios by the stored ones."""
    figures = []
    for name, before in stored.figures.items():
        if (after := now.figures.get(name)) is None:
            continue
        change, is_start = after.minus(before), name == "start"
        figure_limit = max(limit, START_LIMIT) if is_start else limit
        verdict = judge_interval(change, figure_limit)
        if is_start and verdict is RegressionVerdict.UNDECIDED:
            verdict = RegressionVerdict.UNJUDGED
        figures.append(ComparedFigure(name, "× peer", before.ratio, after.ratio, change, figure_limit, verdict))
    losses = compare_loss_values([stored.losses], [now.losses], DEFAULT_ROUNDING)
    notes = (f"all figures are multiples of the peer's; captured {readable_time(stored.captured_at)}",)
    return ComparisonResult(tuple(figures), losses, None, now.rounds, f"SuperTuner and the peer, {now.method}", notes)


def ratio_lines(ratios: PeerRatios) -> list[str]:
    """The ratios as a Markdown table."""
    bounds = {name: [f"{bound:.3f}" for bound in interval.bounds] for name, interval in ratios.figures.items()}
    rows = [[name, middle, f"{low} to {high}"] for name, (low, middle, high) in bounds.items()]
    table = markdown_table(["figure", "times the peer's", "95 % between"], rows)
    return [*table, "", f"{ratios.method}, {ratios.rounds} rounds"]


def save_ratios(file: Path, ratios: PeerRatios) -> None:
    bounds = {name: interval.bounds for name, interval in ratios.figures.items()}
    figures = {name: {"ratio": ratio, "low": low, "high": high} for name, (low, ratio, high) in bounds.items()}
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
        made_at, method, versions = str(document["made_at"]), str(document["how"]), dict(document["versions"])
        steps, round_count = int(document["steps"]), int(document["rounds"])
        return PeerRatios(made_at, steps, figures, losses, versions, round_count, method)
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


def _needs_more_rounds(ratios: PeerRatios) -> bool:
    """Whether a ratio is too imprecise to be stored, since later ratios are judged by it."""
    return any(ratios.figures[name].width > MAX_INTERVAL_WIDTH for name in REQUIRED_FIGURES)
