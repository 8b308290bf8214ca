"""A run's folder as a person wants to read it: what it is, what was set, what was decided and why. It only reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from supertuner.core.errors import RunFolderError
from supertuner.core.types import JSON, bytes_text, escape_for_terminal
from supertuner.sinks.console import value_text
from supertuner.sinks.jsonlines import read_records, readable_time
from supertuner.sinks.run_folder import (
    DECISIONS_FILE,
    EVENTS_FILE,
    RESOLVED_CONFIG_FILE,
    RUN_FILE,
    SET_ASIDE_FILE,
    lock_holder,
)
from supertuner.sinks.saved_config import flatten_settings
from supertuner.sinks.training_display import held_out_text, samples_text
from supertuner.sinks.training_events import TRAIN_HELD_OUT, TRAIN_SAMPLES

MAX_FILES_SHOWN = 10
FIGURE_FORMATTERS: Final[Mapping[str, Callable[[Mapping[str, JSON]], str]]] = {
    TRAIN_HELD_OUT: held_out_text,
    TRAIN_SAMPLES: samples_text,
}
"""Figures that have words of their own."""
MAX_SETTING_WIDTH = 64
"""Characters that settings take at most before their origin."""


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything `run show` tells, as data."""

    path: str
    name: str
    begun: str
    in_use_by: str | None
    config_file: str
    settings: list[dict[str, JSON]]
    """Settings that somebody gave: path, value, origin."""
    decisions: list[dict[str, JSON]]
    """The last decision of each name; `before` holds the values it had earlier."""
    warnings: list[dict[str, JSON]]
    set_aside: list[dict[str, JSON]]
    figures: dict[str, JSON]
    """The latest figures of each name."""


def read_run(path: Path) -> RunView:
    if not (path / RUN_FILE).is_file():
        raise RunFolderError(f"{path} is not a run's folder: it has no {RUN_FILE}{_runs_below_hint(path)}")
    run = _load_object(path / RUN_FILE)
    config = _load_object(path / RESOLVED_CONFIG_FILE)
    events = list(read_records(path / EVENTS_FILE))
    return RunView(
        path=str(path),
        name=str(run.get("name")),
        begun=str(run.get("begun")),
        in_use_by=lock_holder(path),
        config_file=str(run.get("config_file")),
        settings=explicit_settings(config),
        decisions=latest_decisions(_load_list(path / DECISIONS_FILE)),
        warnings=_without_duplicates(
            {"what": e["what"], "message": e["message"]} for e in events if e["event"] == "warned"
        ),
        set_aside=list(read_records(path / SET_ASIDE_FILE)),
        figures={str(e["what"]): e["figures"] for e in events if e["event"] == "measured"},
    )


def explicit_settings(config: Mapping[str, JSON]) -> list[dict[str, JSON]]:
    """The settings that do not come from a default, with where they come from."""
    origins = config.get("origins")
    if not isinstance(origins, Mapping):
        return []
    values = dict(flatten_settings(config.get("config")))
    return [
        {"path": path, "value": values.get(path), "origin": origin}
        for path, origin in origins.items()
        if isinstance(origin, str) and not origin.startswith("default")
    ]


def latest_decisions(decisions: Iterable[Mapping[str, JSON]]) -> list[dict[str, JSON]]:
    """One entry per decision, as it stands now; what it was earlier is kept beside it."""
    latest: dict[JSON, dict[str, JSON]] = {}
    for decision in decisions:
        earlier = latest.pop(decision["what"], None)
        before = [*_as_list(earlier["before"]), earlier["value"]] if earlier else []
        latest[decision["what"]] = {**decision, "before": before}
    return list(latest.values())


def print_run(view: RunView, console: Console) -> None:
    """Print the run, widest facts first; parts that are empty are left out."""
    state = f"in use by {view.in_use_by}" if view.in_use_by else "not in use"
    console.print(Text.assemble((view.name, "bold"), f"  begun {readable_time(view.begun)}, {state}"))
    console.print(Text(view.path, style="dim"), soft_wrap=True)
    _print_section(console, f"settings given ({view.config_file})", _render_settings(view) if view.settings else None)
    _print_section(console, "decisions", _render_decisions(view) if view.decisions else None)
    _print_section(console, "warnings", _render_warnings(view) if view.warnings else None)
    _print_section(console, "figures", _render_figures(view) if view.figures else None)
    _print_section(console, _set_aside_title(len(view.set_aside)), _render_set_aside(view) if view.set_aside else None)


