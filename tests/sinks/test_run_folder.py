"""A run folder stores settings and decisions, belongs to one run, and is released when its process exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from supertuner.core.errors import RunFolderError
from supertuner.core.events import DecisionEvent, Event, MeasurementEvent, SetAsideEvent, WarningEvent
from supertuner.core.types import JSON
from supertuner.sinks.jsonlines import read_records
from supertuner.sinks.run_folder import RunFolder, lock_holder
from supertuner.sinks.saved_config import SavedConfig
from supertuner.train.run.loss_log import LossLog
from tests.distributed.shared_saves import small_files

CONFIG_FILE = b"run: {name: cats}   # a comment that a parser would lose\n"


def config(seed: int = 0, **settings: JSON) -> SavedConfig:
    resolved: dict[str, JSON] = {"run": {"name": "cats", "seed": seed}, **settings}
    return SavedConfig(CONFIG_FILE, ".yaml", resolved, {"run.name": "cats.yaml"})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_configuration_file_and_the_resolved_settings_are_stored(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "runs/cats", "cats", config()):
        pass
    assert (tmp_path / "runs/cats/config.given.yaml").read_bytes() == CONFIG_FILE
    stored = json.loads((tmp_path / "runs/cats/config.resolved.json").read_text())
    assert stored["config"]["run"] == {"name": "cats", "seed": 0}
    assert stored["origins"] == {"run.name": "cats.yaml"}


def test_attached_files_are_stored_and_cannot_leave_the_folder(tmp_path: Path) -> None:
    attachments = {"../../escape.json": b"[]", "data.json": b"[1]"}
    with RunFolder(tmp_path / "run", "cats", SavedConfig(b"{}", ".json", {}, {}, attachments)):
        pass
    contents = tree(tmp_path)
    assert contents["run/config.given.1.escape.json"] == b"[]"
    assert contents["run/config.given.2.data.json"] == b"[1]"
    assert all(name.startswith("run/") for name in contents)


def test_a_decision_is_on_disk_when_emit_returns(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()) as folder:
        folder.emit(DecisionEvent("datasets[cats].in_memory.compression", "none", "saves 0.4 %, less than 5 %"))
        [decision] = json.loads((tmp_path / "run/decisions.json").read_text())
    assert decision["what"] == "datasets[cats].in_memory.compression"
    assert decision["value"] == "none"
    assert decision["reason"] == "saves 0.4 %, less than 5 %"


def test_a_reopened_run_keeps_its_decisions_without_duplicates(tmp_path: Path) -> None:
    first, changed = DecisionEvent("workers", 2, "CPUs"), DecisionEvent("workers", 4, "CPUs")
    for decision in (first, first, changed, changed):
        with RunFolder(tmp_path / "run", "cats", config()) as folder:
            folder.emit(decision)
    assert [d["value"] for d in json.loads((tmp_path / "run/decisions.json").read_text())] == [2, 4]


def test_all_events_are_stored_in_order(tmp_path: Path) -> None:
    events: list[Event] = [
        WarningEvent("a", "unwise"),
        DecisionEvent("b", 1, "so"),
        SetAsideEvent("cats", "x.jpg", "empty"),
        MeasurementEvent("c", {"n": 1}),
    ]
    with RunFolder(tmp_path / "run", "cats", config()) as folder:
        folder.emit_all(events)
    kinds = [line["event"] for line in read_records(tmp_path / "run/events.jsonl")]
    assert kinds == ["warned", "decided", "set_aside", "measured"]


def test_a_file_set_aside_in_two_sessions_is_listed_once(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFolder(tmp_path / "run", "cats", config()) as folder:
            folder.emit(SetAsideEvent("cats", "a.jpg", "truncated"))
    assert [line["file"] for line in read_records(tmp_path / "run/set_aside.jsonl")] == ["a.jpg"]


def test_forget_set_aside_removes_the_files_of_one_dataset(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()) as folder:
        folder.emit_all([SetAsideEvent("cats", "a.jpg", "truncated"), SetAsideEvent("dogs", "b.jpg", "empty")])
        folder.forget_set_aside("cats")
        folder.emit(SetAsideEvent("cats", "c.jpg", "empty"))
    assert [line["file"] for line in read_records(tmp_path / "run/set_aside.jsonl")] == ["b.jpg", "c.jpg"]


def test_a_file_name_that_is_not_utf8_survives(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    with RunFolder(tmp_path / "run", "cats", config()) as folder:
        folder.emit(SetAsideEvent("cats", name, "empty"))
        folder.emit(DecisionEvent("limit", name, "first file"))
    assert [line["file"] for line in read_records(tmp_path / "run/set_aside.jsonl")] == [name]


def test_other_settings_are_refused_with_the_differences_and_no_file_changes(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config(seed=0)):
        (tmp_path / "run" / "losses.jsonl").write_text("{}\n")
    before = tree(tmp_path)
    with pytest.raises(RunFolderError) as refused:
        RunFolder(tmp_path / "run", "cats", config(seed=7))
    assert "run.seed: 0 there, 7 here" in str(refused.value)
    assert "another run.name" in str(refused.value)
    assert {k: v for k, v in tree(tmp_path).items() if not k.endswith(".lock")} == {
        k: v for k, v in before.items() if not k.endswith(".lock")
    }


@pytest.mark.parametrize("result", ["checkpoints", "samples", "exports"])
def test_a_run_without_results_accepts_other_settings_and_lists_the_differences(tmp_path: Path, result: str) -> None:
    with RunFolder(tmp_path / "run", "cats", config(seed=0)) as folder:
        folder.emit(DecisionEvent("limit", 1, "first file"))
        assert folder.replaced_settings == ()
    with RunFolder(tmp_path / "run", "cats", config(seed=7)) as folder:
        assert folder.replaced_settings == ("run.seed: 0 there, 7 here",)
        assert json.loads((tmp_path / "run" / "decisions.json").read_text()) == []
    stored = json.loads((tmp_path / "run" / "config.resolved.json").read_text())["config"]
    assert stored["run"]["seed"] == 7
    with RunFolder(tmp_path / "run", "cats", config(seed=7)) as folder:
        assert folder.replaced_settings == ()
        (tmp_path / "run" / result / "step-1").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="another run"):
        RunFolder(tmp_path / "run", "cats", config(seed=0))


def test_a_refusal_names_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config(seed=0)):
        for step in (50, 100):
            (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    with pytest.raises(
        RunFolderError, match=r"another run\.name \(with checkpoints\.resume=.*step-00000100 it resumes from there"
    ):
        RunFolder(tmp_path / "run", "cats", config(seed=7))


def test_after_a_refusal_the_run_itself_can_be_opened(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config(seed=0)):
        (tmp_path / "run" / "losses.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError):
        RunFolder(tmp_path / "run", "cats", config(seed=7))
    with RunFolder(tmp_path / "run", "cats", config(seed=0)):
        pass


def test_a_folder_with_other_files_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"thesis\.tex.*another run\.output_dir"):
        RunFolder(tmp_path, "cats", config())
    assert tree(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_file_instead_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "run", "cats", config())
    with pytest.raises(RunFolderError, match="cannot be created"):
        RunFolder(tmp_path / "run/below", "cats", config())


def test_a_run_from_a_later_version_is_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    facts = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(RunFolderError, match="format 99, this version reads 1"):
        RunFolder(tmp_path / "run", "cats", config())


def test_a_damaged_run_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    (tmp_path / "run/run.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"run\.json cannot be read"):
        RunFolder(tmp_path / "run", "cats", config())


def test_a_folder_in_use_is_refused_with_the_process(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()} since"):
            RunFolder(tmp_path / "run", "cats", config())
        assert f"process {os.getpid()}" in (lock_holder(tmp_path / "run") or "")
    assert lock_holder(tmp_path / "run") is None


HOLD = """
import sys, time
from itertools import pairwise
from pathlib import Path
from supertuner.core.events import DecisionEvent, SetAsideEvent
from supertuner.sinks.saved_config import SavedConfig
from supertuner.train.run.loss_log import LossLog
from supertuner.sinks.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), "cats", SavedConfig(b"{}", ".json", {"a": 1}, {}))
sys.stdout.write("open\\n"); sys.stdout.flush()
for number in range(10**9):
    folder.emit_all([DecisionEvent("n", number, "counting"), SetAsideEvent("cats", f"{number}.jpg", "why " * 50)])
