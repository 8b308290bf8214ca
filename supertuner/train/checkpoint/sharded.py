"""One checkpoint written by many processes: each writes its own files into one hidden folder, the first publishes it.

They meet in that folder and nowhere else: threads that write need no line to each other while training uses it.

    .saving-step-00000040/
      attempt-<save>             by the first process: the folder is of this save, and not a remainder of another one
      wrote-00001-<save>.json    by each other process, last of all: its files, with their sizes and checksums

The first process takes both away before it writes the manifest, and the first of them when it gives the save up: who
misses it stops. A process that was left behind by a job that is gone still holds the folder that it began with: it
cannot write into another one that has got the same name.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from supertuner.core.events import Silence
from supertuner.train.checkpoint.manifest import FileFacts, files_json, json_bytes, parse_files, parse_object
from supertuner.train.checkpoint.save_job import Abandoned
from supertuner.train.checkpoint.write import Plan, Sharers, write_file, write_parts

POLL_S = 0.02
DISCARD_S = 5.0
GIVEN_UP = "the checkpoint was given up by the first process"


def announce(folder: Path, sharers: Sharers) -> None:
    """The first process has made the folder: the others may write into it."""
    write_file(folder / _attempt(sharers), [], Silence().phase("announcing"))


def contribute(folder: Path, plan: Plan, sharers: Sharers, go_on: Callable[[], None]) -> None:
    """Another process's side: wait for the folder, write what is here, and say so. `go_on` raises to give up."""
    fd, phase = _opened(folder, sharers, go_on), Silence().phase("writing")
    here = Path(f"/proc/self/fd/{fd}")  # this folder, whatever its name becomes

    def still_wanted() -> None:
        go_on()
        if not (here / _attempt(sharers)).exists():
            raise Abandoned(GIVEN_UP)

    try:
        facts = write_parts(here, plan, phase, still_wanted)
        os.fsync(fd)
        mark = _wrote(sharers, sharers.rank)
        write_file(here / f".{mark}", [memoryview(json_bytes(files_json(facts)))], phase)
        os.rename(here / f".{mark}", here / mark)
    except FileNotFoundError as error:  # the folder, or what was written there, was removed on the way
        raise Abandoned(GIVEN_UP) from error
    except OSError as error:
        error.filename = str(folder / Path(error.filename or "").name)  # by the name that people know
        raise
    finally:
        os.close(fd)


def discard(folder: Path, sharers: Sharers) -> None:
    """The first process gives the save up. Another one may just be beginning a file: it comes to an end with that."""
    (folder / _attempt(sharers)).unlink(missing_ok=True)
    end = time.monotonic() + DISCARD_S
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > end:
                raise
            time.sleep(POLL_S)


def gathered(folder: Path, sharers: Sharers, go_on: Callable[[], None]) -> dict[str, FileFacts]:
    """The first process's side: wait until all others have written, and take the marks away; their files."""
    found: dict[str, FileFacts] = {}
    for rank in range(1, sharers.ranks):
        mark = folder / _wrote(sharers, rank)
        while not mark.exists():
            go_on()
            time.sleep(POLL_S)
        found |= parse_files(parse_object(mark.read_bytes(), mark), mark)
        mark.unlink()
    (folder / _attempt(sharers)).unlink()
    return found


def _opened(folder: Path, sharers: Sharers, go_on: Callable[[], None]) -> int:
    """The folder of this save, once it is there."""
    while True:
        go_on()
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        if os.path.exists(f"/proc/self/fd/{fd}/{_attempt(sharers)}"):
            return fd
        os.close(fd)
        time.sleep(POLL_S)


def _attempt(sharers: Sharers) -> str:
    return f"attempt-{sharers.attempt}"


def _wrote(sharers: Sharers, rank: int) -> str:
    return f"wrote-{rank:05d}-{sharers.attempt}.json"
