"""Saves in the background: a checkpoint holds the run at the time of the call, and its outcome is always reported."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import pytest
import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.core.errors import CheckpointError, NonFiniteError, RunFolderError
from supertuner.core.events import Event, NoteEvent, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.distributed.process_group import SingleProcess
from supertuner.train import loop
from supertuner.train.checkpoint import async_saver as saver
from supertuner.train.checkpoint.async_saver import CheckpointSaver
from supertuner.train.checkpoint.load import find_checkpoints, load_checkpoint, verify_checkpoint
from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR
from supertuner.train.checkpoint.state import collect_contents
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.setup import open_run
from tests.train.runs import config


@dataclass
class RecordingSink:
    events: list[Event] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def emit(self, event: Event, /) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())

    def text(self) -> str:
        return "\n".join(f"{e.what}: {e.message}" for e in self.events if isinstance(e, WarningEvent | NoteEvent))


class GatedHost(HostFacts):
    """A host whose `free_bytes` waits for an event: nothing is written before."""

    open, reached = threading.Event(), threading.Event()

    def free_bytes(self, folder: Path) -> int:
        self.reached.set()
        assert self.open.wait(60)
        return HostFacts().free_bytes(folder)


class LimitedHost(HostFacts):
    """A host with little free disk space or memory."""

    disk: int | None = None
    memory: int | None = None

    def free_bytes(self, folder: Path) -> int:
        return HostFacts().free_bytes(folder) if self.disk is None else self.disk

    def memory_available(self) -> int | None:
        return HostFacts().memory_available() if self.memory is None else self.memory


class HostWithoutDisk(LimitedHost):
    disk = 100


class HostWithoutMemory(LimitedHost):
    memory = 1000


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingRun]:
    """A run of two experts with a moving average that has trained three steps."""
    folder = tmp_path_factory.mktemp("saver")
    file = config(folder, "run", validation={"at_start": False, "every_steps": None, "at_end": False})
    settings = load_config(file).config
    (folder / "made").mkdir()
    with open_run(settings, RunContext.silent(folder / "made")) as run:
        with run.dataloader() as loader:
            for _, window in zip(range(3), loader, strict=False):
                loop._train_step(run, window)
        yield run


@pytest.fixture
def run(opened: TrainingRun, tmp_path: Path) -> Iterator[TrainingRun]:
    """The same run in a new folder. Tests raise its step; nothing more is trained."""
    before = opened.context, opened.step
    opened.context = replace(opened.context, run_dir=tmp_path, sink=RecordingSink())
    yield opened
    opened.context, opened.step = before


def heard(run: TrainingRun) -> RecordingSink:
    assert isinstance(run.context.sink, RecordingSink)
    return run.context.sink


def folder(run: TrainingRun) -> Path:
    return run.context.run_dir / CHECKPOINTS_DIR


def steps(run: TrainingRun) -> list[int]:
    assert not [name for name in os.listdir(folder(run)) if name.startswith(".")], "nothing half done is left"
    found = find_checkpoints(folder(run))
    assert all(one.problem is None for one in found)
    return [one.step for one in found]


def gated(run: TrainingRun) -> GatedHost:
    gate = GatedHost()
    run.context = replace(run.context, host=gate)
    for event in (gate.open, gate.reached):
        event.clear()
    return gate


@contextmanager
def disturbed(run: TrainingRun) -> Iterator[None]:
    """Inside the block every tensor of the run has other values."""
    tensors = [
        one for part, found in collect_contents(run, {})[0].parts.items() for one in found.values() if part != "random"
    ]
    kept = [one.detach().clone() for one in tensors]
    with torch.no_grad():
        for one in tensors:
            one.add_(1) if one.is_floating_point() else one.zero_()
        yield
        for one, value in zip(tensors, kept, strict=True):
            one.copy_(value)


def test_later_training_does_not_change_the_saved_state(run: TrainingRun) -> None:
    expected = {
        name: {k: v.detach().clone() for k, v in part.items()}
        for name, part in collect_contents(run, {})[0].parts.items()
    }
    assert any(part.startswith("ema.") for part in expected)
    assert sum(len(part) for name, part in expected.items() if name.startswith("optimizer.")) > 10
    gate = gated(run)
    with CheckpointSaver(run) as saves:
        saves.save()
        assert gate.reached.wait(60), "it is being written, and training goes on"
        position = run.loss_log.position()
        with disturbed(run):
            run.step += 1
            run.loss_log.append_line(b"later\n")
            gate.open.set()
            saves.wait()
            run.step -= 1
    loaded = load_checkpoint(folder(run) / "step-00000003")
    assert loaded.state["step"] == 3 and loaded.state["losses"] == list(position)
    for name, part in expected.items():
        found = loaded.read_part(name)
        assert found.keys() == part.keys() and all(torch.equal(found[one], part[one]) for one in part), name
    run.loss_log.truncate(*position)


def test_saves_are_written_in_order_and_none_is_skipped(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "WARN_AFTER_S", 0.0)
    gate = gated(run)
    with CheckpointSaver(run) as saves:
        saves.save()
        assert gate.reached.wait(60)
        run.step += 1
        threading.Timer(0.1, gate.open.set).start()
        saves.save()
        assert find_checkpoints(folder(run))[0].step == 3, "the earlier one was there before the later one began"
        run.step += 1
        saves.save()
    assert steps(run) == [4, 5], "keep: 2"
    assert heard(run).text().count("until an earlier checkpoint was written") == 1
    assert heard(run).text().count("saved step") == 3
    assert heard(run).threads == {threading.get_ident()}, "sinks hear of it from the thread that trains"


def test_a_finished_save_is_reported_between_windows_and_a_running_one_is_not_awaited(run: TrainingRun) -> None:
    gate = gated(run)
    with CheckpointSaver(run) as saves:
        saves.save()
        saves.report_if_finished()
        assert "saved" not in heard(run).text()
        gate.open.set()
        saves.wait()
        assert "saved step 3" in heard(run).text() and steps(run) == [3]
        saves.report_if_finished()
        saves.wait()
    assert heard(run).text().count("saved") == 1


class RecordingProgress:
    """Progress that records what it shows, and for which thread."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.asked = threading.Event()
        self.threads: set[int] = set()
        self.nbytes = self.done = 0

    def phase(self, title: str, *, items: int = 0, nbytes: int = 0, noun: str = "files") -> RecordingProgress:
        self.titles.append(title)
        self.threads.add(threading.get_ident())
        self.nbytes = nbytes
        self.asked.set()
        return self

    def advance(self, items: int = 0, nbytes: int = 0) -> None:
        self.threads.add(threading.get_ident())
        self.done += nbytes

    def __enter__(self) -> RecordingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def test_waiting_training_shows_the_progress_of_the_save(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "SHOW_PROGRESS_AFTER_S", 0.0)
    shown = RecordingProgress()
    run.context = replace(run.context, progress=shown)

    def slow(save: saver.SaveJob, title: str, *, nbytes: int = 0, **more: object) -> saver.SaveJob:
        save.nbytes += nbytes
        assert shown.asked.wait(60)
        return save

    monkeypatch.setattr(saver.SaveJob, "phase", slow)
    with CheckpointSaver(run) as saves:
        saves.save()
    assert shown.titles == ["saving step-00000003"] and shown.threads == {threading.get_ident()}
    assert shown.done == shown.nbytes > 1000


