"""Before a run begins it says whether it fits, and one that cannot is refused with what would help, unless told to."""

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
    made = a_run(folder, "run", train={"mixed_precision": "bf16", "batch_size": 2, "max_steps": 2})
    return load_config(made).config.model_copy(
        update={
            "forecast": load_config(made).config.forecast.model_copy(update={"before_training": "always", **forecast})
        }
    )


def with_small_gpu(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """This machine has a GH200 with so little memory."""
    monkeypatch.setattr(
        module, "_room", lambda device, host: replace(known_machine_capacity("gh200-96"), gpu_bytes=mib << 20)
    )


def begin(config: RunConfig, **more: Any) -> RecordingSink:
    told = RecordingSink()
    preflight_check(config, CPU, host=HostFacts(), sink=told, progress=NullSink(), **more)
    return told


def test_a_run_that_fits_says_so_in_one_line(folder: Path) -> None:
    told = begin(configured(folder))
    (event,) = told.events
    assert isinstance(event, NoteEvent) and event.what == "forecast"
    assert event.message.startswith("modelled: fits this machine: ") and "\n" not in event.message


def test_a_run_that_cannot_fit_is_refused_with_what_would_help(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_small_gpu(monkeypatch, 66)
    with pytest.raises(TrainError) as refused:
        begin(configured(folder))
    text = str(refused.value)
    assert text.startswith("modelled: does not fit GH200 96 GB: ")
    assert "too much" in text and "--anyway" in text and "forecast.refuse: false" in text


@pytest.mark.parametrize("how", ["flag", "setting"])
def test_it_begins_all_the_same_if_told_to_and_is_warned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with_small_gpu(monkeypatch, 66)
    config = configured(folder, refuse=how != "setting")
    assert "does not fit" in begin(config, anyway=how == "flag").text(WarningEvent)


def test_overflow_is_counted_where_it_is_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_small_gpu(monkeypatch, 66)
    config = configured(folder)
    overflow = config.memory.overflow.model_copy(update={"enabled": True})
    spilling = config.model_copy(update={"memory": config.memory.model_copy(update={"overflow": overflow})})
    assert "fits" in begin(spilling).text()


def test_nothing_is_traced_where_the_model_is_small_beside_the_memory(folder: Path) -> None:
    told = begin(configured(folder, before_training="auto"))
    assert "no forecast: the model is small beside" in told.text()


def test_weights_that_are_shared_out_are_said_not_to_be_forecast(folder: Path) -> None:
    told = begin(configured(folder), shared_out=True)
    assert told.text() == (
        'no forecast and no plan: what a process needs of weights that are shared out (parallel.strategy "fsdp") is '
        "not worked out"
    )


def test_nothing_is_said_where_nothing_is_asked(folder: Path) -> None:
    assert begin(configured(folder, before_training="never")).events == []


def test_a_model_that_nobody_knows_yet_is_no_reason_not_to_begin(folder: Path) -> None:
    config = configured(folder)
    unknown = config.model.model_copy(update={"path": "nobody/knows-this-one"})
    told = begin(config.model_copy(update={"model": unknown}))
    assert "no forecast before the model is here" in told.text()
