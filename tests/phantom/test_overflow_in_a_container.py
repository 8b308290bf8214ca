"""Overflow where a container has less memory than its machine, on the phantom: what it has left is seen in time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from supertuner.memory.overflow_allocator.pools import MAX_LIMITS_AGE_S
from tests.memory.machine_files import folder_host, meminfo
from tests.phantom.test_overflow_on_torch import GIB, Bench, account, gigabytes


class Container(Bench):
    """A container of 100 GiB on a host of 480."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._used = folder / "sys/fs/cgroup/job/memory.current"
        files = {
            "proc/meminfo": meminfo(MemTotal=480 << 20, MemAvailable=450 << 20),
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": f"{100 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{40 * GIB}\n",
        }
        self.host = folder_host(folder, files)

    def uses(self, gib: int) -> None:
        self._used.write_text(f"{gib * GIB}\n")
        time.sleep(1.1 * MAX_LIMITS_AGE_S)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Container]:
    made = Container(tmp_path)
    yield made
    for pools in made.opened:
        pools.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert account().device_bytes == account().managed_bytes == 0, "a test left memory behind"


def as_many_as_there_are() -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            tensors.append(gigabytes(2))
    return tensors


@pytest.mark.parametrize("when", ["step", "weights", "state"])
def test_memory_that_was_taken_since_the_pools_were_opened_is_not_promised_to_anybody(bench: Container, when) -> None:
    pools = bench.open(host_floor_gb=10.0)
    bench.uses(85)  # a dataset was staged
    if when == "step":
        pools.reclaim_between_steps()
        tensors = as_many_as_there_are()
    else:
        with pools.allocating(when):
            tensors = as_many_as_there_are()
    assert tensors and account().managed_bytes <= 5 * GIB


def test_memory_that_was_given_and_is_not_in_the_host_yet_is_not_promised_twice(bench: Container) -> None:
    pools = bench.open(host_floor_gb=10.0)
    tensors = [gigabytes(2)]
    while account().managed_bytes < 30 * GIB:
        tensors.append(gigabytes(2))
    bench.uses(40)  # as before: the GPU has it, or nobody has touched it
    pools.reclaim_between_steps()
    tensors += as_many_as_there_are()
    assert 45 * GIB < account().managed_bytes <= 50 * GIB
    bench.uses(90)  # all of it is in the host now: the same memory is not counted twice
    pools.reclaim_between_steps()
    tensors.pop()
    tensors.append(gigabytes(2))
    del tensors
