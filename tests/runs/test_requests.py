"""Asking a running job for something: it answers between two windows, and nothing in that folder can end a run."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.core.errors import RunFolderError
from supertuner.core.host import HostFacts
from supertuner.runs.request_client import send_request, write_request
from supertuner.runs.requests import RequestInbox
from supertuner.sinks.run_folder import RunFolder
from supertuner.sinks.saved_config import SavedConfig
from supertuner.train.checkpoint.durable_save import save_checkpoint
from tests.train.checkpoints import RecordingSink, parts_at, state_at


def locked(path: Path) -> RunFolder:
    return RunFolder(path, "mine", SavedConfig(b"{}", ".json", {"a": 1}, {}))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run's folder that is in use."""
    with locked(tmp_path / "mine"):
        yield tmp_path / "mine"


@contextmanager
def serving(requests: RequestInbox, serve: Callable[[RequestInbox], bool]) -> Iterator[None]:
    """A job that looks between its windows, in a thread of its own, until `serve` says that it has seen enough."""
    end = time.monotonic() + 20

    def work() -> None:
        while not serve(requests) and time.monotonic() < end:
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def answer_one(requests: RequestInbox) -> bool:
    pending = requests.pending()
    for request in pending:
        requests.answer(request, f"{request.kind} at step 40", Path("/there/step-00000040"))
    return bool(pending)


def told(line: str) -> None:
    assert line


def test_a_job_answers_and_nothing_stays_behind(run: Path) -> None:
    with RequestInbox(run) as requests, serving(requests, answer_one):
        answer = send_request(run, "checkpoint", wait=True, timeout_s=20, print_line=told)
    assert answer is not None and (answer.status, answer.path) == ("done", "/there/step-00000040")
    assert answer.message == "checkpoint at step 40"
    assert sorted(os.listdir(run / "requests")) == ["answers", "refused"]
    assert os.listdir(run / "requests" / "answers") == []


def test_requests_made_before_the_job_gets_that_far_are_served(run: Path) -> None:
    write_request(run, "validate")
    write_request(run, "checkpoint")
    with RequestInbox(run) as requests:
        assert sorted(request.kind for request in requests.pending()) == ["checkpoint", "validate"]
        assert len(requests.pending()) == 2, "looking does not take them away"
        for request in requests.pending():
            requests.answer(request, "done")
        assert requests.pending() == []


def test_a_job_that_cannot_do_it_says_why(run: Path) -> None:
    def refuse(requests: RequestInbox) -> bool:
        pending = requests.pending()
        for request in pending:
            requests.refuse(request, "the disk is full")
        return bool(pending)

    with RequestInbox(run) as requests, serving(requests, refuse):
        answer = send_request(run, "validate", wait=True, timeout_s=20, print_line=told)
    assert answer is not None and (answer.status, answer.message) == ("error", "the disk is full")


def test_a_job_that_ends_first_says_so(run: Path) -> None:
    asked = write_request(run, "validate")
    with RequestInbox(run):
        pass
    answer = json.loads((run / "requests" / "answers" / f"{asked}.json").read_text())
    assert answer["status"] == "ended" and "ended before" in answer["message"]


def test_a_job_that_was_killed_leaves_nobody_waiting(tmp_path: Path) -> None:
    folder = locked(tmp_path / "mine")
    RequestInbox(folder.path)
    ends = threading.Timer(0.3, folder.close)
    ends.start()
    answer = send_request(folder.path, "checkpoint", wait=True, timeout_s=20, print_line=told)
    ends.join()
    assert answer is not None and answer.status == "ended"
    assert not list((folder.path / "requests").glob("*.json")), "the request was taken back"


def test_a_request_that_somebody_removed_leaves_nobody_waiting(run: Path) -> None:
    with RequestInbox(run):
        remove = threading.Timer(0.2, lambda: [file.unlink() for file in (run / "requests").glob("*.json")])
        remove.start()
        answer = send_request(run, "checkpoint", wait=True, timeout_s=20, print_line=told)
        remove.join()
    assert answer is not None and answer.status == "ended"


