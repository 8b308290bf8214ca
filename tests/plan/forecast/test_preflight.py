"""Before training, a run reports whether it fits; one that does not is refused with remedies, unless it is forced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import load_config
from supertuner.core.errors import TrainError
from supertuner.core.events import Event, NoteEvent, NullSink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.plan.forecast import preflight as module
from supertuner.plan.forecast.preflight import preflight_check
from supertuner.plan.forecast.target_machine import known_machine_capacity
from tests.train.runs import config as a_run

CPU = torch.device("cpu")


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)

    def text(self, kind: type[NoteEvent] | type[WarningEvent] = NoteEvent) -> str:
        return "\n".join(event.message for event in self.events if isinstance(event, kind))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verdicts")


def configured(folder: Path, **forecast: Any) -> RunConfig:
    file = a_run(folder, "run", train={"mixed_precision": "bf16", "batch_size": 2, "max_steps": 2})
    config = load_config(file).config
    changed = config.forecast.model_copy(update={"before_training": "always", **forecast})
    return config.model_copy(update={"forecast": changed})


def with_small_gpu(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """Makes this machine a GH200 with little memory."""
    monkeypatch.setattr(
        module,
        "device_capacity",
        lambda device, host: replace(known_machine_capacity("gh200-96"), gpu_bytes=mib << 20),
    )


def check(config: RunConfig, **more: Any) -> RecordingSink:
    sink = RecordingSink()
    preflight_check(config, CPU, host=HostFacts(), sink=sink, progress=NullSink(), **more)
    return sink


def test_a_run_that_fits_is_reported_in_one_line(folder: Path) -> None:
    (event,) = check(configured(folder)).events
    assert isinstance(event, NoteEvent) and event.what == "forecast"
    assert event.message.startswith("modelled: fits this machine: ") and "\n" not in event.message


def test_a_run_that_does_not_fit_is_refused_with_remedies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_small_gpu(monkeypatch, 66)
    with pytest.raises(TrainError) as refused:
        check(configured(folder))
    text = str(refused.value)
    assert text.startswith("modelled: does not fit GH200 96 GB: ")
    assert "too much" in text and "force" in text and "forecast.refuse: false" in text


@pytest.mark.parametrize("how", ["flag", "setting"])
def test_a_forced_run_that_does_not_fit_gets_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with_small_gpu(monkeypatch, 66)
    config = configured(folder, refuse=how != "setting")
    warning = check(config, force=how == "flag").text(WarningEvent)
    assert "does not fit" in warning and ("force" if how == "flag" else "forecast.refuse: false") in warning


def test_overflow_memory_counts_if_it_is_enabled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_small_gpu(monkeypatch, 66)
    config = configured(folder)
    overflow = config.memory.overflow.model_copy(update={"enabled": True})
    spilling = config.model_copy(update={"memory": config.memory.model_copy(update={"overflow": overflow})})
    assert "fits" in check(spilling).text()


def test_a_model_that_is_small_compared_with_host_memory_is_not_traced(folder: Path) -> None:
    assert "no forecast: the model is small compared with" in check(configured(folder, before_training="auto")).text()


def test_sharded_weights_are_not_forecast_and_the_run_says_so(folder: Path) -> None:
    assert check(configured(folder), sharded=True).text() == (
        'no forecast and no plan: the memory of a process that holds a shard (parallel.strategy "fsdp") is not modelled'
    )


def test_a_forecast_that_is_switched_off_reports_nothing(folder: Path) -> None:
    assert check(configured(folder, before_training="never")).events == []


def test_an_unknown_model_that_is_not_downloaded_yet_does_not_stop_the_run(folder: Path) -> None:
    config = configured(folder)
    unknown = config.model.model_copy(update={"path": "someone/unknown-model"})
    text = check(config.model_copy(update={"model": unknown})).text()
    assert "no forecast until the model is on this machine" in text
