"""`supertuner baseline`: measure a configuration's training, keep it, and tell later whether anything got worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from supertuner.cli.stage import ConfigArgument, SetOption
from supertuner.core.errors import BaselineError, OptionError, SuperTunerError

if TYPE_CHECKING:
    from supertuner.tools.baseline.regression import ComparisonResult


class BaselineCommandGroup(TyperGroup):
    """Exit code 1 says that something got worse, and nothing else: whatever goes wrong here is 2."""

    def invoke(self, ctx: Any) -> Any:  # click's, of which typer has had two
        try:
            return super().invoke(ctx)
        except SuperTunerError as error:
            if error.exit_code == BaselineError.exit_code:
                raise
            raise BaselineError(str(error)) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            raise BaselineError(f"{where}{error.strerror or error}; the system refused this") from error


app = typer.Typer(
    cls=BaselineCommandGroup, help="Measure training, and tell whether it got worse.", no_args_is_help=True
)

BaselineNameArgument = Annotated[str, typer.Argument(help="The baseline's name.", show_default=False)]
BaselineFolderOption = Annotated[Path, typer.Option("--dir", help="The folder that holds baselines.")]
PeerOption = Annotated[
    Path | None,
    typer.Option(metavar="SCRIPT", help="Keep ratios against a script that does the same work, and no times."),
]
LimitOption = Annotated[
    float, typer.Option(min=0.1, max=100, metavar="PERCENT", help="How much worse is a regression.")
]
RepeatsOption = Annotated[
    int, typer.Option(min=1, help="Rounds, each of new processes; as many again follow while undecided.")
]
MostOption = Annotated[int | None, typer.Option(min=1, help="Rounds at most.", show_default="three times --repeats")]
StepsOption = Annotated[
    int | None, typer.Option(min=2, help="Steps of each run.", show_default="those of the baseline")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown.")]
UNDECIDED_EXIT_CODE = 3


@app.callback()
def group() -> None:
    """Measure training, and tell whether it got worse."""


@app.command()
def capture(
    name: BaselineNameArgument,
    config: ConfigArgument,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each repeat.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="How many times they are run, each in a process of its own.")] = 3,
    sets: SetOption = None,
    folder: BaselineFolderOption = Path("baseline"),
    profile: Annotated[
        bool, typer.Option("--profile", help="Keep a trace of torch's profiler too, of some steps of a run of its own.")
    ] = False,
    peer: PeerOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Capture a baseline of this name anew.")] = False,
) -> None:
    """Train CONFIG for some steps, several times over, and keep what it took in baseline/NAME.

    Nothing of it touches the runs of CONFIG: those of a capture have names of their own, and are removed.
    """
    from supertuner.config.sources import environment
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.baseline.baseline_capture import CaptureOptions, capture_baseline
    from supertuner.tools.baseline.baseline_report import baseline_summary

    if peer is not None:
        _refuse_options({"--profile": profile}, "with --peer only ratios are kept: leave out {}, or leave out --peer")
        from supertuner.tools.baseline import peer_ratios as ratios
        from supertuner.tools.baseline.rounds import ComparisonOptions

        with ConsoleSink() as console:
            captured_ratios = ratios.capture_ratios(
                ratios.new_ratios_path(folder, name, replace),
                config,
                peer,
                ComparisonOptions(rounds=repeats, max_rounds=3 * repeats, steps=steps),
                sets=sets or (),
                environ=environment.current_environment(),
                progress=console,
            )
        typer.echo("\n".join(ratios.ratio_lines(captured_ratios)))
        typer.echo(f"\nkept in {folder / name}; `supertuner baseline check {name} {config} --peer {peer}` judges by it")
        return
    with ConsoleSink() as console:
        path, baseline = capture_baseline(
            folder,
            name,
            config,
            CaptureOptions(steps, repeats, replace, profile),
            sets=sets or (),
            environ=environment.current_environment(),
            progress=console,
        )
    typer.echo("\n".join(baseline_summary(baseline)))
    typer.echo(f"\nkept in {path}; `supertuner baseline check {name}` tells later whether it got worse")


@app.command("ls")
def list_baselines(folder: BaselineFolderOption = Path("baseline")) -> None:
    """List the baselines that were captured, and say of those that cannot be read why."""
    from supertuner.tools.baseline.listing import list_baselines

    lines, problems = list_baselines(folder)
    typer.echo("\n".join([*lines, *problems]) or f"no baseline in {folder}")
    if problems:
        raise typer.Exit(BaselineError.exit_code)


@app.command()
def check(
    name: BaselineNameArgument,
    config: Annotated[
        Path | None,
        typer.Argument(help="A configuration to run instead of the one that was kept.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="Old code to run beside: a git revision, a folder with another checkout, or another environment's "
            "python. Unless given: the commit of the capture, where this checkout has it.",
        ),
    ] = None,
    peer: PeerOption = None,
    stored: Annotated[bool, typer.Option("--stored", help="Run no old code: judge by what was kept.")] = False,
    limit: LimitOption = 5.0,
    repeats: RepeatsOption = 3,
    most: MostOption = None,
    steps: StepsOption = None,
    sets: SetOption = None,
    folder: BaselineFolderOption = Path("baseline"),
    as_json: JsonOption = False,
) -> None:
    """Train as baseline NAME did, with the code here, and tell whether anything got worse.

    Exit code 0: nothing did; 1: something did; 2: it could not be done; 3: the noise, or another machine, does not let
    tell. The report is kept in the baseline's folder, as check.md and check.json.
    """
    from supertuner.config.sources import environment
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.baseline import baseline_check as checking
    from supertuner.tools.baseline.rounds import ComparisonOptions

    options = ComparisonOptions(limit / 100, repeats, most or 3 * repeats, steps, against, stored)
    if peer is not None:
        from supertuner.tools.baseline import peer_ratios as ratios

        path = folder / name
        unusable_options = {"--against": against is not None, "--stored": stored}
        _refuse_options(unusable_options, "with --peer the other side is the peer: leave out {}, or leave out --peer")
        if config is None:
            raise OptionError("a baseline of ratios has no configuration of its own: give CONFIG")
        with ConsoleSink() as console:
            judgement = ratios.check_ratios(
                path,
                config,
                peer,
                options,
                sets=sets or (),
                environ=environment.current_environment(),
                progress=console,
            )
        _report_and_exit(f"Baseline {path.name}, beside {peer.name}", judgement, None, as_json)
    with ConsoleSink() as console:
        path, judgement = checking.check_baseline(
            folder,
            name,
            options,
            config=config,
            sets=sets or (),
            environ=environment.current_environment(),
            progress=console,
        )
    _report_and_exit(f"Baseline {path.name}, now", judgement, path / "check", as_json)


@app.command()
def compare(
    old: Annotated[str, typer.Argument(metavar="A", help="The baseline before.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="B", help="The baseline after.", show_default=False)],
    again: Annotated[
        bool, typer.Option("--again", help="Run both here again, in turns, so that they see the same weather.")
    ] = False,
    limit: LimitOption = 5.0,
    repeats: Annotated[int | None, typer.Option(min=1, help="With --again: as for `check`.", show_default="3")] = None,
    most: MostOption = None,
    steps: StepsOption = None,
    folder: BaselineFolderOption = Path("baseline"),
    as_json: JsonOption = False,
) -> None:
    """Tell whether baseline B is worse than A: by what was kept of both, or, with --again, by running both.

    Exit codes as those of `check`. The report is kept in B's folder, as against-A.md and against-A.json.
    """
    from supertuner.config.sources import environment
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.baseline import baseline_check as checking
    from supertuner.tools.baseline.baseline_capture import DEFAULT_REPEATS
    from supertuner.tools.baseline.rounds import ComparisonOptions

    if not again:
        unusable_options = {"--steps": steps is not None, "--repeats": repeats is not None, "--most": most is not None}
        _refuse_options(
            unusable_options,
            "{} says how to run both, and nothing runs without --again: give that too, or leave it out",
        )
    repeats = repeats or DEFAULT_REPEATS
    options = ComparisonOptions(limit / 100, repeats, most or 3 * repeats, steps)
    if again:
        with ConsoleSink() as console:
            path, judgement = checking.compare_by_rerunning(
                folder, (old, new), options, environ=environment.current_environment(), progress=console
            )
    else:
        path, judgement = checking.compare_baselines(folder, (old, new), options)
    _report_and_exit(
        f"Baseline {path.name} against {Path(old).name}", judgement, path / f"against-{Path(old).name}", as_json
    )


def _refuse_options(is_given_by_option: dict[str, bool], message: str) -> None:
    """Options that would change nothing."""
    if refused := [name for name, is_given in is_given_by_option.items() if is_given]:
        raise OptionError(message.format(" and ".join(refused)))


def _report_and_exit(title: str, judgement: ComparisonResult, stem: Path | None, as_json: bool) -> None:
    """Print what was found, keep it, and leave with its exit code."""
    from supertuner.core.durable import write_json, write_text
    from supertuner.tools.baseline import comparison_report as verdict
    from supertuner.tools.baseline.regression import RegressionVerdict

    document, text = verdict.as_json(title, judgement), verdict.as_markdown(title, judgement)
    if stem is not None:
        try:
            write_json(stem.with_name(f"{stem.name}.json"), document)
            write_text(stem.with_name(f"{stem.name}.md"), text)
        except OSError as error:  # what was found counts all the same, and took long to find
            typer.echo(f"the report is not kept: {stem.parent} cannot be written to ({error.strerror})", err=True)
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False) if as_json else text.rstrip())
    codes = {RegressionVerdict.WORSE: 1, RegressionVerdict.UNDECIDED: UNDECIDED_EXIT_CODE}
    raise typer.Exit(codes.get(judgement.verdict, 0))
