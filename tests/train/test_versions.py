"""Going on under other versions is said, with what changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from supertuner.core.events import WarningEvent
from supertuner.train.checkpoint.state import _warn_of_other_versions, library_versions
from tests.train.validation.making import RecordingSink


def told(saved: object) -> list[str]:
    sink = RecordingSink()
    run: Any = SimpleNamespace(sink=sink)
    loaded: Any = SimpleNamespace(path="step-1", state={"versions": saved})
    _warn_of_other_versions(run, loaded)
    return [event.message for event in sink.events if isinstance(event, WarningEvent)]


def test_the_same_versions_are_not_worth_a_word():
    assert told(library_versions()) == []


def test_what_changed_is_named_and_nothing_else():
    (message,) = told({**library_versions(), "torch": "2.12.0"})
    assert message.startswith("torch 2.12.0 then") and "diffusers" not in message


def test_a_checkpoint_that_does_not_say_is_told_too():
    (message,) = told(None)
    assert "torch None then" in message