def test_a_failed_scheduled_save_ends_the_run_at_its_next_window(run: TrainingRun) -> None:
    run.context = replace(run.context, host=HostWithoutDisk())
    with pytest.raises(CheckpointError, match="are missing; free some space"), CheckpointSaver(run) as saves:
        saves.save()
        while True:
            saves.report_if_finished()


def test_a_failed_last_save_ends_the_run_with_an_error(run: TrainingRun) -> None:
    run.context = replace(run.context, host=HostWithoutDisk())
    with pytest.raises(CheckpointError, match="are missing; free some space"), CheckpointSaver(run) as saves:
        saves.save()


def test_a_requested_save_is_answered_once_it_is_on_disk(run: TrainingRun) -> None:
    answers: list[tuple[Path | None, str, bool]] = []

    def answer(made: Path | None, why: str) -> None:
        answers.append((made, why, made is not None and verify_checkpoint(made) == []))

    gate = gated(run)
    with CheckpointSaver(run) as saves:
        saves.save_on_request(answer)
        saves.save_on_request(answer)
        assert gate.reached.wait(60) and answers == []
        gate.open.set()
        saves.wait()
        saves.save_on_request(answer)
    made = folder(run) / "step-00000003"
    assert answers == [(made, "", True)] * 3
    assert heard(run).text().count("saved step") == 1, "of one step one is enough"


def test_a_failed_requested_save_is_refused_and_the_run_goes_on(run: TrainingRun) -> None:
    answers: list[tuple[Path | None, str]] = []
    with CheckpointSaver(run) as saves:
        run.context = replace(run.context, host=HostWithoutDisk())
        saves.save_on_request(lambda made, why: answers.append((made, why)))
        saves.wait()
        run.context = replace(run.context, host=HostFacts())
        run.step += 1
        saves.save()
    assert [made for made, _ in answers] == [None] and "are missing" in answers[0][1]
    assert "request checkpoint" in heard(run).text() and steps(run) == [4]


def test_an_interrupt_abandons_the_save_and_keeps_the_last_checkpoint(run: TrainingRun) -> None:
    answers: list[str] = []
    with pytest.raises(KeyboardInterrupt), CheckpointSaver(run) as saves:
        saves.save()
        saves.wait()
        gate = gated(run)
        run.step += 1
        saves.save_on_request(lambda made, why: answers.append(why))
        assert gate.reached.wait(60)
        threading.Timer(0.1, gate.open.set).start()
        raise KeyboardInterrupt
    assert steps(run) == [3]
    assert len(answers) == 1 and "abandoned" in answers[0]


