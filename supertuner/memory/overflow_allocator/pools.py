"""Overflow for a whole run: routes torch's allocations through the plugin, and reclaims memory between steps.

`open_overflow_pools` raises, with the reason, wherever spilling cannot work or gains nothing. While pools are open, the
plugin provides every segment that torch requests. Closing them restores torch's previous state; tensors that still
exist stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from torch.cuda.memory import CUDAPluggableAllocator

from supertuner.core.closing import CloseOnExit
from supertuner.core.errors import MemoryEngineError
from supertuner.core.events import DecisionEvent, MeasurementEvent, NoteEvent, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON, MIB, bytes_text
from supertuner.memory.driver import HOST, Driver, DriverError, NotAvailable
from supertuner.memory.overflow_allocator import admission, reclaim, routing
from supertuner.memory.overflow_allocator.admission import SETTINGS_KEY
from supertuner.memory.overflow_allocator.plugin import AccessPattern, OverflowPlugin, OverflowStats, find_plugin
from supertuner.memory.overflow_allocator.routing import AllocationRoute, ProcessWideRoute, ThreadLocalRoute
from supertuner.memory.probe import host_available_bytes

if TYPE_CHECKING:
    from supertuner.config.settings.memory import OverflowSettings as Settings
    from supertuner.memory.probe import MachineFacts

TensorClass: TypeAlias = Literal["weights", "state"]

RECLAIMED_EVENT: Final = "memory.reclaimed"
MAX_LIMITS_AGE_S: Final = 0.25
"""Maximum age of the host's limits, which only Python can determine completely. Reading them takes 0.1 ms."""
SNAPSHOT_TIME_SHARE: Final = 0.01
"""Share of a run's time that taking snapshots of torch's segments may use; each segment takes microseconds."""
DISCARD_API_VERSION: Final = 13000
"""The first driver version that can discard managed memory."""


@dataclass(frozen=True, slots=True)
class ReclaimedBytes:
    """Bytes reclaimed at the end of one step."""

    light_bytes: int = 0
    hard_bytes: int = 0


def open_overflow_pools(
    settings: Settings,
    facts: MachineFacts,
    host: HostFacts,
    sink: Sink,
    *,
    driver: Driver | NotAvailable,
    device: torch.device | int = 0,
) -> OverflowPools:
    """Route torch's allocations on `device` through the plugin. Raises MemoryEngineError with the reason if that is not
    possible.

    `driver` reclaims memory between steps; without one only the pools' own cache can be released.
    """
    gpu = admission.with_device_index(torch.device("cuda", device) if isinstance(device, int) else device)
    reason = admission.unavailable_reason(settings, facts, gpu, admission.torch_allocator_facts(gpu), host)
    library = find_plugin()
    if reason is not None:
        raise MemoryEngineError(f"{SETTINGS_KEY}: {reason}")
    if isinstance(library, NotAvailable):
        raise MemoryEngineError(f"{SETTINGS_KEY}: {library.reason}")
    return OverflowPools(settings, facts, host, sink, driver, gpu.index or 0, OverflowPlugin(library))


