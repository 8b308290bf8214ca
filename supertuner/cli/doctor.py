"""`supertuner doctor` checks this machine and prints remedies; `supertuner env` prints the variables of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

REQUIREMENT_NAMES = (
    "gpu, known-machine, managed, concurrent, ats, direct, one-pool, batch-calls, cuda-torch, stock-torch, pages-64k, "
    "no-numa-balancing, no-swap, overflow, hints, allocation, no-traps"
)  # a copy of requirements.REQUIREMENTS, because --help must not import it; a test compares the two


def doctor(
    oversubscription_scale: Annotated[
        float, typer.Option(min=0.01, max=100, help="Size of the allocation test, as a multiple of GPU memory.")
    ] = 1.5,
    skip_allocation: Annotated[
        bool, typer.Option("--skip-allocation", help="Only inspect: allocate nothing and run nothing on the GPU.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The JSON report to write.", show_default="gh200_diagnostic_report.json"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the report; write it to a file only with --report.")
    ] = False,
    require: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help=f"Exit with 1 unless all of these hold: {REQUIREMENT_NAMES}.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Let the report replace a file that is not a report.")
    ] = False,
) -> None:
    """Check this machine: GPU, driver, torch, memory, environment, allocations beyond GPU memory; print remedies.

    Exits with 0 also if there is no GPU; with 1 if a requirement is not met, if there is a GPU but a CPU-only torch, or
    if memory returned wrong values.
    """
    from supertuner.cli.check_page import CheckPage
    from supertuner.config.sources.environment import current_environment
    from supertuner.core.host import HostFacts
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.doctor import doctor_report as reports
    from supertuner.tools.doctor.examination import examine_machine
    from supertuner.tools.doctor.requirements import parse_requirements, unmet_requirements
    from supertuner.tools.doctor.software_checks import CUDA_TORCH_REMEDY

    requirements = parse_requirements(require) if require is not None else ()
    report_path = report or (None if as_json else Path(reports.DEFAULT_NAME))
    target = None if report_path is None else reports.report_path(report_path, overwrite)
    scale = None if skip_allocation else oversubscription_scale
    page = CheckPage()
    shown = () if as_json else (ConsoleSink(), page.show)
    examination = examine_machine(HostFacts(), current_environment(), scale, *shown)
    unmet = unmet_requirements(requirements, examination)
    document = reports.build_report(examination, requirements, unmet)
    if target is not None:
        reports.write_report(target, document)
    if as_json:
        typer.echo(reports.report_bytes(document))
    else:
        page.end(examination.checks, f"report: {report_path}" if report_path else "")
    for line in unmet:
        typer.echo(f"not met: {line}", err=True)
    if examination.torch_ignores_gpu:
        torch = examination.torch.version
        typer.echo(f"torch {torch} is a CPU build, and this machine has a GPU: {CUDA_TORCH_REMEDY}", err=True)
    if unmet or examination.torch_ignores_gpu or examination.memory_corrupted:
        raise typer.Exit(1)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print values, defaults and readers as JSON.")] = False,
) -> None:
    """Print the exports of a GH200 job, for eval "$(supertuner env)". Variables that are set keep their values."""
    from supertuner.config.sources import gh200_exports as exports
    from supertuner.config.sources.environment import current_environment

    if as_json:
        typer.echo(json.dumps(exports.export_table(current_environment()), indent=2))
        return
    for line in exports.export_lines(current_environment()):
        typer.echo(os.fsencode(line))  # a value that is not UTF-8 is printed with its original bytes
