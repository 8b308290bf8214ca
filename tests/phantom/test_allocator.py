"""The real caching allocator of torch, on the phantom: its statistics, its limits, its streams, threads and pools."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

MIB = 1 << 20
GIB = 1 << 30


def megabytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8, device="cuda")


def test_the_statistics_follow_what_is_held() -> None:
    before = torch.cuda.memory_allocated()
    held = megabytes(24)
    assert torch.cuda.memory_allocated() - before == 24 * MIB
    del held
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 24 * MIB


def test_a_freed_block_is_used_again_without_asking_the_driver() -> None:
    first = megabytes(64)
    address, segments = first.data_ptr(), torch.cuda.memory_stats()["segment.all.allocated"]
    del first
    second = megabytes(64)
    assert second.data_ptr() == address
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments


def test_emptying_the_cache_gives_memory_back_to_the_gpu() -> None:
    free = torch.cuda.mem_get_info()[0]
    held = megabytes(512)
    assert torch.cuda.mem_get_info()[0] == free - 512 * MIB
    del held
    assert torch.cuda.mem_get_info()[0] == free - 512 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_a_snapshot_shows_the_segments() -> None:
    held = megabytes(40)
    segments = [s for s in torch.cuda.memory_snapshot() if s["address"] == held.data_ptr()]
    assert [s["total_size"] for s in segments] == [40 * MIB]
    assert segments[0]["blocks"][0]["state"] == "active_allocated"


def test_history_is_recorded_with_python_frames() -> None:
    torch.cuda.memory._record_memory_history(max_entries=100)
    try:
        held = megabytes(30)
        (trace,) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    asked = [event for event in trace if event["action"] == "alloc" and event["addr"] == held.data_ptr()]
    assert asked and any(frame["name"] == "megabytes" for frame in asked[0]["frames"])


def test_more_than_the_gpu_has_is_out_of_memory_and_leaves_it_usable() -> None:
    total = int(os.environ["FAKECUDA_HBM"])
    most = torch.empty(total - 4 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 5.00 GiB"):
        torch.empty(5 * GIB, dtype=torch.uint8, device="cuda")
    del most
    assert torch.empty(5 * GIB, dtype=torch.uint8, device="cuda").nbytes == 5 * GIB


def test_memory_that_exists_only_on_paper_costs_the_host_nothing() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    held = torch.zeros(40 * GIB, dtype=torch.uint8, device="cuda")
    again = held.clone()
    assert again.nbytes == 40 * GIB
    assert resident() - before < GIB


def test_a_block_belongs_to_the_stream_that_it_was_made_on() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        there = megabytes(64)
        address = there.data_ptr()
        del there
    here = megabytes(64)
    assert here.data_ptr() != address
    with torch.cuda.stream(side):
        assert megabytes(64).data_ptr() == address


def test_streams_and_events_are_ordered_and_timed() -> None:
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    assert low.cuda_stream != high.cuda_stream
    assert (low.priority, high.priority) == (0, -1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(low)
    high.wait_event(begin)
    end.record(high)
    end.synchronize()
    assert end.query() and begin.elapsed_time(end) >= 0


def test_memory_used_on_another_stream_is_kept_until_it_is_done() -> None:
    side = torch.cuda.Stream()
    held = megabytes(32)
    held.record_stream(side)
    address = held.data_ptr()
    del held
    torch.cuda.synchronize()
    assert megabytes(32).data_ptr() == address


def test_every_thread_draws_on_the_same_gpu() -> None:
    free, held = torch.cuda.mem_get_info()[0], []

    def take() -> None:
        held.append(megabytes(128))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tensor.data_ptr() for tensor in held}) == 8
    assert free - torch.cuda.mem_get_info()[0] == 8 * 128 * MIB


def test_a_pool_keeps_its_segments_to_itself() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = megabytes(64)
    address = inside.data_ptr()
    del inside
    outside = megabytes(64)
    assert outside.data_ptr() != address
    with torch.cuda.use_mem_pool(pool):
        assert megabytes(64).data_ptr() == address
    assert address in {segment["address"] for segment in pool.snapshot()}


def test_pinned_memory_is_known_as_pinned() -> None:
    host = torch.arange(1 << 20).pin_memory()
    assert host.is_pinned()
    assert not torch.arange(4).is_pinned()
    assert torch.equal(host.to("cuda", non_blocking=True).cpu(), host)


def test_a_child_of_a_fork_is_told_that_it_has_no_gpu() -> None:
    torch.empty(1, device="cuda")
    gc.collect()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.empty(1, device="cuda")
        except RuntimeError as error:
            os.write(write, str(error).encode()[:200])
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert b"forked subprocess" in said.read()