def test_an_error_in_training_waits_for_the_running_save(run: TrainingRun) -> None:
    gate = gated(run)
    with pytest.raises(NonFiniteError), CheckpointSaver(run) as saves:
        saves.save()
        assert gate.reached.wait(60)
        threading.Timer(0.1, gate.open.set).start()
        raise NonFiniteError("loss")
    assert steps(run) == [3] and "saved step 3" in heard(run).text()


def test_an_error_in_training_is_raised_even_if_the_save_fails_too(run: TrainingRun) -> None:
    run.context = replace(run.context, host=HostWithoutDisk())
    with pytest.raises(NonFiniteError), CheckpointSaver(run) as saves:
        saves.save()
        raise NonFiniteError("loss")
    assert "are missing" in heard(run).text()


def test_an_error_in_training_is_raised_even_if_no_event_can_be_recorded(run: TrainingRun) -> None:
    class Full:
        def emit(self, event: Event, /) -> None:
            raise RunFolderError("events.jsonl cannot be written")

    run.context = replace(run.context, host=HostWithoutDisk(), sink=Full())
    with pytest.raises(NonFiniteError), CheckpointSaver(run) as saves:
        saves.save()
        raise NonFiniteError("loss")


def test_a_request_is_answered_after_any_error_of_the_save(run: TrainingRun) -> None:
    class Broken(HostFacts):
        def free_bytes(self, folder: Path) -> int:
            raise RuntimeError("not a refusal of ours")

    answers: list[str] = []
    run.context = replace(run.context, host=Broken())
    with pytest.raises(RuntimeError, match="not a refusal of ours"), CheckpointSaver(run) as saves:
        saves.save_on_request(lambda made, why: answers.append(why))
        saves.wait()
    assert answers == ["not a refusal of ours"]


def test_without_memory_for_a_copy_training_waits_and_copies_nothing(run: TrainingRun) -> None:
    run.context = replace(run.context, host=HostWithoutMemory())
    with CheckpointSaver(run) as saves:
        for _ in range(2):
            saves.save()
            assert steps(run)[-1] == run.step, "it is on disk already"
            run.step += 1
        assert saves._copies.nbytes == 0
    assert heard(run).text().count("training waits while checkpoints are written") == 1


def test_ranks_of_a_node_need_memory_for_all_their_copies(run: TrainingRun) -> None:
    class Little(LimitedHost):
        memory = 10_000

    run.context, run.process_group = replace(run.context, host=Little()), SingleProcess(local_world_size=4)
    with CheckpointSaver(run) as saves:
        assert saves._has_room_for_copy(4_000)
        saves._sharded = True
        assert saves._has_room_for_copy(1_000) and not saves._has_room_for_copy(4_000)
        saves._sharded = False


def test_a_save_in_the_foreground_gives_the_same_bytes(run: TrainingRun) -> None:
    with CheckpointSaver(run) as saves:
        saves.save()
    behind = {file.name: file.read_bytes() for file in (folder(run) / "step-00000003").iterdir()}
    os.rename(folder(run), run.context.run_dir / "other")
    run.context = replace(run.context, host=HostWithoutMemory())
    with CheckpointSaver(run) as saves:
        saves.save()
    assert {file.name: file.read_bytes() for file in (folder(run) / "step-00000003").iterdir()} == behind


def test_the_memory_of_copies_is_reused(run: TrainingRun) -> None:
    with CheckpointSaver(run) as saves:
        held = set()
        for _ in range(4):
            saves.save()
            saves.wait()
            held.add(saves._copies.nbytes)
            run.step += 1
    parts = collect_contents(run, {})[0].parts
    assert held == {sum(one.nbytes for part in parts.values() for one in part.values())}


def test_logs_are_synced_before_the_checkpoint_is_published(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(fd: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def seen_rename(old: Path, new: Path) -> None:
        calls.append(str(new))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    with CheckpointSaver(run) as saves:
        saves.save()
    named = calls.index(str(folder(run) / "step-00000003"))
    for log in (run.loss_log, run.validation_log):
        assert str(log.path) in calls[:named]


def test_a_running_job_answers_all_requests_for_a_checkpoint(run: TrainingRun) -> None:
    """For a step with a scheduled save: one save serves all requests."""
    requests = run.context.run_dir / "requests"
    requests.mkdir()
    for name in ("mine", "yours"):
        (requests / f"{name}.json").write_text('{"kind": "checkpoint"}')
    ending = loop.train(run)
    assert ending.stopped_by is None and steps(run) == [10, 12]
    for name in ("mine", "yours"):
        answer = json.loads((requests / "answers" / f"{name}.json").read_text())
        expected = {"status": "done", "message": "checkpoint of step 4", "path": str(folder(run) / "step-00000004")}
        assert answer == expected
    assert sorted(os.listdir(requests)) == ["answers", "refused"]
    assert heard(run).text().count("saved step 4:") == 1


def test_a_run_with_a_full_disk_ends_with_the_missing_bytes(run: TrainingRun) -> None:
    run.context = replace(run.context, host=HostWithoutDisk())
    with pytest.raises(CheckpointError, match=r"checkpoint of step 4 needs .* are missing; free some space"):
        loop.train(run)
    assert run.step in (5, 6), "at the next window, at the latest where the next save is due"
