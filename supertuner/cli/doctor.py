"""`supertuner doctor`: what this machine is and what stands in a run's way, one line each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from supertuner.tools.doctor.check_result import CheckResult

REQUIREMENT_NAMES = (
    "gpu, known-machine, managed, concurrent, ats, direct, one-pool, batch-calls, cuda-torch, stock-torch, pages-64k, "
    "no-numa-balancing, no-swap, overflow, hints, allocation, no-traps"
)  # checks.REQUIREMENTS, spelt out because --help imports no room; a test compares them

STYLES = {"good": "", "warning": "yellow", "bad": "bold red", "absent": "dim"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    oversubscription_scale: Annotated[
        float, typer.Option(min=0.01, max=100, help="Size of the allocation test, as a multiple of GPU memory.")
    ] = 1.5,
    skip_allocation: Annotated[
        bool, typer.Option("--skip-allocation", help="Look only: take no memory and start nothing on the GPU.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the JSON report goes.", show_default="gh200_diagnostic_report.json"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report and nothing else; a file only with --report.")
    ] = False,
    require: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help=f"Exit 1 unless all of these hold: {REQUIREMENT_NAMES}.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Let the report replace a file that is not one of ours.")
    ] = False,
) -> None:
    """Look at this machine: GPU, driver, torch, memory, environment; try memory beyond the GPU's; say what to do.

    Exit code 0 also without a GPU; 1 if a requirement is not met or memory did not keep its values.
    """
    from supertuner.config.sources import environment
    from supertuner.core.events import NullSink
    from supertuner.core.host import HostFacts
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.doctor import doctor_report as reports
    from supertuner.tools.doctor.examination import examine_machine
    from supertuner.tools.doctor.requirements import parse_requirements, unmet_requirements

    requirements = parse_requirements(require) if require is not None else ()
    report_path = report or (None if as_json else Path(reports.DEFAULT_NAME))
    target = None if report_path is None else reports.report_path(report_path, overwrite)
    scale = None if skip_allocation else oversubscription_scale
    if as_json:
        examination = examine_machine(
            HostFacts(), environment.current_environment(), scale, NullSink(), lambda checks: None
        )
    else:
        page = DoctorPage()
        examination = examine_machine(HostFacts(), environment.current_environment(), scale, ConsoleSink(), page.show)
    unmet = unmet_requirements(requirements, examination)
    document = reports.build_report(examination, requirements, unmet)
    if target is not None:
        reports.write_report(target, document)
    if as_json:
        typer.echo(reports.report_bytes(document))
    else:
        page.end(examination.checks, report_path)
    for line in unmet:
        typer.echo(f"not met: {line}", err=True)
    if unmet or examination.memory_corrupted:
        raise typer.Exit(1)


class DoctorPage:
    """Standard output as the doctor uses it: folded and coloured on a terminal, one plain line per check elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        from supertuner.tools.doctor import screen

        self._screen = screen
        self._console = Console(highlight=False)
        self._width = self._console.width if self._console.is_terminal else None
        self._plain = not screen.can_encode_signs(self._console.encoding)
        self._signs = screen.PLAIN_SIGNS if self._plain else screen.SIGNS

    def show(self, checks: Sequence[CheckResult]) -> None:
        for line, mark in self._screen.render_lines(checks, self._width, self._signs):
            self._print(line, "bold" if mark is None else STYLES[mark.value])

    def end(self, checks: Sequence[CheckResult], report: Path | None) -> None:
        self._print("")
        self._print(self._screen.summary(checks, self._signs) + (f"; report: {report}" if report else ""))

    def _print(self, line: str, style: str = "") -> None:
        from rich.text import Text

        text = Text(self._screen.to_ascii(line) if self._plain else line, style=style)
        self._console.print(text, soft_wrap=True)  # folded already, so that a command in it can be copied
