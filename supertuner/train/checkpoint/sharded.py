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

from supertuner.core.events import NullSink
from supertuner.train.checkpoint.manifest import FileFacts, files_json, json_bytes, parse_files, parse_object
from supertuner.train.checkpoint.save_job import SaveAbandonedError
from supertuner.train.checkpoint.write import CheckpointSharding, CheckpointWritePlan, write_file, write_parts

POLL_S = 0.02
DISCARD_S = 5.0
ABANDONED_MESSAGE = "the checkpoint was given up by the first process"


def announce_save(folder: Path, sharding: CheckpointSharding) -> None:
    """The first process has made the folder: the others may write into it."""
    write_file(folder / _announcement_name(sharding), [], NullSink().phase("announcing"))


def write_shard(
    folder: Path, plan: CheckpointWritePlan, sharding: CheckpointSharding, raise_if_abandoned: Callable[[], None]
) -> None:
    """Another process's side: wait for the folder, write what is here, and say so. `go_on` raises to give up."""
    fd, phase = _open_announced_folder(folder, sharding, raise_if_abandoned), NullSink().phase("writing")
    folder_by_fd = Path(f"/proc/self/fd/{fd}")  # this folder, whatever its name becomes

    def raise_if_unwanted() -> None:
        raise_if_abandoned()
        if not (folder_by_fd / _announcement_name(sharding)).exists():
            raise SaveAbandonedError(ABANDONED_MESSAGE)

    try:
        facts = write_parts(folder_by_fd, plan, phase, raise_if_unwanted)
        os.fsync(fd)
        completion_name = _completion_name(sharding, sharding.rank)
        write_file(folder_by_fd / f".{completion_name}", [memoryview(json_bytes(files_json(facts)))], phase)
        os.rename(folder_by_fd / f".{completion_name}", folder_by_fd / completion_name)
    except FileNotFoundError as error:  # the folder, or what was written there, was removed on the way
        raise SaveAbandonedError(ABANDONED_MESSAGE) from error
    except OSError as error:
        error.filename = str(folder / Path(error.filename or "").name)  # by the name that people know
        raise
    finally:
        os.close(fd)


def discard_sharded_save(folder: Path, sharding: CheckpointSharding) -> None:
    """The first process gives the save up. Another one may just be beginning a file: it comes to an end with that."""
    (folder / _announcement_name(sharding)).unlink(missing_ok=True)
    end = time.monotonic() + DISCARD_S
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > end:
                raise
            time.sleep(POLL_S)


def collect_shards(
    folder: Path, sharding: CheckpointSharding, raise_if_abandoned: Callable[[], None]
) -> dict[str, FileFacts]:
    """The first process's side: wait until all others have written, and take the marks away; their files."""
    files: dict[str, FileFacts] = {}
    for rank in range(1, sharding.world_size):
        completion_file = folder / _completion_name(sharding, rank)
        while not completion_file.exists():
            raise_if_abandoned()
            time.sleep(POLL_S)
        files |= parse_files(parse_object(completion_file.read_bytes(), completion_file), completion_file)
        completion_file.unlink()
    (folder / _announcement_name(sharding)).unlink()
    return files


def _open_announced_folder(folder: Path, sharding: CheckpointSharding, raise_if_abandoned: Callable[[], None]) -> int:
    """The folder of this save, once it is there."""
    while True:
        raise_if_abandoned()
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        if os.path.exists(f"/proc/self/fd/{fd}/{_announcement_name(sharding)}"):
            return fd
        os.close(fd)
        time.sleep(POLL_S)


def _announcement_name(sharding: CheckpointSharding) -> str:
    return f"attempt-{sharding.save_id}"


def _completion_name(sharding: CheckpointSharding, rank: int) -> str:
    return f"wrote-{rank:05d}-{sharding.save_id}.json"
