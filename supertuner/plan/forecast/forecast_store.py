"""A cache of forecasts in files: the same question again is answered without torch, traces or a search for plans.

    <folder>/<key>.json      one forecast, with the format, its key and a checksum

The key holds everything that determines a forecast: the configuration, the machine, the survey of the datasets, the
model's files, the versions of the libraries, and all code of this program. A file is checked when it is read; a damaged
one counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import xxhash
from pydantic import TypeAdapter

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.durable import write_bytes
from supertuner.core.events import Progress, Sink, WarningEvent
from supertuner.models.file_stamps import model_file_stamps
from supertuner.plan.forecast.dataset_sizes import DatasetSize
from supertuner.plan.forecast.results import EstimateOptions, MachineCapacity, RunForecast
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.plan.trace.trace_store import TRACE_FOLDER, program_versions, remove_oldest

FORMAT: Final = "supertuner forecast 1"
ALL_PACKAGES: Final = ("",)


@dataclass(frozen=True, eq=False, slots=True)
class ForecastStore:
    """The forecasts in a folder."""

    folder: Path
    sink: Sink

    def read(self, key: str) -> RunForecast | None:
        """The forecast with this key; None: it is missing or damaged."""
        try:
            stored = json.loads((self.folder / f"{key}.json").read_bytes())
            expected = {"format": FORMAT, "key": key, "checksum": _checksum(stored["forecast"])}
            if any(stored.get(name) != value for name, value in expected.items()):
                return None
            return _forecast_type().validate_python(json.loads(stored["forecast"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # of JSON, of its structure, of pydantic
            return None

    def write(self, key: str, forecast: RunForecast) -> None:
        """Stores a forecast. One that would not be read exactly as it is, is not stored."""
        text = json.dumps(_forecast_type().dump_python(forecast, mode="json"))
        again = _forecast_type().validate_python(json.loads(text))
        if again != forecast or json.dumps(again.to_dict()) != json.dumps(forecast.to_dict()):
            return
        file = self.folder / f"{key}.json"
        content = {"format": FORMAT, "key": key, "checksum": _checksum(text), "forecast": text}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(file, json.dumps(content).encode())
            remove_oldest(self.folder, "*.json")
        except OSError as error:
            self.sink.emit(
                WarningEvent("traces", f"{file} cannot be written ({error}); it is computed again next time")
            )


def forecast_key(
    config: RunConfig, capacity: MachineCapacity, options: EstimateOptions, datasets: Sequence[DatasetSize]
) -> str:
    """A hash of everything that determines the forecast."""
    determined_by = {
        "format": FORMAT,
        "versions": program_versions(ALL_PACKAGES),
        "config": config.model_dump(mode="json"),
        "capacity": asdict(capacity),
        "options": asdict(options),
        "datasets": [repr(one) for one in datasets],
        "model_files": model_file_stamps(config.model),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(determined_by, sort_keys=True).encode())


def cached_forecast(
    config: RunConfig, capacity: MachineCapacity, options: EstimateOptions, sink: Sink, progress: Progress
) -> RunForecast:
    """The forecast of a run on a machine, from the cache or made now. Errors as in `estimate_run`."""
    datasets = survey_datasets(config, options.samples)
    store = ForecastStore(config.run.output_dir / TRACE_FOLDER, sink)
    key = forecast_key(config, capacity, options, datasets)
    forecast = store.read(key)
    if forecast is None:
        with progress.phase("loading libraries"):  # torch and diffusers: this import takes seconds
            from supertuner.plan.forecast.forecast import estimate_run
        forecast = estimate_run(config, capacity, options, sink, progress, datasets=datasets).forecast
        store.write(key, forecast)
    return forecast


@cache
def _forecast_type() -> TypeAdapter[RunForecast]:
    return TypeAdapter(RunForecast)


def _checksum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
