"""`supertuner baseline`: measure the training of a configuration, store it, and later check for regressions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from supertuner.cli.options import ConfigArgument, SetOption
from supertuner.core.errors import BaselineError, OptionError, SuperTunerError

if TYPE_CHECKING:
    from supertuner.tools.baseline.measured_process import MeasurementContext
    from supertuner.tools.baseline.regression import ComparisonResult


class BaselineCommandGroup(TyperGroup):
    """Reserves exit code 1 for regressions: every other error of these commands exits with 2."""

    def invoke(self, ctx: Any) -> Any:  # click's Context; typer has used two versions of it
        try:
            return super().invoke(ctx)
        except SuperTunerError as error:
            if error.exit_code == BaselineError.exit_code:
                raise
            raise BaselineError(str(error)) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            raise BaselineError(f"{where}{error.strerror or error}; the system refused this") from error


app = typer.Typer(cls=BaselineCommandGroup, help="Measure training, and check for regressions.", no_args_is_help=True)

BaselineNameArgument = Annotated[str, typer.Argument(help="The name of the baseline.", show_default=False)]
BaselineFolderOption = Annotated[Path, typer.Option("--dir", help="The folder of baselines.")]
PeerOption = Annotated[
    Path | None,
    typer.Option(metavar="SCRIPT", help="Store ratios to a script that does the same work, instead of times."),
]
LimitOption = Annotated[
    float,
    typer.Option(min=0.1, max=100, metavar="PERCENT", help="A change for the worse of more than this is a regression."),
]
RepeatsOption = Annotated[
    int, typer.Option(min=1, help="Rounds, each in new processes; as many follow again while undecided.")
]
MostOption = Annotated[
    int | None, typer.Option(min=1, help="Largest number of rounds.", show_default="three times --repeats")
]
StepsOption = Annotated[
    int | None, typer.Option(min=2, help="Optimizer steps of each run.", show_default="those of the baseline")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown.")]
UNDECIDED_EXIT_CODE = 3


@app.callback()
def group() -> None:
    """Measure training, and check for regressions."""


@app.command()
def capture(  # many parameters: one parameter per option
    name: BaselineNameArgument,
    config: ConfigArgument,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each repeat.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs, each in its own process.")] = 3,
    sets: SetOption = None,
    folder: BaselineFolderOption = Path("baseline"),
    profile: Annotated[
        bool, typer.Option("--profile", help="Also store a torch profiler trace of some steps, from a separate run.")
    ] = False,
    peer: PeerOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an existing baseline of this name.")] = False,
) -> None:
    """Train CONFIG for some steps, several times, and store the measurements in baseline/NAME.

    Runs of CONFIG are not touched: a capture uses its own run folders and removes them.
    """
    from supertuner.tools.baseline import peer_ratios as ratios
    from supertuner.tools.baseline.baseline_capture import CaptureOptions, capture_baseline
    from supertuner.tools.baseline.baseline_report import baseline_summary
    from supertuner.tools.baseline.rounds import ComparisonOptions

    if peer is not None:
        _refuse_options({"--profile": profile}, "--peer stores only ratios: leave out {}, or leave out --peer")
        path = ratios.new_ratios_path(folder, name, replace)
        options = ComparisonOptions(rounds=repeats, max_rounds=3 * repeats, steps=steps)
        with _measurement() as context:
            lines = ratios.ratio_lines(ratios.capture_ratios(path, config, sets or (), peer, options, context))
        command = f"supertuner baseline check {name} {config} --peer {peer}"
    else:
        with _measurement() as context:
            capture_options = CaptureOptions(steps, repeats, replace, profile)
            path, baseline = capture_baseline(folder, name, config, sets or (), capture_options, context)
        lines, command = baseline_summary(baseline), f"supertuner baseline check {name}"
    typer.echo("\n".join(lines))
    typer.echo(f"\nstored in {path}; compare with `{command}`")


@app.command("ls")
def list_baselines(folder: BaselineFolderOption = Path("baseline")) -> None:
    """List the baselines, and the reason for each that cannot be read."""
    from supertuner.tools.baseline.listing import list_baselines

    lines, problems = list_baselines(folder)
    typer.echo("\n".join([*lines, *problems]) or f"no baseline in {folder}")
    if problems:
        raise typer.Exit(BaselineError.exit_code)


@app.command()
def check(  # many parameters: one parameter per option
    name: BaselineNameArgument,
    config: Annotated[
        Path | None,
        typer.Argument(help="A configuration to run instead of the stored one.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="Old code to run for comparison: a git revision, a folder with another checkout, or the python of "
            "another environment. Default: the commit of the capture, if this checkout has it.",
        ),
    ] = None,
    peer: PeerOption = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Run no old code: compare with the stored measurements.")
    ] = False,
    limit: LimitOption = 5.0,
    repeats: RepeatsOption = 3,
    most: MostOption = None,
    steps: StepsOption = None,
    sets: SetOption = None,
    folder: BaselineFolderOption = Path("baseline"),
    as_json: JsonOption = False,
) -> None:
    """Train as baseline NAME did, with the current code, and check for regressions.

    Exit codes: 0: no regression; 1: a regression; 2: the check failed; 3: undecided, because of noise or because this
    is another machine. The report is stored in the baseline's folder as check.md and check.json.
    """
    from supertuner.tools.baseline import baseline_check as checking
    from supertuner.tools.baseline import peer_ratios as ratios
    from supertuner.tools.baseline.rounds import ComparisonOptions

    options = ComparisonOptions(limit / 100, repeats, most or 3 * repeats, steps, against, stored)
    if peer is not None:
        path = folder / name
        unusable_options = {"--against": against is not None, "--stored": stored}
        _refuse_options(unusable_options, "--peer compares with the peer script: leave out {}, or leave out --peer")
        if config is None:
            raise OptionError("a baseline of ratios stores no configuration: give CONFIG")
        with _measurement() as context:
            comparison = ratios.check_ratios(path, config, sets or (), peer, options, context)
        _report_and_exit(f"Baseline {path.name}, against {peer.name}", comparison, None, as_json)
    with _measurement() as context:
        path, comparison = checking.check_baseline(folder, name, options, context, config=config, sets=sets or ())
    _report_and_exit(f"Baseline {path.name}, now", comparison, path / "check", as_json)


@app.command()
def compare(  # many parameters: one parameter per option
    old: Annotated[str, typer.Argument(metavar="A", help="The old baseline.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="B", help="The new baseline.", show_default=False)],
    again: Annotated[
        bool, typer.Option("--again", help="Run both again on this machine, in alternation, under the same conditions.")
    ] = False,
    limit: LimitOption = 5.0,
    repeats: Annotated[int | None, typer.Option(min=1, help="With --again: as for `check`.", show_default="3")] = None,
    most: MostOption = None,
    steps: StepsOption = None,
    folder: BaselineFolderOption = Path("baseline"),
    as_json: JsonOption = False,
) -> None:
    """Check whether baseline B is a regression from A: by the stored measurements, or with --again by running both.

    Exit codes as for `check`. The report is stored in B's folder as against-A.md and against-A.json.
    """
    from supertuner.tools.baseline import baseline_check as checking
    from supertuner.tools.baseline.baseline_capture import DEFAULT_REPEATS
    from supertuner.tools.baseline.rounds import ComparisonOptions

    if not again:
        unusable_options = {"--steps": steps is not None, "--repeats": repeats is not None, "--most": most is not None}
        _refuse_options(unusable_options, "{} has no effect without --again: add --again, or leave it out")
    repeats = repeats or DEFAULT_REPEATS
    options = ComparisonOptions(limit / 100, repeats, most or 3 * repeats, steps)
    if again:
        with _measurement() as context:
            path, comparison = checking.compare_by_rerunning(folder, (old, new), options, context)
    else:
        path, comparison = checking.compare_baselines(folder, (old, new), options)
    old_name = Path(old).name
    _report_and_exit(f"Baseline {path.name} against {old_name}", comparison, path / f"against-{old_name}", as_json)


@contextmanager
def _measurement() -> Iterator[MeasurementContext]:
    """The environment of this process, and the console for progress."""
    from supertuner.config.sources.environment import current_environment
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.baseline.measured_process import MeasurementContext

    with ConsoleSink() as console:
        yield MeasurementContext(current_environment(), console)


def _refuse_options(is_given_by_option: dict[str, bool], message: str) -> None:
    """Raise OptionError if one of these options is given; `message` holds {} for their names."""
    if refused := [name for name, is_given in is_given_by_option.items() if is_given]:
        raise OptionError(message.format(" and ".join(refused)))


def _report_and_exit(title: str, comparison: ComparisonResult, stem: Path | None, as_json: bool) -> None:
    """Print the result, store it as `stem`.json and `stem`.md, and exit with its exit code."""
    from supertuner.tools.baseline.comparison_report import as_json as to_json
    from supertuner.tools.baseline.comparison_report import as_markdown, store_report
    from supertuner.tools.baseline.regression import RegressionVerdict

    document, text = to_json(title, comparison), as_markdown(title, comparison)
    if stem is not None and (problem := store_report(stem, document, text)) is not None:
        typer.echo(problem, err=True)
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False) if as_json else text.rstrip())
    codes = {RegressionVerdict.WORSE: 1, RegressionVerdict.UNDECIDED: UNDECIDED_EXIT_CODE}
    raise typer.Exit(codes.get(comparison.verdict, 0))
