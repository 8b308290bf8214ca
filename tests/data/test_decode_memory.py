"""The memory of decoding is bounded: estimates hold, threads wait for their turn, and nothing waits forever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supertuner.core.types import GIB, MIB
from supertuner.data.decode.decode_memory import AVAILABLE_SHARE, DecodeMemory, decode_memory_limit
from tests.data.staging import machine

SLACK_BYTES = 4 * MIB
"""Pages of libraries that a measured process touches for the first time."""
ROOT = Path(__file__).parents[2]


def measured(mode: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.data.decode_peaks", mode, str(folder)]
    result = subprocess.run(command, capture_output=True, env=environment, cwd=ROOT, text=True)
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_no_kind_of_file_needs_more_memory_than_estimated(tmp_path):
    figures = measured("estimates", tmp_path)
    exceeded = {name: pair for name, pair in figures.items() if pair[0] > pair[1] + SLACK_BYTES}
    vain = {name: pair for name, pair in figures.items() if pair[1] > 3 * pair[0]}
    assert len(figures) > 15 and not exceeded and not vain


@pytest.mark.parametrize("mode", ["batches", "staging"])
def test_threads_that_decode_large_pictures_stay_below_the_limit(mode, tmp_path):
    figures = measured(mode, tmp_path)
    assert figures["peak"] <= figures["limit"] + SLACK_BYTES


def test_the_limit_is_a_share_of_the_available_memory_for_each_process(tmp_path):
    host = machine(tmp_path, total=64 * GIB, available=32 * GIB, tmpfs=tmp_path)
    assert decode_memory_limit(host) == 32 * GIB // AVAILABLE_SHARE
    assert decode_memory_limit(host, 4) == 32 * GIB // AVAILABLE_SHARE // 4
    assert decode_memory_limit(host, kept_bytes=30 * GIB) == 2 * GIB // AVAILABLE_SHARE
    assert decode_memory_limit(host, kept_bytes=40 * GIB) == 0


class Requests:
    """Threads that each hold a reservation until they are told to release it."""

    def __init__(self, memory: DecodeMemory) -> None:
        self._memory = memory
        self.admitted: list[str] = []
        self._release: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}

    def begin(self, name: str, nbytes: int, queued: int) -> None:
        """Request `nbytes` in a thread, and wait until it is admitted or it is the last of `queued` waiters."""
        self._release[name] = threading.Event()

        def hold() -> None:
            with self._memory.reserve(nbytes):
                self.admitted.append(name)
                self._release[name].wait()

        self._threads[name] = threading.Thread(target=hold, daemon=True)
        self._threads[name].start()
        wait_until(lambda: name in self.admitted or len(self._memory._waiters) == queued)

    def end(self, name: str) -> None:
        self._release[name].set()
        self._threads[name].join()


def wait_until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(20_000):  # a busy machine
        if condition():
            return
        event.wait(0.005)
    raise AssertionError("the condition did not become true")


def test_requests_are_admitted_in_their_order_and_a_large_one_is_not_overtaken():
    requests = Requests(DecodeMemory(100))
    requests.begin("a", 60, queued=0)
    requests.begin("large", 95, queued=1)
    requests.begin("small", 10, queued=2)
    assert requests.admitted == ["a"], "the small one would fit beside it"
    requests.end("a")
    wait_until(lambda: requests.admitted == ["a", "large"])
    requests.end("large")
    wait_until(lambda: requests.admitted == ["a", "large", "small"])
    requests.end("small")


def test_a_request_beyond_the_limit_is_admitted_alone():
    requests = Requests(DecodeMemory(100))
    requests.begin("small", 10, queued=0)
    requests.begin("huge", 1000, queued=1)
    requests.begin("next", 10, queued=2)
    requests.end("small")
    wait_until(lambda: requests.admitted == ["small", "huge"])
    assert len(requests._memory._waiters) == 1
    requests.end("huge")
    wait_until(lambda: requests.admitted == ["small", "huge", "next"])
    requests.end("next")


def test_a_failed_decoder_gives_its_memory_back():
    memory = DecodeMemory(100)
    for _ in range(3):
        with pytest.raises(ValueError), memory.reserve(100):
            raise ValueError
    with memory.reserve(100):
        pass
