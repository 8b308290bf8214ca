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
from supertuner.core.types import on_screen
from supertuner.runs.requests import ANSWERS, FOLDER, Answer, Kind, Status, read_object
from supertuner.sinks.figures import duration_text
from supertuner.sinks.run_folder import RUN, holder_of

LOOK_SECONDS = 0.1
TELL_SECONDS = 10.0
ENDED = "the run ended before it could do this; what it saved last is in its checkpoints"

Tell = Callable[[str], None]


def ask(run: Path, kind: Kind, *, wait: bool, timeout_s: float | None, tell: Tell) -> Answer | None:
    """The job's answer; None without `wait`. Whoever stops waiting takes the request back."""
    holder = _holder(run)
    asked = drop(run, kind)
    if not wait:
        tell(f"asked {holder}; it answers after its window, in {run / FOLDER / ANSWERS / asked}.json")
        return None
    try:
        tell(f"asked {holder}; it answers after its window (Ctrl-C takes the request back)")
        return wait_for(run, asked, timeout_s, tell)
    finally:
        for left in (run / FOLDER / f"{asked}.json", run / FOLDER / ANSWERS / f"{asked}.json"):
            left.unlink(missing_ok=True)


def drop(run: Path, kind: Kind) -> str:
    """Leave a request in the run's folder, durably; its id."""
    asked = f"{kind}-{time.time_ns():020d}-{secrets.token_hex(4)}"
    try:
        (run / FOLDER).mkdir(exist_ok=True)  # the job makes it too, once it gets that far
        durable.write_json(run / FOLDER / f"{asked}.json", {"kind": kind})
    except OSError as error:
        raise RunFolderError(
            f"{run / FOLDER} cannot be written: {error.strerror}; ask as the user who started the run"
        ) from error
    return asked


def wait_for(run: Path, asked: str, timeout_s: float | None, tell: Tell) -> Answer:
    """Until it is answered, or nobody is left who could."""
    begun = told = time.monotonic()
    while True:
        # In this order: an answer is written before its request goes, and both before the run lets go of its folder.
        served = holder_of(run) is not None and (run / FOLDER / f"{asked}.json").exists()
        answer = _answer(run / FOLDER / ANSWERS / f"{asked}.json")
        if answer is not None:
            return answer
        if not served:
            return Answer("ended", ENDED)
        now = time.monotonic()
        if timeout_s is not None and now - begun >= timeout_s:
            raise RunFolderError(
                f"{run} did not answer within {duration_text(timeout_s)}; the request was taken back: "
                "wait longer with --timeout, or leave it there with --no-wait"
            )
        if now - told >= TELL_SECONDS:
            told = now
            tell(f"still waiting, {duration_text(now - begun)}")
        time.sleep(LOOK_SECONDS)


def _holder(run: Path) -> str:
    if not (run / RUN).is_file():
        raise RunFolderError(f"{run} is not a run's folder: it has no {RUN}")
    holder = holder_of(run)
    if holder is None:
        raise RunFolderError(f"nobody is running {run}; start it with `supertuner train CONFIG`, then ask again")
    return holder


def _answer(file: Path) -> Answer | None:
    if not os.path.lexists(file):
        return None
    try:
        fields = read_object(file)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}; the run's events.jsonl says what happened") from error
    for status in get_args(Status):
        if fields.get("status") == status:
            path = fields.get("path")
            return Answer(status, on_screen(str(fields.get("message"))), None if path is None else on_screen(str(path)))
    raise RunFolderError(f"{file} is no answer; the run's events.jsonl says what happened")