class OverflowPools(CloseOnExit):
    """One pool for all tensors, and one more for each tensor class with a different access pattern."""

    def __init__(
        self,
        settings: Settings,
        facts: MachineFacts,
        host: HostFacts,
        sink: Sink,
        driver: Driver | NotAvailable,
        device: int,
        plugin: OverflowPlugin,
    ) -> None:
        self._settings, self._facts, self._host, self._sink = settings, facts, host, sink
        self._driver, self._device, self._plugin = driver, device, plugin
        self._host_capacity = admission.HostCapacity()
        self._configure_limits(plugin.stats(device).managed_bytes)
        weights, state = settings.class_patterns.weights, settings.class_patterns.state
        self._patterns: dict[TensorClass, AccessPattern] = {
            "weights": weights or settings.access_pattern,
            "state": state or settings.access_pattern,
        }
        patterns = dict.fromkeys((settings.access_pattern, *self._patterns.values()))
        library = str(plugin.library)
        self._allocators = {name: CUDAPluggableAllocator(library, *plugin.symbols(name)) for name in patterns}
        self._pools = {pattern: self._new_pool(pattern) for pattern in patterns}
        self._current: AccessPattern = settings.access_pattern
        self._steps = self._peak_bytes = 0
        self._refusals = plugin.stats(device).refusals
        self._last_light_step: int | None = None
        self._next_light_step = 0
        self._allocations_at_light = -1
        self._next_snapshot_s = 0.0
        self._last_hard_step: int | None = None
        self._has_retired_segments = False
        self._route = self._announce_route(self._open_route())

    def close(self) -> None:
        """End the routing. Existing memory stays valid and is freed through the plugin."""
        if self._pools:
            self._route.end(self._pools[self._current])
            self._route.close()
            self._pools = {}

    @contextmanager
    def allocating(self, tensor_class: TensorClass) -> Iterator[None]:
        """Use the pool of this tensor class inside the block, for the whole process if the whole process is routed."""
        before, pattern = self._current, self._patterns[tensor_class]
        self._refresh_limits(self.stats())
        self._switch(pattern)
        try:
            yield
        finally:
            self._switch(before)

    def stats(self) -> OverflowStats:
        return self._plugin.stats(self._device)

    def reclaim_between_steps(self) -> ReclaimedBytes:
        """Reclaim memory where it pays off: takes microseconds while nothing has spilled, and at most 1 % of the time
        afterwards.
        """
        self._steps += 1
        account = self.stats()
        refused, self._refusals = account.refusals > self._refusals, account.refusals
        self._refresh_limits(account)
        start_s, idle = time.monotonic(), not account.managed_bytes and not self._has_retired_segments
        # A snapshot of all segments is the expensive part. It is skipped while nothing has spilled, and while the time
        # of the last one still exceeds SNAPSHOT_TIME_SHARE. A refusal is always examined.
        if not refused and (idle or start_s < self._next_snapshot_s):
            return ReclaimedBytes()
        segments = self._segments()
        if self._has_retired_segments:
            torch.cuda.empty_cache()  # frees segments of earlier pools whose tensors are gone by now
            account = self.stats()
            held_bytes = account.device_bytes + account.managed_bytes
            self._has_retired_segments = held_bytes > sum(segment.span.nbytes for segment in segments)
        state = self._pool_state(account, segments, refused)
        light = self._reclaim_light(state)
        reason = reclaim.hard_reclaim_reason(self._pool_state(self.stats(), segments, refused) if light else state)
        self._next_snapshot_s = time.monotonic() + (time.monotonic() - start_s) / SNAPSHOT_TIME_SHARE
        return ReclaimedBytes(light, 0 if reason is None else self.rebuild(reason))

    def rebuild(self, reason: str) -> int:
        """Replace the pools, so that cached segments return to the driver. Returns the freed bytes."""
        before = self.stats()
        torch.cuda.synchronize(self._device)
        # The new pools must receive all allocations before the old ones are dropped. Dropping a MemPool returns its
        # free segments to the driver; segments with live tensors stay until these tensors end.
        before_pools, self._pools = self._pools, {pattern: self._new_pool(pattern) for pattern in self._pools}
        self._route.switch(before_pools[self._current], self._pools[self._current])
        before_pools.clear()
        torch.cuda.empty_cache()  # frees cached segments that earlier pools still held
        after = self.stats()
        freed = before.device_bytes + before.managed_bytes - after.device_bytes - after.managed_bytes
        self._has_retired_segments, self._last_hard_step, self._next_snapshot_s = True, self._steps, 0.0
        self._plugin.count_reclamations(hard=1, device=self._device)
        self._emit_reclaimed("hard", freed, reason)
        self._sink.emit(NoteEvent(SETTINGS_KEY, f"pools rebuilt, {bytes_text(freed)} freed: {reason}"))
        return freed

    def _configure_limits(self, managed_bytes: int) -> None:
        """Recompute the limits: available host memory changes during a run, and only Python sees a container's share of
        it.
        """
        available = host_available_bytes(self._facts, self._host)
        host_capacity = None if available is None else self._host_capacity.update(available, managed_bytes)
        self._limits = admission.overflow_limits(self._settings, self._host, host_capacity=host_capacity)
        self._plugin.configure(self._limits, self._device)
        self._limits_until_s = time.monotonic() + MAX_LIMITS_AGE_S

    def _refresh_limits(self, account: OverflowStats) -> None:
        if time.monotonic() >= self._limits_until_s:
            self._configure_limits(account.managed_bytes)

    def _new_pool(self, pattern: AccessPattern) -> torch.cuda.MemPool:
        allocator: Any = self._allocators[pattern]
        with torch.cuda.device(self._device):  # a pool belongs to the device that is current when it is created
            return torch.cuda.MemPool(allocator.allocator())

    def _open_route(self) -> AllocationRoute:
        problem = routing.process_wide_problem(torch.__version__, routing.torch_begin_function())
        if problem is None:
            process_wide = ProcessWideRoute(self._device)
            if self._try_route(process_wide, routing.other_thread_is_routed):
                return process_wide
            problem = "an allocation on another thread did not reach the plugin"
        thread_local = ThreadLocalRoute(self._device)
        if not self._try_route(thread_local, routing.this_thread_is_routed):
            version = torch.__version__
            raise MemoryEngineError(f"{SETTINGS_KEY}: torch {version} requests no memory from the plugin ({problem})")
        self._sink.emit(WarningEvent(SETTINGS_KEY, f"only {thread_local.description} are routed: {problem}"))
        return thread_local

    def _try_route(self, route: AllocationRoute, is_routed: Callable[[int, Callable[[], int]], bool]) -> bool:
        """Begin this route and return True if allocations arrive by it; otherwise undo it."""
        with ExitStack() as undo:
            undo.callback(route.close)
            route.begin(self._pools[self._current])
            undo.callback(route.end, self._pools[self._current])
            if is_routed(self._device, self._plugin_requests):
                undo.pop_all()
                return True
        return False

    def _announce_route(self, route: AllocationRoute) -> AllocationRoute:
        account, limits = self.stats(), self._limits
        if (warning := admission.settings_warning(self._settings, account.total_bytes)) is not None:
            self._sink.emit(WarningEvent(SETTINGS_KEY, warning))
        total, reserve = bytes_text(account.limit_bytes), min(account.reserve_bytes, account.total_bytes)
        spill = f"then managed memory ({self._settings.access_pattern}) up to {total} in total"
        free = f"{bytes_text(reserve)} of the GPU and {bytes_text(limits.host_floor_bytes)} of the host stay free"
        patterns: dict[str, JSON] = {"all": self._current, **{name: used for name, used in self._patterns.items()}}
        value: dict[str, JSON] = {"oversubscription_ratio": limits.ratio, "patterns": patterns}
        reason = f"device memory first, {spill}; {free}; routed: {route.description}"
        self._sink.emit(DecisionEvent(SETTINGS_KEY, value, reason))
        return route

    def _plugin_requests(self) -> int:
        account = self.stats()
        return account.device_allocations + account.managed_allocations + account.refusals

    def _switch(self, pattern: AccessPattern) -> None:
        if self._pools and pattern != self._current:
            self._route.switch(self._pools[self._current], self._pools[pattern])
            self._current = pattern

    @contextmanager
    def _pools_frozen(self) -> Iterator[None]:
        """Route allocations of other threads to a separate pool inside the block, so that free blocks of the pools stay
        free.
        """
        side_pool: Any = self._new_pool(self._current)
        self._route.switch(self._pools[self._current], side_pool)
        try:
            yield
        finally:
            self._route.switch(side_pool, self._pools[self._current])
            self._has_retired_segments = self._has_retired_segments or bool(side_pool.snapshot(include_traces=False))

    def _segments(self) -> tuple[reclaim.PoolSegment, ...]:
        pools: list[Any] = list(self._pools.values())
        snapshots = [segment for pool in pools for segment in pool.snapshot(include_traces=False)]
        return reclaim.plugin_segments(snapshots, self._plugin.segment_kind)

    def _allocations_served(self) -> int:
        """Number of allocations that torch has served, from its cache or not."""
        return int(torch.cuda.memory_stats(self._device)["allocation.all.allocated"])

    def _page_bytes(self) -> int:
        return 2 * MIB if isinstance(self._driver, NotAvailable) else self._driver.page_bytes

    def _pool_state(
        self, account: OverflowStats, segments: Sequence[reclaim.PoolSegment], refused: bool
    ) -> reclaim.PoolState:
        free_ranges = reclaim.free_managed_ranges(segments, self._page_bytes())
        free, total = torch.cuda.mem_get_info(self._device)
        # torch's own peak may be reset by others
        self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated(self._device))
        return reclaim.PoolState(
            stage=account.stage,
            total_bytes=total,
            gpu_free_bytes=free,
            needed_free_bytes=account.reserve_bytes + account.margin_bytes,
            reserved_bytes=sum(segment.span.nbytes for segment in segments),
            cached_bytes=sum(segment.free_bytes for segment in segments),
            cold_bytes=sum(span.nbytes for span in free_ranges),
            peak_bytes=self._peak_bytes,
            refused=refused,
            used_since_light=self._allocations_served() != self._allocations_at_light,
            can_discard=not isinstance(self._driver, NotAvailable) and self._driver.version() >= DISCARD_API_VERSION,
            steps_since_light=None if self._last_light_step is None else self._steps - self._last_light_step,
            steps_since_hard=None if self._last_hard_step is None else self._steps - self._last_hard_step,
        )

    def _reclaim_light(self, state: reclaim.PoolState) -> int:
        reason = reclaim.light_reclaim_reason(state)
        if reason is None or isinstance(self._driver, NotAvailable) or self._steps < self._next_light_step:
            return 0
        # Between the snapshot and the discard another thread must not receive a free block: its content would be lost.
        # So the ranges are read again while the pools are frozen, and after all queued kernels have finished.
        with self._pools_frozen():
            spans = reclaim.free_managed_ranges(self._segments(), self._page_bytes())
            nbytes = sum(span.nbytes for span in spans)
            torch.cuda.synchronize(self._device)  # kernels queued before a block was freed may still use it
            self._last_light_step, self._allocations_at_light = self._steps, self._allocations_served()
            try:
                if state.can_discard:
                    self._driver.discard(spans)
                else:
                    self._driver.prefetch(spans, HOST)
                self._driver.synchronize(self._device)
            except DriverError as error:
                # the driver would fail again at every step
                self._next_light_step = self._steps + reclaim.LIGHT_EVERY_STEPS
                self._sink.emit(WarningEvent(SETTINGS_KEY, f"{bytes_text(nbytes)} could not be reclaimed: {error}"))
                return 0
        self._plugin.count_reclamations(light=1, device=self._device)
        self._emit_reclaimed("light", nbytes, reason)
        return nbytes

    def _emit_reclaimed(self, depth: str, nbytes: int, reason: str) -> None:
        figures: dict[str, JSON] = {"how": depth, "bytes": nbytes, "step_ends": self._steps, "reason": reason}
        self._sink.emit(MeasurementEvent(RECLAIMED_EVENT, figures))
