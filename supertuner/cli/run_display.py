"""Prints runs for people: rows of a list, an overview of one run, and everything that it recorded, in sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from supertuner.core.types import JSON, bytes_text, escape_for_terminal
from supertuner.runs.run_reader import RunSummary
from supertuner.runs.run_status import LOSSES_AVERAGED, RunStatus
from supertuner.sinks.console import value_text
from supertuner.sinks.jsonlines import readable_time
from supertuner.sinks.phase_counters import duration_text
from supertuner.sinks.run_folder import SET_ASIDE_FILE
from supertuner.sinks.training_display import held_out_text, samples_text
from supertuner.sinks.training_events import TRAIN_HELD_OUT, TRAIN_SAMPLES

MAX_FILES_SHOWN = 10
MAX_SETTING_WIDTH = 64
"""Largest width of the column of settings, in characters; the column of origins follows it."""
FIGURE_FORMATTERS: Final[Mapping[str, Callable[[Mapping[str, JSON]], str]]] = {
    TRAIN_HELD_OUT: held_out_text,
    TRAIN_SAMPLES: samples_text,
}
"""Figures with a format of their own, by name; all others are listed by `figure_text`."""


STATUS_HEADINGS: Final = ("run", "state", "step", "loss", "s/step", "remaining", "newest samples")


def status_row(run: RunStatus) -> tuple[str, ...]:
    """A row of `supertuner run ls`."""
    steps = str(run.step) if run.steps is None else f"{run.step}/{run.steps}"
    return (
        escape_for_terminal(run.name),
        run.state,
        steps,
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if run.seconds_per_step is None else f"{run.seconds_per_step:.3g}",
        "" if run.remaining_s is None else duration_text(run.remaining_s),
        escape_for_terminal(run.last_sample or ""),
    )


def print_overview(run: RunSummary, status: RunStatus, console: Console) -> None:
    """Print what matters at first sight; `print_run` prints everything."""
    _print_heading(run, console)
    _, state, steps, loss, speed, remaining, samples = status_row(status)
    facts = {
        "state": state + (f", {remaining} left" if remaining else ""),
        "step": steps + (f", {speed} s each" if speed else ""),
        f"loss of the last {LOSSES_AVERAGED} steps": loss,
        "newest samples": samples,
        "newest export": _newest(Path(run.path) / "exports"),
        "newest checkpoint": _newest(Path(run.path) / "checkpoints"),
    }
    width = max(map(len, facts))
    lines: list[RenderableType] = [Text(f"{name.ljust(width)}  {text}") for name, text in facts.items() if text]
    _print_section(console, "now", lines)
    _print_section(console, f"settings ({run.config_file})", _setting_lines(run))
    _print_section(console, "warnings", _warning_lines(run))
    count = len(run.set_aside)
    _print_section(console, f"set aside: {count} file{'s' if count != 1 else ''}", _set_aside_lines(run))
    console.print()
    console.print(Text(f"{len(run.decisions)} decisions with their reasons, and all figures: --all", style="dim"))


def _newest(folder: Path) -> str:
    return str(max(folder.glob("step-*"), default=""))


def print_run(run: RunSummary, console: Console) -> None:
    """Print the run in sections; an empty section is left out."""
    _print_heading(run, console)
    _print_section(console, f"settings ({run.config_file})", _setting_lines(run))
    _print_section(console, "decisions", _decision_lines(run))
    _print_section(console, "warnings", _warning_lines(run))
    _print_section(console, "figures", _figure_lines(run))
    count = len(run.set_aside)
    _print_section(console, f"set aside: {count} file{'s' if count != 1 else ''}", _set_aside_lines(run))


def _print_heading(run: RunSummary, console: Console) -> None:
    state = f"in use by {run.in_use_by}" if run.in_use_by else "not in use"
    console.print(Text.assemble((run.name, "bold"), f"  begun {readable_time(run.begun)}, {state}"))
    console.print(Text(run.path, style="dim"), soft_wrap=True)


def figure_text(name: str, value: JSON) -> str:
    """A figure with the unit that its name ends with: `1.5 s`, `3.0 GiB stored`, `1,200 files`, `codec raw`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{name} {value_text(value)}"
    for ending, text in (("bytes_per_s", bytes_text(value) + "/s"), ("bytes", bytes_text(value))):
        if name.endswith(ending):
            return f"{text} {name.removesuffix(ending).strip('_')}".strip()
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    if name.endswith("_per_s"):
        return f"{number} {name.removesuffix('_per_s')}/s"
    if name == "seconds" or name.endswith("_s"):
        return f"{number} s {name.removesuffix('seconds').removesuffix('_s')}".strip()
    return f"{number} {name.replace('_', ' ')}"


def _print_section(console: Console, title: str, lines: list[RenderableType]) -> None:
    if lines:
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Padding(Group(*lines), (0, 0, 0, 2)))


def _setting_lines(run: RunSummary) -> list[RenderableType]:
    rows = [(f"{row['path']} = {value_text(row['value'])}", str(row["origin"])) for row in run.settings]
    width = min(MAX_SETTING_WIDTH, max((len(assignment) for assignment, _ in rows), default=0))
    return [Text.assemble(assignment.ljust(width), (f"  {origin}", "dim")) for assignment, origin in rows]


def _decision_lines(run: RunSummary) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for row in run.decisions:
        assert isinstance(row["before"], list)
        before = ", ".join(value_text(value) for value in row["before"])
        reason = f"{row['reason']} (earlier: {before})" if before else str(row["reason"])
        lines.append(Text(f"{row['what']} = {value_text(row['value'])}"))
        lines.append(Padding(Text(reason, "dim"), (0, 0, 0, 4)))
    return lines


def _warning_lines(run: RunSummary) -> list[RenderableType]:
    return [Text.assemble((str(row["what"]), "yellow"), f": {row['message']}") for row in run.warnings]


def _figure_lines(run: RunSummary) -> list[RenderableType]:
    """One line per name. Figures nested inside figures appear only in the JSON."""
    lines: list[RenderableType] = []
    for what, figures in run.figures.items():
        assert isinstance(figures, Mapping)
        if what in FIGURE_FORMATTERS:
            lines.append(Text(FIGURE_FORMATTERS[what](figures)))
            continue
        plain = {name: value for name, value in figures.items() if value is not None and not isinstance(value, Mapping)}
        texts = [figure_text(name, value) for name, value in plain.items()]
        lines.append(Text.assemble((what, "bold"), f": {', '.join(texts)}"))
    return lines


def _set_aside_lines(run: RunSummary) -> list[RenderableType]:
    counts = Counter(str(row["dataset"]) for row in run.set_aside)
    lines: list[RenderableType] = []
    if len(counts) > 1:
        lines += [Text(f"{dataset}: {count}", "dim") for dataset, count in counts.items()]
    for row in run.set_aside[:MAX_FILES_SHOWN]:
        lines.append(Text.assemble((escape_for_terminal(str(row["file"])), "yellow"), f": {row['reason']}"))
    if len(run.set_aside) > MAX_FILES_SHOWN:
        lines.append(Text(f"and {len(run.set_aside) - MAX_FILES_SHOWN} more in {SET_ASIDE_FILE}", "dim"))
    return lines
