"""A full device memory is reported with a remedy, and loses no trained step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.core.errors import TrainError
from supertuner.core.events import Event, NullSink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.train.loop import train
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.setup import open_run
from tests.train.runs import config


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


def raise_out_of_memory(*_: Any) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words of torch.")


@contextmanager
def opened(folder: Path, sink: RecordingSink, experts: str = "all", **validation: Any) -> Iterator[TrainingRun]:
    file = config(folder, "a", train={"max_steps": 3}, model={"experts": experts}, validation=validation)
    (folder / "a" / "run").mkdir(parents=True)
    context = RunContext(folder / "a" / "run", sink, NullSink(), HostFacts())
    with open_run(load_config(file).config, context) as run:
        yield run


def test_a_validation_that_does_not_fit_causes_a_warning_and_loses_no_step(tmp_path: Path) -> None:
    sink = RecordingSink()
    with opened(tmp_path, sink, at_start=False, every_steps=2) as run:
        run.family = replace(run.family, build_sampler=raise_out_of_memory)
        assert train(run).stopped_by is None and run.step == 3
    warnings = [
        event for event in sink.events if isinstance(event, WarningEvent) and event.what.startswith("validation of")
    ]
    assert [one.what for one in warnings] == ["validation of step 2", "validation of step 3"]
    assert (
        "CUDA out of memory. Tried to allocate 2.00 GiB.)" in warnings[0].message
        and "lower valid" in warnings[0].message
    )
    assert (tmp_path / "a" / "run" / "checkpoints" / "step-00000003").is_dir()


def test_a_validation_before_the_first_step_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    with opened(tmp_path, RecordingSink(), at_start=True) as run:
        run.family = replace(run.family, build_sampler=raise_out_of_memory)
        with pytest.raises(TrainError, match="lower validation"):
            train(run)


def test_a_step_that_does_not_fit_ends_the_run_with_a_remedy(tmp_path: Path) -> None:
    with opened(tmp_path, RecordingSink(), at_start=False) as run:
        run.step_options = replace(run.step_options, denoise=raise_out_of_memory)
        with pytest.raises(TrainError, match=r"step 1 does not fit .* lower train.batch_size"):
            train(run)


def test_an_expert_loaded_for_samples_is_freed_afterwards(tmp_path: Path) -> None:
    """Fourteen billion parameters must not wait for Python's next garbage collection."""
    loaded: list[weakref.ref[Any]] = []
    with opened(tmp_path, RecordingSink(), experts="high_noise", at_start=True, every_steps=2, at_end=False) as run:
        own = run.family.build_sampler

        def watched(*given: Any) -> Any:
            sampler: Any = own(*given)
            loaded.extend(weakref.ref(getattr(sampler.pipeline, part)) for part in ("transformer_2", "text_encoder"))
            return sampler

        run.family = replace(run.family, build_sampler=watched)
        gc.disable()
        try:
            train(run)
            assert [one() for one in loaded] == [None] * 4  # before the first step and after the second
        finally:
            gc.enable()
