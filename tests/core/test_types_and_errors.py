"""Formats of sizes, and errors with path, value, remedy and exit code."""

from __future__ import annotations

import inspect
import re

import pytest

from supertuner.core import errors
from supertuner.core.errors import ArenaDamagedError, ConfigError, ConfigProblem, SuperTunerError
from supertuner.core.events import DecisionEvent, Event, NullSink, TeeSink, WarningEvent
from supertuner.core.types import GIB, KIB, MIB, bytes_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1023 B"),
        (640 * KIB, "640 KiB"),
        (3.1 * GIB, "3.1 GiB"),
        (99.9 * MIB, "99.9 MiB"),
        (5 * GIB * KIB, "5.0 TiB"),
        (-2 * MIB, "-2.0 MiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_fits(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_a_configuration_error_lists_every_problem_and_counts_them() -> None:
    problems = [ConfigProblem("datasets[0].repeats", "-1 is below 0"), ConfigProblem("", "the file is empty")]
    error = ConfigError("run.json", problems)
    assert str(error).splitlines() == [
        "config error in run.json",
        "  datasets[0].repeats: -1 is below 0",
        "  the file is empty",
        "2 errors; nothing was started",
    ]
    assert error.exit_code == 2
    assert str(ConfigError("x", problems[:1])).endswith("1 error; nothing was started")


def test_an_error_about_damage_names_the_file_and_the_remedy() -> None:
    assert str(ArenaDamagedError("/dev/shm/x/index", "bit 3 is flipped")) == (
        "/dev/shm/x/index: bit 3 is flipped; remove it with `supertuner arena rm` and stage again"
    )


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn: list[str] = re.findall(r"^\s+[│├└─\s]*(\w+)  ", errors.__doc__ or "", re.MULTILINE)
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, SuperTunerError)]
    assert sorted(drawn) == sorted(c.__name__ for c in classes)


def test_a_tee_sink_passes_events_to_all_sinks_in_order() -> None:
    class RecordedSink:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def emit(self, event: Event, /) -> None:
            self.events.append(event)

    first, second = RecordedSink(), RecordedSink()
    tee = TeeSink(first, NullSink(), second)
    events: list[Event] = [WarningEvent("a", "b"), DecisionEvent("c", 1, "d")]
    for event in events:
        tee.emit(event)
    assert first.events == second.events == events
