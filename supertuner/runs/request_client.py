"""Sends a request to a running job from another process: writes a file into its run folder and waits for the answer."""

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
from supertuner.runs.run_reader import open_run
from supertuner.sinks.phase_counters import duration_text
from supertuner.sinks.run_folder import lock_holder

POLL_SECONDS = 0.1
REPORT_SECONDS = 10.0
RUN_ENDED_MESSAGE = "the run ended before it could do this; its checkpoints hold what it saved last"

ReportLine = Callable[[str], None]


def send_request(
    run: str | os.PathLike[str],
    kind: RequestKind,
    *,
    wait: bool = True,
    timeout_s: float | None = None,
    report: ReportLine = lambda line: None,
) -> RequestAnswer | None:
    """Send a request to the job that trains in folder `run`; it answers after its current window.

    If the wait ends early (`timeout_s`, Ctrl-C), the request is withdrawn.

    Args:
        run: The folder of the run.
        kind: "checkpoint" to save one now, or "validate" for samples and the held-out loss.
        wait: Wait for the answer; otherwise the request stays in the folder.
        timeout_s: Stop waiting after this many seconds. None: wait until the job answers.
        report: Receives lines for people while the job has not answered.

    Returns:
        The answer, with the path of what the job wrote; None without `wait`.

    Raises:
        RunFolderError: `run` is not the folder of a run, no job uses it, or the time is over.
    """
    run = Path(run)
    holder = open_run(run).holder()
    if holder is None:
        raise RunFolderError(f"no job is running in {run}; start it with `supertuner train CONFIG`, then request again")
    request_id = write_request(run, kind)
    request_file, answer_file = _request_files(run, request_id)
    if not wait:
        report(f"requested from {holder}; it answers after its current window, in {answer_file}")
        return None
    try:
        report(f"requested from {holder}; it answers after its current window (Ctrl-C withdraws the request)")
        return wait_for_answer(run, request_id, timeout_s, report)
    finally:
        request_file.unlink(missing_ok=True)
        answer_file.unlink(missing_ok=True)


def write_request(run: Path, kind: RequestKind) -> str:
    """Write a request into the run folder, durably, and return its id."""
    request_id = f"{kind}-{time.time_ns():020d}-{secrets.token_hex(4)}"
    try:
        (run / REQUESTS_FOLDER).mkdir(exist_ok=True)  # the job creates it too, but perhaps later
        durable.write_json(run / REQUESTS_FOLDER / f"{request_id}.json", {"kind": kind})
    except OSError as error:
        problem = f"{run / REQUESTS_FOLDER} cannot be written: {error.strerror}"
        raise RunFolderError(f"{problem}; use the account that started the run") from error
    return request_id


def wait_for_answer(run: Path, request_id: str, timeout_s: float | None, report: ReportLine) -> RequestAnswer:
    """Wait until the request is answered or the run has ended. Raises RunFolderError after `timeout_s`."""
    started = reported = time.monotonic()
    request_file, answer_file = _request_files(run, request_id)
    while True:
        # The order matters: the job writes an answer before it removes the request, and does both before it releases
        # its folder. So an answer exists if the request was not pending before we looked for the answer.
        is_pending = lock_holder(run) is not None and request_file.exists()
        answer = _read_answer(answer_file)
        if answer is not None:
            return answer
        if not is_pending:
            return RequestAnswer("ended", RUN_ENDED_MESSAGE)
        now = time.monotonic()
        if timeout_s is not None and now - started >= timeout_s:
            raise RunFolderError(
                f"{run} did not answer within {duration_text(timeout_s)}, and the request was withdrawn; "
                "give it a longer timeout, or leave the request there without waiting"
            )
        if now - reported >= REPORT_SECONDS:
            reported = now
            report(f"still waiting, {duration_text(now - started)}")
        time.sleep(POLL_SECONDS)


def _request_files(run: Path, request_id: str) -> tuple[Path, Path]:
    """The files of a request and its answer."""
    folder, name = run / REQUESTS_FOLDER, f"{request_id}.json"
    return folder / name, folder / ANSWERS_FOLDER / name


def _read_answer(file: Path) -> RequestAnswer | None:
    if not os.path.lexists(file):
        return None
    try:
        fields = read_json_object(file)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}; see the run's events.jsonl") from error
    status, message, path = (fields.get(name) for name in ("status", "message", "path"))
    for known in get_args(AnswerStatus):
        if status == known:
            path_text = None if path is None else escape_for_terminal(str(path))
            return RequestAnswer(known, escape_for_terminal(str(message)), path_text)
    raise RunFolderError(f"{file} is not an answer; see the run's events.jsonl")