def test_nobody_is_running_it(tmp_path: Path) -> None:
    with locked(tmp_path / "mine") as folder:
        pass
    with pytest.raises(RunFolderError, match=r"nobody is running .*mine; start it"):
        send_request(folder.path, "validate", wait=True, timeout_s=None, print_line=told)
    with pytest.raises(RunFolderError, match=r"is not a run's folder"):
        send_request(tmp_path, "validate", wait=True, timeout_s=None, print_line=told)
    assert not (folder.path / "requests").exists() and not (tmp_path / "requests").exists()


def test_waiting_has_an_end_if_one_is_given_and_the_request_is_taken_back(run: Path) -> None:
    with RequestInbox(run) as requests:
        with pytest.raises(RunFolderError, match=r"did not answer within 0\.2 s; the request was taken back"):
            send_request(run, "validate", wait=True, timeout_s=0.2, print_line=told)
        assert requests.pending() == []


def test_ctrl_c_takes_the_request_back(run: Path) -> None:
    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with RequestInbox(run) as requests:
        with pytest.raises(KeyboardInterrupt):
            send_request(run, "validate", wait=True, timeout_s=20, print_line=stop)
        assert requests.pending() == []


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: p.write_bytes(b""),
    "no-json": lambda p: p.write_bytes(b"\xff\x00nope"),
    "a-list": lambda p: p.write_bytes(b"[1]"),
    "unknown": lambda p: p.write_text('{"kind": "format the disk"}'),
    "kind-of-list": lambda p: p.write_text('{"kind": ["validate"]}'),
    "no-kind": lambda p: p.write_text("{}"),
    "deep": lambda p: p.write_bytes(b"[" * 60_000),
    "long": lambda p: p.write_bytes(b" " * 70_000),
    "folder": lambda p: p.mkdir(),
    "full-folder": lambda p: (p.mkdir(), (p / "x").write_text("y")),
    "link": lambda p: p.symlink_to("/etc/passwd"),
    "endless": lambda p: p.symlink_to("/dev/zero"),
    "dangling": lambda p: p.symlink_to("nowhere"),
    "pipe": make_pipe,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_request_is_answered_moved_aside_and_told_once(run: Path, kind: str) -> None:
    heard = RecordingSink()
    with RequestInbox(run, heard) as requests:
        BROKEN[kind](run / "requests" / f"{kind}.json")
        good = write_request(run, "validate")
        assert [request.id for request in requests.pending()] == [good]
        assert len(heard.events) == 1 and f"requests/{kind}.json: is no request" in heard.text()
        assert [request.id for request in requests.pending()] == [good] and len(heard.events) == 1
    assert json.loads((run / "requests" / "answers" / f"{kind}.json").read_text())["status"] == "error"
    assert os.listdir(run / "requests" / "refused") == [f"{kind}.json"]


def test_names_that_steer_a_terminal_or_are_no_text_are_moved_aside(run: Path) -> None:
    heard = RecordingSink()
    names = [b"\x1b[2J.json", b"\xff\xfe.json", b"UPPER.json", b"x" * 200 + b".json", b"no-ending", b"a.b.json"]
    with RequestInbox(run, heard) as requests:
        for name in names:
            with open(os.path.join(os.fsencode(run), b"requests", name), "w") as file:
                file.write('{"kind": "validate"}')
        assert requests.pending() == []
        assert len(heard.events) == len(names)
        assert "\x1b" not in heard.text()
    assert os.listdir(run / "requests" / "answers") == []


def test_hundreds_of_requests_are_looked_at_a_few_at_a_time(run: Path) -> None:
    with RequestInbox(run) as requests:
        for number in range(300):
            (run / "requests" / f"r{number:03d}.json").write_text('{"kind": "validate"}')
        seen = set()
        while pending := requests.pending():
            assert len(pending) <= 64
            for request in pending:
                requests.answer(request, "done")
                seen.add(request.id)
        assert len(seen) == 300


