"""A forecast is read back exactly; whatever determines it changes its key; a damaged file counts as missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from supertuner.config.sources.load import load_config
from supertuner.core.events import NullSink
from supertuner.plan.forecast.forecast_store import ForecastStore, cached_forecast, forecast_key
from supertuner.plan.forecast.results import EstimateOptions
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.plan.forecast.target_machine import known_machine_capacity
from supertuner.plan.trace.trace_store import TRACE_FOLDER
from tests.train.runs import config as a_run

CAPACITY = known_machine_capacity("gh200-96")
OPTIONS = EstimateOptions()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    a_run(tmp_path, "run", train={"mixed_precision": "bf16", "max_steps": 4})
    return tmp_path / "run.json"


def test_the_same_question_is_answered_from_the_file_without_torch(file: Path) -> None:
    config = load_config(file, check_paths=False).config
    first = cached_forecast(config, CAPACITY, OPTIONS, NullSink(), NullSink())
    code = f"""
import json, sys
import supertuner as st
forecast = st.estimate(st.load_config({str(file)!r}), machine="gh200-96")
assert "torch" not in sys.modules and "diffusers" not in sys.modules
print(json.dumps(forecast.to_dict()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == json.dumps(first.to_dict()), done.stderr
    store = ForecastStore(config.run.output_dir / TRACE_FOLDER, NullSink())
    (stored,) = store.folder.glob("*.json")
    assert store.read(stored.stem) == first
    content = stored.read_bytes()
    for damaged in (content[:-9], content.replace(b"GiB", b"GIB"), b"[]", b"", b"\xff"):
        stored.write_bytes(damaged)
        assert damaged == content or store.read(stored.stem) is None


def test_whatever_determines_a_forecast_is_part_of_its_key(file: Path) -> None:
    config = load_config(file, check_paths=False).config
    datasets = survey_datasets(config)

    def key(sets: str = "train.batch_size=1", **changes: object) -> str:
        changed = load_config(file, sets=[sets], check_paths=False).config
        arguments = {"capacity": CAPACITY, "options": OPTIONS, "datasets": datasets, **changes}
        return forecast_key(changed, **arguments)  # type: ignore[arg-type]

    keys = [
        key(),
        key("train.batch_size=2"),
        key(capacity=known_machine_capacity("rtx-4090")),
        key(options=EstimateOptions(advise=False)),
        key(datasets=tuple(replace(one, samples=9) for one in datasets)),
    ]
    assert key() == keys[0], "equal questions have equal keys"
    folder = file.parent / "model"
    folder.mkdir()
    keys.append(key(f"model.path={folder}"))
    (folder / "config.json").write_text("{}")
    keys.append(key(f"model.path={folder}"))
    assert len(set(keys)) == len(keys)
