"""Reads run folders: settings, decisions, events, losses, samples, and which process uses the folder.

    for path in find_runs(Path("runs")):
        run = open_run(path)
        print(run.name, run.holder() or "not running", run.losses()[-1:])

Nothing here locks or changes a folder, so a run can be read while it trains.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from supertuner.core.errors import RunFolderError
from supertuner.core.types import JSON
from supertuner.runs.loss_files import HELD_OUT_FILE, LOSSES_FILE, HeldOutRecord, read_held_out_losses, read_losses
from supertuner.sinks import run_folder
from supertuner.sinks.jsonlines import read_records
from supertuner.sinks.run_folder import RUN_FILE
from supertuner.sinks.saved_config import flatten_settings
from supertuner.sinks.training_events import StepRecord

DEFAULT_RUNS_FOLDER = Path("runs")
"""Where runs are unless `run.output_dir` is set."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The content of `supertuner run show`; `to_dict` is its JSON."""

    path: str
    name: str
    begun: str
    """When the run was started for the first time, in UTC."""
    in_use_by: str | None
    config_file: str
    settings: list[dict[str, JSON]]
    """Settings that do not have their default: path, value, origin."""
    decisions: list[dict[str, JSON]]
    """The latest decision of each name; `before` lists its earlier values."""
    warnings: list[dict[str, JSON]]
    set_aside: list[dict[str, JSON]]
    figures: dict[str, JSON]
    """The latest figures of each name."""

    def to_dict(self) -> dict[str, JSON]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunReader:
    """One run folder. Each method reads the files as they are at the time of the call.

    A method raises RunFolderError if a file that it reads is damaged.
    """

    path: Path
    name: str
    begun: str
    """When the run was started for the first time, in UTC."""
    config_file: str
    """Name of the copy of the configuration file in this folder."""

    def holder(self) -> str | None:
        """The process that uses the run, `process 4711 since …`; None if no process does."""
        return run_folder.lock_holder(self.path)

    def config(self) -> Mapping[str, JSON]:
        """Every setting with its value, as a tree."""
        config = self._resolved().get("config")
        return config if isinstance(config, Mapping) else {}

    def explicit_settings(self) -> list[dict[str, JSON]]:
        """The settings that do not have their default, each as path, value and origin."""
        resolved = self._resolved()
        origins = resolved.get("origins")
        if not isinstance(origins, Mapping):
            return []
        values = dict(flatten_settings(resolved.get("config")))
        return [
            {"path": path, "value": values.get(path), "origin": origin}
            for path, origin in origins.items()
            if isinstance(origin, str) and not origin.startswith("default")
        ]

    def decisions(self) -> list[dict[str, JSON]]:
        """The latest decision of each name, with its earlier values in `before`."""
        return latest_decisions(run_folder.read_decisions(self.path / run_folder.DECISIONS_FILE))

    def events(self) -> Iterator[dict[str, JSON]]:
        """Every event, oldest first, as written by `sinks.jsonlines`."""
        return read_records(self.path / run_folder.EVENTS_FILE, ("event",))

    def set_aside(self) -> list[dict[str, JSON]]:
        """The files that the run does not use: dataset, file, reason."""
        return run_folder.read_set_aside(self.path / run_folder.SET_ASIDE_FILE)

    def losses(self) -> list[StepRecord]:
        return read_losses(self.path / LOSSES_FILE)

    def held_out_losses(self) -> list[HeldOutRecord]:
        return read_held_out_losses(self.path / HELD_OUT_FILE)

    def summary(self) -> RunSummary:
        events = list(self.events())
        warnings = [{"what": e.get("what"), "message": e.get("message")} for e in events if e["event"] == "warned"]
        return RunSummary(
            path=str(self.path),
            name=self.name,
            begun=self.begun,
            in_use_by=self.holder(),
            config_file=self.config_file,
            settings=self.explicit_settings(),
            decisions=self.decisions(),
            warnings=list({json.dumps(row): row for row in warnings}.values()),  # without duplicates
            set_aside=self.set_aside(),
            figures={str(e.get("what")): e.get("figures") for e in events if e["event"] == "measured"},
        )

    def _resolved(self) -> Mapping[str, JSON]:
        return run_folder.read_run_object(self.path / run_folder.RESOLVED_CONFIG_FILE)


def open_run(path: str | os.PathLike[str]) -> RunReader:
    """Read the folder of a run: settings, decisions, losses, events. The run may be training.

    Raises RunFolderError if `path` is not the folder of a run.
    """
    path = Path(path)
    if not (path / RUN_FILE).is_file():
        runs = ", ".join(run.name for run in find_runs(path)[:5])
        hint = f"; there are runs below it: {runs}" if runs else ""
        if (DEFAULT_RUNS_FOLDER / path / RUN_FILE).is_file():
            hint = f"; did you mean {DEFAULT_RUNS_FOLDER / path}?"
        raise RunFolderError(f"{path} is not a run folder: it has no {RUN_FILE}{hint}")
    run = run_folder.read_run_object(path / RUN_FILE)
    return RunReader(path, str(run.get("name")), str(run.get("begun")), str(run.get("config_file")))


def find_runs(folder: Path) -> list[Path]:
    """The run folders directly below `folder`, by name; none if `folder` does not exist."""
    return sorted(file.parent for file in folder.glob(f"*/{RUN_FILE}"))


def latest_decisions(decisions: Iterable[Mapping[str, JSON]]) -> list[dict[str, JSON]]:
    """One entry per name: the latest decision, with its earlier values in `before`."""
    latest: dict[JSON, dict[str, JSON]] = {}
    for decision in decisions:
        earlier = latest.pop(decision["what"], None)
        before = [] if earlier is None else [*cast("list[JSON]", earlier["before"]), earlier["value"]]
        latest[decision["what"]] = {**decision, "before": before}
    return list(latest.values())