def test_a_folder_that_is_gone_or_an_answer_that_cannot_be_written_does_not_end_the_run(run: Path) -> None:
    heard = RecordingSink()
    with RequestInbox(run, heard) as requests:
        asked = write_request(run, "validate")
        (run / "requests" / "answers" / f"{asked}.json").mkdir()
        (request,) = requests.pending()
        requests.answer(request, "done")
        assert "cannot be answered" in heard.text() and requests.pending() == []
        os.rename(run / "requests", run / "elsewhere")
        assert requests.pending() == [] and requests.pending() == []
        assert heard.text().count("cannot be listed") == 1
        os.rename(run / "elsewhere", run / "requests")


def test_a_withdrawn_request_can_still_be_answered(run: Path) -> None:
    with RequestInbox(run) as requests:
        write_request(run, "validate")
        (request,) = requests.pending()
        (run / "requests" / f"{request.id}.json").unlink()
        requests.answer(request, "done")


def test_looking_for_requests_costs_microseconds(run: Path) -> None:
    with RequestInbox(run) as requests:
        rounds = []
        for _ in range(20):
            begin = time.process_time()
            for _ in range(100):
                requests.pending()
            rounds.append((time.process_time() - begin) / 100)
    assert min(rounds) < 100e-6


def test_the_command_prints_where_the_checkpoint_is(run: Path) -> None:
    with RequestInbox(run) as requests, serving(requests, answer_one):
        shown = CliRunner().invoke(app, ["checkpoint", "now", str(run)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines() == ["checkpoint at step 40", "/there/step-00000040"]
    assert f"asked process {os.getpid()}" in shown.stderr


def test_the_command_fails_if_it_was_not_done(run: Path) -> None:
    with (
        RequestInbox(run) as requests,
        serving(requests, lambda r: bool([r.refuse(p, "no room") for p in r.pending()])),
    ):
        shown = CliRunner().invoke(app, ["validate", str(run)])
    assert shown.exit_code == 1 and "no room" in shown.stderr


def test_the_command_need_not_wait(run: Path) -> None:
    shown = CliRunner().invoke(app, ["validate", str(run), "--no-wait"])
    assert shown.exit_code == 0 and "requests/answers/validate-" in shown.stderr
    with RequestInbox(run) as requests:
        assert [request.kind for request in requests.pending()] == ["validate"]


def test_checkpoints_are_listed_and_verified_on_the_command_line(run: Path) -> None:
    assert "no checkpoints in" in CliRunner().invoke(app, ["checkpoint", "ls", str(run)]).output
    for step in (20, 40):
        made = save_checkpoint(run / "checkpoints", step, parts_at(step), state_at(step), keep=3, host=HostFacts())
    listed = CliRunner().invoke(app, ["checkpoint", "ls", str(run)]).stdout.splitlines()
    assert len(listed) == 2 and listed[1].startswith("step       40") and listed[1].endswith(str(made))
    as_json = json.loads(CliRunner().invoke(app, ["checkpoint", "ls", str(run), "--json"]).stdout)
    assert [one["step"] for one in as_json] == [20, 40] and "adapter.high_noise" in as_json[0]["parts"]
    whole = CliRunner().invoke(app, ["checkpoint", "verify", str(run)])
    assert whole.exit_code == 0 and whole.stdout.count(": whole, step ") == 2
    (made / "state.json").write_text("{}")
    for path in (run, made):
        damaged = CliRunner().invoke(app, ["checkpoint", "verify", str(path)])
        assert damaged.exit_code == 1 and "state.json: it has 2 bytes" in damaged.stderr
    listed = CliRunner().invoke(app, ["checkpoint", "ls", str(run)]).stdout.splitlines()
    assert "damaged" in listed[1]