def figure_text(name: str, value: JSON) -> str:
    """A figure with its unit, which its name carries: `1.5 s`, `3.0 GiB stored`, `1,200 files`, `codec raw`."""
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


def run_as_json(view: RunView) -> str:
    return json.dumps(asdict(view), indent=2, ensure_ascii=False)


def _print_section(console: Console, title: str, body: RenderableType | None) -> None:
    if body is not None:
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Padding(body, (0, 0, 0, 2)))


def _render_settings(view: RunView) -> RenderableType:
    lines = [(f"{row['path']} = {value_text(row['value'])}", str(row["origin"])) for row in view.settings]
    width = min(MAX_SETTING_WIDTH, max(len(assignment) for assignment, _ in lines))
    return Group(*(Text.assemble(left.ljust(width), (f"  {origin}", "dim")) for left, origin in lines))


def _render_decisions(view: RunView) -> RenderableType:
    lines: list[RenderableType] = []
    for row in view.decisions:
        before = ", ".join(value_text(value) for value in _as_list(row["before"]))
        reason = f"{row['reason']} (earlier: {before})" if before else str(row["reason"])
        lines.append(Text(f"{row['what']} = {value_text(row['value'])}"))
        lines.append(Padding(Text(reason, "dim"), (0, 0, 0, 4)))
    return Group(*lines)


def _render_warnings(view: RunView) -> RenderableType:
    return Group(*(Text.assemble((str(w["what"]), "yellow"), f": {w['message']}") for w in view.warnings))


def _render_figures(view: RunView) -> RenderableType:
    """One line each; figures inside figures are left to `--json`."""
    lines = []
    for what, figures in view.figures.items():
        if what in FIGURE_FORMATTERS and isinstance(figures, Mapping):
            lines.append(Text(FIGURE_FORMATTERS[what](figures)))
            continue
        plain = figures.items() if isinstance(figures, Mapping) else ()
        texts = [
            figure_text(name, value) for name, value in plain if value is not None and not isinstance(value, Mapping)
        ]
        lines.append(Text.assemble((what, "bold"), f": {', '.join(texts)}"))
    return Group(*lines)


def _render_set_aside(view: RunView) -> RenderableType:
    counts = Counter(str(line["dataset"]) for line in view.set_aside)
    lines = [Text(f"{dataset}: {count}", "dim") for dataset, count in counts.items()] if len(counts) > 1 else []
    for line in view.set_aside[:MAX_FILES_SHOWN]:
        lines.append(Text.assemble((escape_for_terminal(str(line["file"])), "yellow"), f": {line['reason']}"))
    if len(view.set_aside) > MAX_FILES_SHOWN:
        lines.append(Text(f"and {len(view.set_aside) - MAX_FILES_SHOWN} more in {SET_ASIDE_FILE}", "dim"))
    return Group(*lines)


def _set_aside_title(files: int) -> str:
    return f"set aside: {files} file{'s' if files != 1 else ''}"


def _runs_below_hint(path: Path) -> str:
    """A hint for somebody who named the folder of runs instead of a run."""
    runs = sorted(p.parent.name for p in path.glob(f"*/{RUN_FILE}")) if path.is_dir() else []
    return f"; there are runs below it: {', '.join(runs[:5])}" if runs else ""


def _load_object(path: Path) -> Mapping[str, JSON]:
    value = _load_json(path)
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is not a JSON object; the run's folder is damaged")
    return value


def _load_list(path: Path) -> list[dict[str, JSON]]:
    value = _load_json(path)
    if not isinstance(value, list):
        raise RunFolderError(f"{path} is not a JSON list; the run's folder is damaged")
    return value


def _load_json(path: Path) -> object:
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); the run's folder is damaged") from error
    return value


def _without_duplicates(rows: Iterable[dict[str, JSON]]) -> list[dict[str, JSON]]:
    return list({json.dumps(row): row for row in rows}.values())


def _as_list(value: JSON) -> list[JSON]:
    return list(value) if isinstance(value, (list, tuple)) else []
