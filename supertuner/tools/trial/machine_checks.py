"""Checks of the machine: device and backends, space at the folders that the run writes to, and the forecast of memory.

The forecast of a large model takes one or two minutes when it is made for the first time. It is made by a process of
its own beside the trial, and what is not ready in time is left to `supertuner estimate`, which goes on from there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError, SuperTunerError, TrainError
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.core.types import bytes_text
from supertuner.plan.forecast.storage import STAGED_PREFIX, ExpertStateSizes, list_storage, storage_folder
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus, absent, bad, good, warning
from supertuner.tools.trial.findings import from_error

if TYPE_CHECKING:
    import torch

    from supertuner.plan.forecast.results import MachineCapacity

GROUP = "machine"
LOW_PRIORITY = 10
"""Niceness of the forecast: the trial comes first."""


# ── device and backends ──────────────────────────────────────────────────────────────────────────────────────────────


def check_device(config: RunConfig) -> tuple[torch.device, list[CheckResult]]:
    """The device of the trial: that of the run, or the CPU if it cannot be used here."""
    import torch

    from supertuner.train import run_checks

    try:
        device = run_checks.select_device(config.train.device)
    except TrainError as error:
        return torch.device("cpu"), [from_error(GROUP, "train.device", error)]
    finding = f"{device}: {run_checks.device_reason(config.train.device)}"
    return device, [(absent if assumes_gpu(config, device) else good)(GROUP, "train.device", finding)]


def assumes_gpu(config: RunConfig, device: torch.device) -> bool:
    """Whether the run is meant for a GPU that this machine does not have: the trial then is on another machine."""
    return device.type == "cpu" and config.train.device != "cpu"


def check_backends(config: RunConfig, device: torch.device) -> tuple[dict[str, str], list[CheckResult]]:
    """Try attention and 8-bit weights on the device. Returns the settings of those that do not work, with values that
    do, for the trial."""
    from supertuner.models.attention import require_backend
    from supertuner.models.quantization import check_quantization
    from supertuner.step.precision import ComputePrecision

    kind = config.model.base_weights
    dtype = ComputePrecision(config.train.mixed_precision, device).dtype
    replaced, checks = {}, []
    try:
        require_backend(config.model.attention, device)
    except ModelError as error:
        replaced["model.attention"] = "native"
        status = CheckStatus.WARNING if assumes_gpu(config, device) else CheckStatus.BAD
        checks.append(from_error(GROUP, "model.attention", error, status))
    try:
        if kind != "as_computed":
            check_quantization(kind, device, dtype)
    except ModelError as error:
        replaced["model.base_weights"] = "as_computed"
        status = CheckStatus.WARNING if assumes_gpu(config, device) else CheckStatus.BAD
        checks.append(from_error(GROUP, "model.base_weights", error, status))
    return replaced, checks


# ── space ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """What the run will write below a folder."""

    what: str
    folder: Path
    nbytes: int | None
    """None: unknown."""


def list_space_needs(
    config: RunConfig, experts: Sequence[ExpertStateSizes], capacity: MachineCapacity
) -> list[SpaceNeed]:
    """Caches, checkpoints and exports of the run, without staged files, which are there by now."""
    from supertuner.plan.forecast.dataset_sizes import forecast_schedule
    from supertuner.plan.forecast.survey import survey_datasets
    from supertuner.plan.forecast.trace_provider import CachedTraceProvider

    traces = CachedTraceProvider(config, capacity, NullSink(), NullSink())
    datasets = survey_datasets(config)
    schedule = forecast_schedule(config, datasets)
    steps = None if schedule is None else schedule.total_steps
    items = list_storage(config, datasets, traces.encoded_sizes(), experts, 0, steps)
    placed = [(item, storage_folder(item, config)) for item in items if not item.what.startswith(STAGED_PREFIX)]
    return [SpaceNeed(item.what, folder, item.nbytes) for item, folder in placed if folder is not None]


def check_space(needs: Sequence[SpaceNeed], host: HostFacts) -> Iterator[CheckResult]:
    """Compare what is written to each file system with its free space. Sizes are modelled."""
    by_device: dict[int, tuple[Path, list[SpaceNeed]]] = {}
    for need in needs:
        folder = _existing_folder(need.folder)
        by_device.setdefault(folder.stat().st_dev, (folder, []))[1].append(need)
    for folder, there in by_device.values():
        free, total = host.free_bytes(folder), sum(need.nbytes or 0 for need in there)
        known = [f"{need.what} {bytes_text(need.nbytes)}" for need in there if need.nbytes]
        unknown = [f"{need.what}: size not known" for need in there if need.nbytes is None]
        text = f"{bytes_text(total)} of {bytes_text(free)} free below {folder}"
        parts = ", ".join([*known, *unknown])
        if total > free:
            remedy = "free some, or move run.output_dir, cache_config.cache_dir, arena.home or HF_HOME"
            yield bad(GROUP, "space", f"modelled: needs {text}: {parts}", remedy)
        else:
            yield good(GROUP, "space", f"modelled: {text}" + (f": {parts}" if parts else ""))


def _existing_folder(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class BackgroundForecast:
    """A forecast by `supertuner estimate` in a process of its own, which ends with the block."""

    def __init__(self, config: Path, sets: Sequence[str], machine: str | None) -> None:
        command = [sys.executable, "-P", "-m", "supertuner", "estimate", str(config), "--json"]
        command += ["--machine", machine] if machine else []
        command += [word for one in sets for word in ("--set", one)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, LOW_PRIORITY)

    def __enter__(self) -> BackgroundForecast:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def wait(self, until: float) -> dict[str, Any] | None:
        """The forecast as JSON; None if it is not ready at this time of `time.monotonic`. ModelError: no forecast."""
        try:
            output, messages = self._process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        if self._process.returncode:
            lines = messages.strip().splitlines()
            raise ModelError(lines[-1] if lines else f"it ended with code {self._process.returncode}")
        forecast: dict[str, Any] = json.loads(output)
        return forecast


def check_memory(forecast: BackgroundForecast, until: float, config: Path, *, refuses: bool) -> CheckResult:
    """Whether the run fits, as modelled; until this time of `time.monotonic`. `refuses` as in `judge_memory`."""
    remedy = f"run `supertuner estimate {config}`"
    try:
        result = forecast.wait(until)
    except SuperTunerError as error:
        return warning(GROUP, "memory", f"not modelled: {error}", remedy)
    if result is None:
        text = "not modelled yet: the first forecast of a model takes a minute or two, and was stopped"
        return warning(GROUP, "memory", text, f"{remedy}, which goes on from there")
    return judge_memory(result, f"{remedy}: it lists changes that make it fit", refuses=refuses)


def judge_memory(forecast: Mapping[str, Any], remedy: str, *, refuses: bool) -> CheckResult:
    """The verdict of a forecast (`RunForecast.to_dict`). `refuses`: the run would not start if it does not fit."""
    assumed = "assumed" in forecast["machine"]["source"]
    verdict = forecast["verdict"] + (" (assumed: there is no GPU here)" if assumed else "")
    if forecast["fits"]:
        return good(GROUP, "memory", verdict)
    return (bad if forecast["fits"] is False and refuses and not assumed else warning)(GROUP, "memory", verdict, remedy)
