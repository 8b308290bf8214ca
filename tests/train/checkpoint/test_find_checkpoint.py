"""Which checkpoint a run resumes from: its own newest, a named one, or that of the run that it began from."""

from __future__ import annotations

from pathlib import Path

import pytest

from supertuner.arena.run_context import RunContext
from supertuner.core.errors import CheckpointError
from supertuner.core.events import DecisionEvent, Event, NullSink
from supertuner.core.host import HostFacts
from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR
from supertuner.train.checkpoint.resume import find_checkpoint
from tests.train.checkpoints import parts_at, save_parts, state_at


class RecordingSink:
    """A sink that records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


def put(run: Path, *steps: int) -> None:
    for step in steps:
        save_parts(run / CHECKPOINTS_DIR, step, parts_at(step), state_at(step), keep=9, host=HostFacts())


def chosen(run: Path, resume: str, heard: RecordingSink | None = None) -> Path | None:
    found = find_checkpoint(RunContext(run, heard or RecordingSink(), NullSink(), HostFacts()), resume)
    return None if found is None else found.path


def test_latest_is_the_newest_checkpoint_of_the_run_and_none_for_a_new_run(tmp_path: Path) -> None:
    assert chosen(tmp_path / "a", "latest") is None
    put(tmp_path / "a", 20, 40)
    assert chosen(tmp_path / "a", "latest") == tmp_path / "a" / CHECKPOINTS_DIR / "step-00000040"


def test_never_requires_a_new_run(tmp_path: Path) -> None:
    assert chosen(tmp_path / "a", "never") is None
    put(tmp_path / "a", 20)
    with pytest.raises(CheckpointError, match="never"):
        chosen(tmp_path / "a", "never")


def test_a_named_checkpoint_of_the_run_is_used(tmp_path: Path) -> None:
    put(tmp_path / "a", 20, 40)
    wanted = tmp_path / "a" / CHECKPOINTS_DIR / "step-00000020"
    assert chosen(tmp_path / "a", str(wanted)) == wanted


def test_a_run_that_began_from_another_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    put(tmp_path / "other", 40)
    origin, heard = tmp_path / "other" / CHECKPOINTS_DIR / "step-00000040", RecordingSink()
    assert chosen(tmp_path / "a", str(origin), heard) == origin and heard.events == []
    put(tmp_path / "a", 60)
    assert chosen(tmp_path / "a", str(origin), heard) == tmp_path / "a" / CHECKPOINTS_DIR / "step-00000060"
    (decided,) = heard.events
    assert isinstance(decided, DecisionEvent) and str(origin) in decided.reason


def test_a_named_checkpoint_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
        chosen(tmp_path / "a", str(tmp_path / "nothing"))


def test_a_wrong_name_is_an_error_even_for_a_run_with_checkpoints(tmp_path: Path) -> None:
    """A typo must not mean "latest": a user who names a step wants that step."""
    put(tmp_path / "a", 20, 40)
    for typo in ("Latest", "20", str(tmp_path / "nothing")):
        with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
            chosen(tmp_path / "a", typo)


def test_a_run_with_only_damaged_checkpoints_does_not_restart_silently(tmp_path: Path) -> None:
    put(tmp_path / "a", 20, 40)
    for step in ("step-00000020", "step-00000040"):
        (tmp_path / "a" / CHECKPOINTS_DIR / step / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        chosen(tmp_path / "a", "latest")