"""


def test_a_run_killed_at_any_moment_can_be_reopened(tmp_path: Path) -> None:
    for turn in range(6):
        child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        assert f"process {child.pid}" in (lock_holder(tmp_path / "run") or "")
        time.sleep(0.003 * turn)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with RunFolder(tmp_path / "run", "cats", SavedConfig(b"{}", ".json", {"a": 1}, {})):
            decisions = json.loads((tmp_path / "run/decisions.json").read_text())
            values = [d["value"] for d in decisions]
            assert all(b in (0, a + 1) for a, b in pairwise(values)), "no decision of a session is missing"
            assert all(line["reason"] for line in read_records(tmp_path / "run/set_aside.jsonl"))
        assert [p.name for p in (tmp_path / "run").iterdir() if p.name.endswith(".tmp")] == []


def test_threads_may_emit_concurrently(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()) as folder:

        def work(thread: int) -> None:
            for number in range(100):
                folder.emit(SetAsideEvent("cats", f"{thread}-{number}.jpg", "broken " * 20))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_records(tmp_path / "run/set_aside.jsonl"))) == 400


def test_the_digest_does_not_depend_on_the_order_of_settings() -> None:
    here = SavedConfig(b"", ".json", {"a": 1, "b": {"c": 2, "d": 3}}, {})
    there = SavedConfig(b"other bytes", ".toml", {"b": {"d": 3, "c": 2}, "a": 1}, {})
    assert here.digest == there.digest


def test_differences_list_added_removed_and_changed_settings() -> None:
    here: dict[str, JSON] = {"a": 1, "list": [1, 2], "new": None, "same": "x"}
    there: dict[str, JSON] = {"a": 2, "list": [1], "old": "y", "same": "x"}
    assert SavedConfig(b"", ".json", here, {}).identity_differences(there) == [
        "a: 2 there, 1 here",
        "list: [1] there, [1, 2] here",
        "new: not set there, null here",
        'old: "y" there, not set here',
    ]


def test_a_setting_added_later_is_no_difference_while_it_has_its_default() -> None:
    defaults: dict[str, JSON] = {"adapter.dora": False, "datasets[].weight": 1.0}
    here: dict[str, JSON] = {"adapter": {"rank": 4, "dora": False}, "datasets": [{"id": "a", "weight": 1.0}]}
    there: dict[str, JSON] = {"adapter": {"rank": 4}, "datasets": [{"id": "a"}]}
    saved = SavedConfig(b"", ".json", here, {}, defaults=defaults)
    assert saved.identity_differences(there) == []
    assert saved.digest == SavedConfig(b"", ".json", there, {}, defaults=defaults).digest
    other = SavedConfig(b"", ".json", {**here, "adapter": {"rank": 4, "dora": True}}, {}, defaults=defaults)
    assert other.identity_differences(there) == ["adapter.dora: false there, true here"]


def test_changeable_settings_are_updated_and_listed_and_others_make_another_run(tmp_path: Path) -> None:
    def with_memory(**memory: JSON) -> SavedConfig:
        return SavedConfig(b"{}", ".json", {"rank": 4, "memory": memory, "memoryless": 1}, {}, changeable=("memory",))

    with RunFolder(tmp_path / "run", "cats", with_memory(overflow=False)):
        (tmp_path / "run/losses.jsonl").write_text("{}\n")
    with RunFolder(tmp_path / "run", "cats", with_memory(overflow=True)) as folder:
        assert folder.changed_settings == ("memory.overflow: false there, true here",)
    with RunFolder(tmp_path / "run", "cats", with_memory(overflow=True)) as folder:
        assert folder.changed_settings == (), "the folder stores the newest values"
    other = SavedConfig(b"{}", ".json", {"rank": 4, "memory": {}, "memoryless": 2}, {}, changeable=("memory",))
    with pytest.raises(RunFolderError, match="memoryless: 1 there, 2 here"):
        RunFolder(tmp_path / "run", "cats", other)


def test_a_full_disk_is_an_error_with_the_file_and_the_remedy(tmp_path: Path) -> None:
    for max_bytes in (0, 10, 60):
        with (
            small_files(max_bytes),
            pytest.raises(RunFolderError, match=r"cannot be written: File too large; free space"),
        ):
            RunFolder(tmp_path / str(max_bytes), "run", config())


def test_the_original_error_is_raised_even_if_the_records_cannot_be_synced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "run", config())
    with pytest.raises(ValueError, match="the real one"), folder:
        os.close(folder._events_file._handle)  # as if the disk were gone
        raise ValueError("the real one")
    RunFolder(tmp_path / "run", "run", config()).close()


@pytest.mark.parametrize("name", ["checkpoints", "exports", "samples", "tensorboard", "tensorboard/train"])
def test_a_linked_folder_inside_the_run_is_refused_and_nothing_is_written_there(tmp_path: Path, name: str) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    foreign, link = tmp_path / "foreign", tmp_path / "run" / name
    foreign.mkdir()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(foreign)
    with pytest.raises(RunFolderError, match=rf"{name} is a link to another folder.*run.output_dir"):
        RunFolder(tmp_path / "run", "cats", config())
    assert not list(foreign.iterdir())
    link.unlink()
    RunFolder(tmp_path / "run", "cats", config()).close()


@pytest.mark.parametrize("name", [".lock", "events.jsonl", "set_aside.jsonl"])
def test_a_link_inside_the_folder_is_not_followed_for_writing(tmp_path: Path, name: str) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    foreign = tmp_path / "foreign.txt"
    foreign.write_text('{"dataset": "of", "file": "somebody", "reason": "else"}\n')
    before = foreign.read_bytes()
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(foreign)
    with pytest.raises(RunFolderError, match=rf"{name} cannot be written: it is a link.*; remove it"):
        RunFolder(tmp_path / "run", "cats", config())
    assert foreign.read_bytes() == before
    assert lock_holder(tmp_path / "run") is None, "a refused folder is not locked"


def test_a_pipe_in_place_of_a_record_file_is_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    (tmp_path / "run/events.jsonl").unlink()
    os.mkfifo(tmp_path / "run/events.jsonl")
    with pytest.raises(RunFolderError, match=r"events\.jsonl cannot be written: it is not a plain file"):
        RunFolder(tmp_path / "run", "cats", config())


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["set_aside.jsonl", "decisions.json"])
def test_a_record_file_that_cannot_be_read_is_called_so_and_the_run_continues(tmp_path: Path, name: str, make) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    (tmp_path / "run" / name).unlink()
    make(tmp_path / "run" / name)
    with RunFolder(tmp_path / "run", "cats", config()) as folder:
        [problem] = folder.damaged_records
    assert "not a plain file" in problem and f"renamed to {name}.damaged-1" in problem
    assert "written" not in problem


def test_a_folder_that_cannot_be_read_is_called_so(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    (tmp_path / "run").chmod(0o300)
    user = os.geteuid()
    if user == 0:  # permissions do not apply to root
        os.seteuid(65534)
    try:
        with pytest.raises(RunFolderError, match=r"run cannot be read: Permission denied; check its owner"):
            RunFolder(tmp_path / "run", "cats", config())
    finally:
        os.seteuid(user)
        (tmp_path / "run").chmod(0o700)


@pytest.mark.parametrize("content", [b"{", b"{}", b"[1]", b'[{"what": "x"}]', b"\xff", b"[" * 100_000])
def test_damaged_decisions_are_renamed_and_the_run_continues(tmp_path: Path, content: bytes) -> None:
    for number in (1, 2):
        with RunFolder(tmp_path / "run", "cats", config()) as folder:
            folder.emit(DecisionEvent("workers", number, "CPUs"))
        (tmp_path / "run/decisions.json").write_bytes(content)
        with RunFolder(tmp_path / "run", "cats", config()) as folder:
            [problem] = folder.damaged_records
            folder.emit(DecisionEvent("workers", 4, "CPUs"))
        assert "decisions.json" in problem and f"renamed to decisions.json.damaged-{number}" in problem
        assert (tmp_path / f"run/decisions.json.damaged-{number}").read_bytes() == content
        assert [d["value"] for d in json.loads((tmp_path / "run/decisions.json").read_text())] == [4]


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b'{"dataset": "a"}\n', b"\xff\n"])
def test_damaged_records_of_set_aside_files_are_renamed_and_the_run_continues(tmp_path: Path, line: bytes) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    (tmp_path / "run/set_aside.jsonl").write_bytes(line)
    with RunFolder(tmp_path / "run", "cats", config()) as folder:
        assert "renamed to set_aside.jsonl.damaged-1" in folder.damaged_records[0]
        folder.emit(SetAsideEvent("cats", "a.jpg", "broken"))
    assert (tmp_path / "run/set_aside.jsonl.damaged-1").read_bytes() == line
    assert [record["file"] for record in read_records(tmp_path / "run/set_aside.jsonl")] == ["a.jpg"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_all_files_of_a_run_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with RunFolder(tmp_path / "run", "cats", config()) as folder:
            folder.emit(DecisionEvent("workers", 2, "CPUs"))
            LossLog(tmp_path / "run/losses.jsonl").close()
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "run").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_a_run_whose_decisions_are_missing_continues(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", "cats", config()):
        pass
    (tmp_path / "run/decisions.json").unlink()
    with RunFolder(tmp_path / "run", "cats", config()) as folder:
        assert folder.damaged_records == (f"{tmp_path / 'run/decisions.json'} is missing",)
        folder.emit(DecisionEvent("workers", 4, "CPUs"))
    assert [d["value"] for d in json.loads((tmp_path / "run/decisions.json").read_text())] == [4]
