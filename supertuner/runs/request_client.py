"""Asking a running job for something, from another process: a file in its folder, and waiting for the answer."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from supertuner.core import durable
from supertuner.core.errors import RunFolderError
from supertuner.core.types import escape_for_terminal
from supertuner.runs.requests import (
    ANSWERS_FOLDER,
    REQUESTS_FOLDER,
    AnswerStatus,
    RequestAnswer,
    RequestKind,
    read_json_object,
)
from supertuner.sinks.phase_counters import duration_text
from supertuner.sinks.run_folder import RUN_FILE, lock_holder

POLL_SECONDS = 0.1
REPORT_SECONDS = 10.0
RUN_ENDED_MESSAGE = "the run ended before it could do this; what it saved last is in its checkpoints"

PrintLine = Callable[[str], None]


def send_request(
    run: Path, kind: RequestKind, *, wait: bool, timeout_s: float | None, print_line: PrintLine
) -> RequestAnswer | None:
    """The job's answer; None without `wait`. Whoever stops waiting takes the request back."""
    holder = _require_lock_holder(run)
    request_id = write_request(run, kind)
    if not wait:
        print_line(
            f"asked {holder}; it answers after its window, in {run / REQUESTS_FOLDER / ANSWERS_FOLDER / request_id}.json"
        )
        return None
    try:
        print_line(f"asked {holder}; it answers after its window (Ctrl-C takes the request back)")
        return wait_for_answer(run, request_id, timeout_s, print_line)
    finally:
        for leftover in (
            run / REQUESTS_FOLDER / f"{request_id}.json",
            run / REQUESTS_FOLDER / ANSWERS_FOLDER / f"{request_id}.json",
        ):
            leftover.unlink(missing_ok=True)


def write_request(run: Path, kind: RequestKind) -> str:
    """Leave a request in the run's folder, durably; its id."""
    request_id = f"{kind}-{time.time_ns():020d}-{secrets.token_hex(4)}"
    try:
        (run / REQUESTS_FOLDER).mkdir(exist_ok=True)  # the job makes it too, once it gets that far
        durable.write_json(run / REQUESTS_FOLDER / f"{request_id}.json", {"kind": kind})
    except OSError as error:
        raise RunFolderError(
            f"{run / REQUESTS_FOLDER} cannot be written: {error.strerror}; ask as the user who started the run"
        ) from error
    return request_id


def wait_for_answer(run: Path, request_id: str, timeout_s: float | None, print_line: PrintLine) -> RequestAnswer:
    """Until it is answered, or nobody is left who could."""
    started = reported = time.monotonic()
    while True:
        # In this order: an answer is written before its request goes, and both before the run lets go of its folder.
        is_pending = lock_holder(run) is not None and (run / REQUESTS_FOLDER / f"{request_id}.json").exists()
        answer = _read_answer(run / REQUESTS_FOLDER / ANSWERS_FOLDER / f"{request_id}.json")
        if answer is not None:
            return answer
        if not is_pending:
            return RequestAnswer("ended", RUN_ENDED_MESSAGE)
        now = time.monotonic()
        if timeout_s is not None and now - started >= timeout_s:
            raise RunFolderError(
                f"{run} did not answer within {duration_text(timeout_s)}; the request was taken back: "
                "wait longer with --timeout, or leave it there with --no-wait"
            )
        if now - reported >= REPORT_SECONDS:
            reported = now
            print_line(f"still waiting, {duration_text(now - started)}")
        time.sleep(POLL_SECONDS)


def _require_lock_holder(run: Path) -> str:
    if not (run / RUN_FILE).is_file():
        raise RunFolderError(f"{run} is not a run's folder: it has no {RUN_FILE}")
    holder = lock_holder(run)
    if holder is None:
        raise RunFolderError(f"nobody is running {run}; start it with `supertuner train CONFIG`, then ask again")
    return holder


def _read_answer(file: Path) -> RequestAnswer | None:
    if not os.path.lexists(file):
        return None
    try:
        fields = read_json_object(file)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}; the run's events.jsonl says what happened") from error
    for status in get_args(AnswerStatus):
        if fields.get("status") == status:
            path = fields.get("path")
            return RequestAnswer(
                status,
                escape_for_terminal(str(fields.get("message"))),
                None if path is None else escape_for_terminal(str(path)),
            )
    raise RunFolderError(f"{file} is no answer; the run's events.jsonl says what happened")
