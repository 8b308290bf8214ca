"""Requests to a running job: it answers between two windows, and no content of the folder can end the run."""

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
from tests.train.checkpoints import RecordingSink, parts_at, save_parts, state_at


def hold_run(path: Path) -> RunFolder:
    return RunFolder(path, "mine", SavedConfig(b"{}", ".json", {"a": 1}, {}))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run folder that this process holds."""
    with hold_run(tmp_path / "mine"):
        yield tmp_path / "mine"


@contextmanager
def serving(requests: RequestInbox, serve: Callable[[RequestInbox], bool]) -> Iterator[None]:
    """A job in a thread that looks for requests between its windows until `serve` returns True."""
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


def ignore_line(line: str) -> None:
    assert line


def test_a_job_answers_and_no_files_remain(run: Path) -> None:
    with RequestInbox(run) as requests, serving(requests, answer_one):
        answer = send_request(run, "checkpoint", wait=True, timeout_s=20, report=ignore_line)
    assert answer is not None and (answer.status, answer.path) == ("done", "/there/step-00000040")
    assert answer.message == "checkpoint at step 40"
    assert sorted(os.listdir(run / "requests")) == ["answers", "refused"]
    assert os.listdir(run / "requests" / "answers") == []


def test_requests_written_before_the_job_opens_its_inbox_are_served(run: Path) -> None:
    write_request(run, "validate")
    write_request(run, "checkpoint")
    with RequestInbox(run) as requests:
        assert sorted(request.kind for request in requests.pending()) == ["checkpoint", "validate"]
        assert len(requests.pending()) == 2, "pending() does not remove them"
        for request in requests.pending():
            requests.answer(request, "done")
        assert requests.pending() == []


def test_a_job_that_cannot_fulfil_a_request_answers_with_the_reason(run: Path) -> None:
    def refuse(requests: RequestInbox) -> bool:
        pending = requests.pending()
        for request in pending:
            requests.refuse(request, "the disk is full")
        return bool(pending)

    with RequestInbox(run) as requests, serving(requests, refuse):
        answer = send_request(run, "validate", wait=True, timeout_s=20, report=ignore_line)
    assert answer is not None and (answer.status, answer.message) == ("error", "the disk is full")


def test_a_job_that_ends_answers_remaining_requests(run: Path) -> None:
    request_id = write_request(run, "validate")
    with RequestInbox(run):
        pass
    answer = json.loads((run / "requests" / "answers" / f"{request_id}.json").read_text())
    assert answer["status"] == "ended" and "ended before" in answer["message"]


def test_a_client_stops_waiting_when_the_job_is_killed(tmp_path: Path) -> None:
    folder = hold_run(tmp_path / "mine")
    RequestInbox(folder.path)
    ends = threading.Timer(0.3, folder.close)
    ends.start()
    answer = send_request(folder.path, "checkpoint", wait=True, timeout_s=20, report=ignore_line)
    ends.join()
    assert answer is not None and answer.status == "ended"
    assert not list((folder.path / "requests").glob("*.json")), "the request was withdrawn"


def test_a_client_stops_waiting_when_its_request_is_removed(run: Path) -> None:
    with RequestInbox(run):
        remove = threading.Timer(0.2, lambda: [file.unlink() for file in (run / "requests").glob("*.json")])
        remove.start()
        answer = send_request(run, "checkpoint", wait=True, timeout_s=20, report=ignore_line)
        remove.join()
    assert answer is not None and answer.status == "ended"


def test_a_request_to_a_run_without_a_job_is_refused(tmp_path: Path) -> None:
    with hold_run(tmp_path / "mine") as folder:
        pass
    with pytest.raises(RunFolderError, match=r"no job is running in .*mine; start it"):
        send_request(folder.path, "validate", wait=True, timeout_s=None, report=ignore_line)
    with pytest.raises(RunFolderError, match=r"is not a run folder"):
        send_request(tmp_path, "validate", wait=True, timeout_s=None, report=ignore_line)
    assert not (folder.path / "requests").exists() and not (tmp_path / "requests").exists()


def test_after_the_timeout_the_request_is_withdrawn(run: Path) -> None:
    with RequestInbox(run) as requests:
        with pytest.raises(RunFolderError, match=r"did not answer within 0\.2 s, and the request was withdrawn"):
            send_request(run, "validate", wait=True, timeout_s=0.2, report=ignore_line)
        assert requests.pending() == []


def test_ctrl_c_withdraws_the_request(run: Path) -> None:
    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with RequestInbox(run) as requests:
        with pytest.raises(KeyboardInterrupt):
            send_request(run, "validate", wait=True, timeout_s=20, report=stop)
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
def test_a_broken_request_is_answered_moved_aside_and_warned_about_once(run: Path, kind: str) -> None:
    sink = RecordingSink()
    with RequestInbox(run, sink) as requests:
        BROKEN[kind](run / "requests" / f"{kind}.json")
        good = write_request(run, "validate")
        assert [request.id for request in requests.pending()] == [good]
        assert len(sink.events) == 1 and f"requests/{kind}.json: is not a request" in sink.text()
        assert [request.id for request in requests.pending()] == [good] and len(sink.events) == 1
    assert json.loads((run / "requests" / "answers" / f"{kind}.json").read_text())["status"] == "error"
    assert os.listdir(run / "requests" / "refused") == [f"{kind}.json"]


def test_file_names_with_control_characters_or_invalid_utf8_are_moved_aside(run: Path) -> None:
    sink = RecordingSink()
    names = [b"\x1b[2J.json", b"\xff\xfe.json", b"UPPER.json", b"x" * 200 + b".json", b"no-ending", b"a.b.json"]
    with RequestInbox(run, sink) as requests:
        for name in names:
            with open(os.path.join(os.fsencode(run), b"requests", name), "w") as file:
                file.write('{"kind": "validate"}')
        assert requests.pending() == []
        assert len(sink.events) == len(names)
        assert "\x1b" not in sink.text()
    assert os.listdir(run / "requests" / "answers") == []


def test_hundreds_of_requests_are_read_a_few_at_a_time(run: Path) -> None:
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


def test_a_missing_folder_or_an_unwritable_answer_does_not_end_the_run(run: Path) -> None:
    sink = RecordingSink()
    with RequestInbox(run, sink) as requests:
        request_id = write_request(run, "validate")
        (run / "requests" / "answers" / f"{request_id}.json").mkdir()
        (request,) = requests.pending()
        requests.answer(request, "done")
        assert "cannot be answered" in sink.text() and requests.pending() == []
        os.rename(run / "requests", run / "elsewhere")
        assert requests.pending() == [] and requests.pending() == []
        assert sink.text().count("cannot be listed") == 1
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
    assert f"requested from process {os.getpid()}" in shown.stderr


def test_the_command_exits_with_1_if_the_job_refuses(run: Path) -> None:
    with (
        RequestInbox(run) as requests,
        serving(requests, lambda r: bool([r.refuse(p, "the disk is full") for p in r.pending()])),
    ):
        shown = CliRunner().invoke(app, ["validate", str(run)])
    assert shown.exit_code == 1 and "the disk is full" in shown.stderr


def test_the_command_with_no_wait_returns_at_once(run: Path) -> None:
    shown = CliRunner().invoke(app, ["validate", str(run), "--no-wait"])
    assert shown.exit_code == 0 and "requests/answers/validate-" in shown.stderr
    with RequestInbox(run) as requests:
        assert [request.kind for request in requests.pending()] == ["validate"]


def test_checkpoints_are_listed_and_verified_on_the_command_line(run: Path) -> None:
    assert "no checkpoints in" in CliRunner().invoke(app, ["checkpoint", "ls", str(run)]).output
    for step in (20, 40):
        made = save_parts(run / "checkpoints", step, parts_at(step), state_at(step), keep=3, host=HostFacts())
    listed = CliRunner().invoke(app, ["checkpoint", "ls", str(run)]).stdout.splitlines()
    assert len(listed) == 2 and listed[1].startswith("step       40") and listed[1].endswith(str(made))
    as_json = json.loads(CliRunner().invoke(app, ["checkpoint", "ls", str(run), "--json"]).stdout)
    assert [one["step"] for one in as_json] == [20, 40] and "adapter.high_noise" in as_json[0]["parts"]
    whole = CliRunner().invoke(app, ["checkpoint", "verify", str(run)])
    assert whole.exit_code == 0 and whole.stdout.count(": intact, step ") == 2
    (made / "state.json").write_text("{}")
    for path in (run, made):
        damaged = CliRunner().invoke(app, ["checkpoint", "verify", str(path)])
        assert damaged.exit_code == 1 and "state.json: it has 2 bytes" in damaged.stderr
    listed = CliRunner().invoke(app, ["checkpoint", "ls", str(run)]).stdout.splitlines()
    assert "damaged" in listed[1]
