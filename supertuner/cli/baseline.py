"""`supertuner baseline`: measure a configuration's training, keep it, and tell later whether anything got worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from supertuner.cli.stage import Config, Sets
from supertuner.core.errors import BaselineError, OptionError, SuperTunerError

if TYPE_CHECKING:
    from supertuner.tools.baseline.judging import Judged


class Errors(TyperGroup):
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


app = typer.Typer(cls=Errors, help="Measure training, and tell whether it got worse.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The baseline's name.", show_default=False)]
Folder = Annotated[Path, typer.Option("--dir", help="The folder that holds baselines.")]
Peer = Annotated[
    Path | None,
    typer.Option(metavar="SCRIPT", help="Keep ratios against a script that does the same work, and no times."),
]
Limit = Annotated[float, typer.Option(min=0.1, max=100, metavar="PERCENT", help="How much worse is a regression.")]
Repeats = Annotated[
    int, typer.Option(min=1, help="Rounds, each of new processes; as many again follow while undecided.")
]
Most = Annotated[int | None, typer.Option(min=1, help="Rounds at most.", show_default="three times --repeats")]
Fewer = Annotated[int | None, typer.Option(min=2, help="Steps of each run.", show_default="those of the baseline")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown.")]
UNDECIDED = 3


@app.callback()
def group() -> None:
    """Measure training, and tell whether it got worse."""


@app.command()
def capture(
    name: Name,
    config: Config,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each repeat.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="How many times they are run, each in a process of its own.")] = 3,
    sets: Sets = None,
    folder: Folder = Path("baseline"),
    profile: Annotated[
        bool, typer.Option("--profile", help="Keep a trace of torch's profiler too, of some steps of a run of its own.")
    ] = False,
    peer: Peer = None,
    replace: Annotated[bool, typer.Option("--replace", help="Capture a baseline of this name anew.")] = False,
) -> None:
    """Train CONFIG for some steps, several times over, and keep what it took in baseline/NAME.

    Nothing of it touches the runs of CONFIG: those of a capture have names of their own, and are removed.
    """
    from supertuner.config.sources import environment
    from supertuner.sinks.console import Console
    from supertuner.tools.baseline.capturing import capture as run_capture
    from supertuner.tools.baseline.report import baseline_summary

    if peer is not None:
        _refuse({"--profile": profile}, "with --peer only ratios are kept: leave out {}, or leave out --peer")
        from supertuner.tools.baseline import ratios
        from supertuner.tools.baseline.checking import Asked

        with Console() as console:
            asked = Asked(rounds=repeats, most=3 * repeats, steps=steps)
            found = ratios.capture(
                folder,
                name,
                config,
                peer,
                asked,
                sets=sets or (),
                replace_old=replace,
                environ=environment.current(),
                progress=console,
            )
        typer.echo("\n".join(ratios.as_text(found)))
        typer.echo(f"\nkept in {folder / name}; `supertuner baseline check {name} {config} --peer {peer}` judges by it")
        return
    with Console() as console:
        path, baseline = run_capture(
            folder,
            name,
            config,
            sets=sets or (),
            steps=steps,
            repeats=repeats,
            replace_old=replace,
            profile=profile,
            environ=environment.current(),
            progress=console,
        )
    typer.echo("\n".join(baseline_summary(baseline)))
    typer.echo(f"\nkept in {path}; `supertuner baseline check {name}` tells later whether it got worse")


@app.command("ls")
def list_all(folder: Folder = Path("baseline")) -> None:
    """List the baselines that were captured, and say of those that cannot be read why."""
    from supertuner.tools.baseline.listing import listed

    lines, problems = listed(folder)
    typer.echo("\n".join([*lines, *problems]) or f"no baseline in {folder}")
    if problems:
        raise typer.Exit(BaselineError.exit_code)


@app.command()
def check(
    name: Name,
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
    peer: Peer = None,
    stored: Annotated[bool, typer.Option("--stored", help="Run no old code: judge by what was kept.")] = False,
    limit: Limit = 5.0,
    repeats: Repeats = 3,
    most: Most = None,
    steps: Fewer = None,
    sets: Sets = None,
    folder: Folder = Path("baseline"),
    as_json: Json = False,
) -> None:
    """Train as baseline NAME did, with the code here, and tell whether anything got worse.

    Exit code 0: nothing did; 1: something did; 2: it could not be done; 3: the noise, or another machine, does not let
    tell. The report is kept in the baseline's folder, as check.md and check.json.
    """
    from supertuner.config.sources import environment
    from supertuner.sinks.console import Console
    from supertuner.tools.baseline import checking

    asked = checking.Asked(limit / 100, repeats, most or 3 * repeats, steps)
    if peer is not None:
        from supertuner.tools.baseline import ratios

        path = folder / name
        given = {"--against": against is not None, "--stored": stored}
        _refuse(given, "with --peer the other side is the peer: leave out {}, or leave out --peer")
        if config is None:
            raise OptionError("a baseline of ratios has no configuration of its own: give CONFIG")
        with Console() as console:
            judged = ratios.check(
                path, config, peer, asked, sets=sets or (), environ=environment.current(), progress=console
            )
        _tell(f"Baseline {path.name}, beside {peer.name}", judged, None, as_json)
    with Console() as console:
        path, judged = checking.check(
            folder,
            name,
            asked,
            config=config,
            sets=sets or (),
            against=against,
            stored=stored,
            environ=environment.current(),
            progress=console,
        )
    _tell(f"Baseline {path.name}, now", judged, path / "check", as_json)


@app.command()
def compare(
    old: Annotated[str, typer.Argument(metavar="A", help="The baseline before.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="B", help="The baseline after.", show_default=False)],
    again: Annotated[
        bool, typer.Option("--again", help="Run both here again, in turns, so that they see the same weather.")
    ] = False,
    limit: Limit = 5.0,
    repeats: Annotated[int | None, typer.Option(min=1, help="With --again: as for `check`.", show_default="3")] = None,
    most: Most = None,
    steps: Fewer = None,
    folder: Folder = Path("baseline"),
    as_json: Json = False,
) -> None:
    """Tell whether baseline B is worse than A: by what was kept of both, or, with --again, by running both.

    Exit codes as those of `check`. The report is kept in B's folder, as against-A.md and against-A.json.
    """
    from supertuner.config.sources import environment
    from supertuner.sinks.console import Console
    from supertuner.tools.baseline import checking
    from supertuner.tools.baseline.capturing import REPEATS

    if not again:
        given = {"--steps": steps is not None, "--repeats": repeats is not None, "--most": most is not None}
        _refuse(given, "{} says how to run both, and nothing runs without --again: give that too, or leave it out")
    repeats = repeats or REPEATS
    asked = checking.Asked(limit / 100, repeats, most or 3 * repeats, steps)
    if again:
        with Console() as console:
            path, judged = checking.compare_again(
                folder, (old, new), asked, environ=environment.current(), progress=console
            )
    else:
        path, judged = checking.compare(folder, (old, new), asked)
    _tell(f"Baseline {path.name} against {Path(old).name}", judged, path / f"against-{Path(old).name}", as_json)


def _refuse(given: dict[str, bool], why: str) -> None:
    """Options that would change nothing."""
    if found := [name for name, is_given in given.items() if is_given]:
        raise OptionError(why.format(" and ".join(found)))


def _tell(title: str, judged: Judged, stem: Path | None, as_json: bool) -> None:
    """Print what was found, keep it, and leave with its exit code."""
    from supertuner.core.durable import write_json, write_text
    from supertuner.tools.baseline import verdict
    from supertuner.tools.baseline.judging import Verdict

    document, text = verdict.as_json(title, judged), verdict.as_markdown(title, judged)
    if stem is not None:
        try:
            write_json(stem.with_name(f"{stem.name}.json"), document)
            write_text(stem.with_name(f"{stem.name}.md"), text)
        except OSError as error:  # what was found counts all the same, and took long to find
            typer.echo(f"the report is not kept: {stem.parent} cannot be written to ({error.strerror})", err=True)
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False) if as_json else text.rstrip())
    codes = {Verdict.WORSE: 1, Verdict.UNDECIDED: UNDECIDED}
    raise typer.Exit(codes.get(judged.verdict, 0))
