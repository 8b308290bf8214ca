"""Resuming with other library versions causes a warning that names what changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from supertuner.arena.run_context import RunContext
from supertuner.core.events import NullSink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.train.checkpoint.resume import _warn_of_other_versions
from supertuner.train.checkpoint.state import library_versions
from tests.train.validation.making import RecordingSink


def warnings(saved: object) -> list[str]:
    sink = RecordingSink()
    run: Any = SimpleNamespace(context=RunContext(Path(), sink, NullSink(), HostFacts()))
    loaded: Any = SimpleNamespace(path="step-1", state={"versions": saved})
    _warn_of_other_versions(run, loaded)
    return [event.message for event in sink.events if isinstance(event, WarningEvent)]


def test_equal_versions_cause_no_warning():
    assert warnings(library_versions()) == []


def test_the_warning_names_only_what_changed():
    (message,) = warnings({**library_versions(), "torch": "2.12.0"})
    assert message.startswith("torch 2.12.0 then") and "diffusers" not in message


def test_a_checkpoint_without_versions_causes_a_warning():
    (message,) = warnings(None)
    assert "torch None then" in message
