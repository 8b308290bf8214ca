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
from supertuner.core.types import JSON, bytes_text, on_screen
from supertuner.sinks.console import value_text
from supertuner.sinks.jsonlines import people_time, read_lines
from supertuner.sinks.kept_config import leaves
from supertuner.sinks.live import held_out_text, samples_text
from supertuner.sinks.run_folder import DECISIONS, EVENTS, RESOLVED, RUN, SET_ASIDE, holder_of
from supertuner.sinks.training import HELD_OUT, SAMPLES

FILES_SHOWN = 10
TOLD: Final[Mapping[str, Callable[[Mapping[str, JSON]], str]]] = {HELD_OUT: held_out_text, SAMPLES: samples_text}
"""Figures that have words of their own."""
WIDEST = 64
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
    if not (path / RUN).is_file():
        raise RunFolderError(f"{path} is not a run's folder: it has no {RUN}{_runs_below(path)}")
    run = _load(path / RUN)
    config = _load(path / RESOLVED)
    events = list(read_lines(path / EVENTS))
    return RunView(
        path=str(path),
        name=str(run.get("name")),
        begun=str(run.get("begun")),
        in_use_by=holder_of(path),
        config_file=str(run.get("config_file")),
        settings=given_settings(config),
        decisions=latest_decisions(_load_list(path / DECISIONS)),
        warnings=_once({"what": e["what"], "message": e["message"]} for e in events if e["event"] == "warned"),
        set_aside=list(read_lines(path / SET_ASIDE)),
        figures={str(e["what"]): e["figures"] for e in events if e["event"] == "measured"},
    )


def given_settings(config: Mapping[str, JSON]) -> list[dict[str, JSON]]:
    """The settings that do not come from a default, with where they come from."""
    origins = config.get("origins")
    if not isinstance(origins, Mapping):
        return []
    values = dict(leaves(config.get("config")))
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
        before = [*_list(earlier["before"]), earlier["value"]] if earlier else []
        latest[decision["what"]] = {**decision, "before": before}
    return list(latest.values())


def show(view: RunView, console: Console) -> None:
    """Print the run, widest facts first; parts that are empty are left out."""
    state = f"in use by {view.in_use_by}" if view.in_use_by else "not in use"
    console.print(Text.assemble((view.name, "bold"), f"  begun {people_time(view.begun)}, {state}"))
    console.print(Text(view.path, style="dim"), soft_wrap=True)
    _part(console, f"settings given ({view.config_file})", _settings(view) if view.settings else None)
    _part(console, "decisions", _decisions(view) if view.decisions else None)
    _part(console, "warnings", _warnings(view) if view.warnings else None)
    _part(console, "figures", _figures(view) if view.figures else None)
    _part(console, _counted(len(view.set_aside)), _set_aside(view) if view.set_aside else None)


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


def as_json(view: RunView) -> str:
    return json.dumps(asdict(view), indent=2, ensure_ascii=False)


def _part(console: Console, title: str, body: RenderableType | None) -> None:
    if body is not None:
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Padding(body, (0, 0, 0, 2)))


def _settings(view: RunView) -> RenderableType:
    lines = [(f"{row['path']} = {value_text(row['value'])}", str(row["origin"])) for row in view.settings]
    width = min(WIDEST, max(len(left) for left, _ in lines))
    return Group(*(Text.assemble(left.ljust(width), (f"  {origin}", "dim")) for left, origin in lines))


def _decisions(view: RunView) -> RenderableType:
    lines: list[RenderableType] = []
    for row in view.decisions:
        before = ", ".join(value_text(value) for value in _list(row["before"]))
        reason = f"{row['reason']} (earlier: {before})" if before else str(row["reason"])
        lines.append(Text(f"{row['what']} = {value_text(row['value'])}"))
        lines.append(Padding(Text(reason, "dim"), (0, 0, 0, 4)))
    return Group(*lines)


def _warnings(view: RunView) -> RenderableType:
    return Group(*(Text.assemble((str(w["what"]), "yellow"), f": {w['message']}") for w in view.warnings))


def _figures(view: RunView) -> RenderableType:
    """One line each; figures inside figures are left to `--json`."""
    lines = []
    for what, figures in view.figures.items():
        if what in TOLD and isinstance(figures, Mapping):
            lines.append(Text(TOLD[what](figures)))
            continue
        plain = figures.items() if isinstance(figures, Mapping) else ()
        texts = [
            figure_text(name, value) for name, value in plain if value is not None and not isinstance(value, Mapping)
        ]
        lines.append(Text.assemble((what, "bold"), f": {', '.join(texts)}"))
    return Group(*lines)


def _set_aside(view: RunView) -> RenderableType:
    counts = Counter(str(line["dataset"]) for line in view.set_aside)
    lines = [Text(f"{dataset}: {count}", "dim") for dataset, count in counts.items()] if len(counts) > 1 else []
    for line in view.set_aside[:FILES_SHOWN]:
        lines.append(Text.assemble((on_screen(str(line["file"])), "yellow"), f": {line['reason']}"))
    if len(view.set_aside) > FILES_SHOWN:
        lines.append(Text(f"and {len(view.set_aside) - FILES_SHOWN} more in {SET_ASIDE}", "dim"))
    return Group(*lines)


def _counted(files: int) -> str:
    return f"set aside: {files} file{'s' if files != 1 else ''}"


def _runs_below(path: Path) -> str:
    """A hint for somebody who named the folder of runs instead of a run."""
    runs = sorted(p.parent.name for p in path.glob(f"*/{RUN}")) if path.is_dir() else []
    return f"; there are runs below it: {', '.join(runs[:5])}" if runs else ""


def _load(path: Path) -> Mapping[str, JSON]:
    value = _parsed(path)
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is not a JSON object; the run's folder is damaged")
    return value


def _load_list(path: Path) -> list[dict[str, JSON]]:
    value = _parsed(path)
    if not isinstance(value, list):
        raise RunFolderError(f"{path} is not a JSON list; the run's folder is damaged")
    return value


def _parsed(path: Path) -> object:
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); the run's folder is damaged") from error
    return value


def _once(rows: Iterable[dict[str, JSON]]) -> list[dict[str, JSON]]:
    return list({json.dumps(row): row for row in rows}.values())


def _list(value: JSON) -> list[JSON]:
    return list(value) if isinstance(value, (list, tuple)) else []
