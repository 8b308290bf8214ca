"""Overflow for a whole run: torch's allocations routed through the plugin, and memory taken back between steps.

`open_pools` refuses, with the reason, wherever spilling cannot work or buys nothing. While pools are open, every
segment that torch asks for comes from the plugin; closing them leaves torch as it was, and tensors that live on stay
valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from torch.cuda.memory import CUDAPluggableAllocator

from supertuner.core.errors import MemoryEngineError
from supertuner.core.events import DecisionEvent, MeasurementEvent, NoteEvent, Sink, WarningEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON, MIB, bytes_text
from supertuner.memory.driver import HOST, Driver, Missing, Refused
from supertuner.memory.overflow import reclaim as reclaiming
from supertuner.memory.overflow import routing
from supertuner.memory.overflow.admission import NAME, HostRoom, doubt, limits_of, numbered, refusal, torch_facts
from supertuner.memory.overflow.plugin import FREE, Limits, Overflow, OverflowStats, Pattern, alloc_name, built
from supertuner.memory.overflow.routing import ProcessWide, Route, ThisThread
from supertuner.memory.probe import host_available_bytes

if TYPE_CHECKING:
    from supertuner.config.settings.memory import OverflowSettings as Settings
    from supertuner.memory.probe import Facts

Class: TypeAlias = Literal["weights", "state"]

RECLAIMED: Final = "memory.reclaimed"
LIMITS_AGE_S: Final = 0.25
"""How old the host's limits may be, which only Python can see all of: reading them takes a tenth of a millisecond."""
LOOK_SHARE: Final = 0.01
"""Of a run's time, that looking through torch's segments may take: microseconds for each of them."""
DISCARDS_SINCE: Final = 13000
"""The driver's version from which managed memory can be discarded."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What one step's end took back."""

    light_bytes: int = 0
    hard_bytes: int = 0


def open_pools(
    settings: Settings,
    facts: Facts,
    host: HostFacts,
    sink: Sink,
    *,
    driver: Driver | Missing,
    device: torch.device | int = 0,
) -> Pools:
    """Route torch's allocations on `device` through the plugin; MemoryEngineError says why where that cannot be.

    `driver` takes memory back between steps; without one only the pools' own cache can be given up.
    """
    where = numbered(torch.device("cuda", device) if isinstance(device, int) else device)
    reason = refusal(settings, facts, where, torch_facts(where), host)
    library = built()
    if reason is not None:
        raise MemoryEngineError(f"{NAME}: {reason}")
    if isinstance(library, Missing):
        raise MemoryEngineError(f"{NAME}: {library.reason}")
    return Pools(settings, facts, host, sink, driver, where.index or 0, Overflow(library))


class Pools:
    """One pool for all tensors, and one more for each class of them whose access pattern is another."""

    def __init__(
        self,
        settings: Settings,
        facts: Facts,
        host: HostFacts,
        sink: Sink,
        driver: Driver | Missing,
        device: int,
        overflow: Overflow,
    ) -> None:
        self._settings, self._facts, self._host, self._sink = settings, facts, host, sink
        self._driver, self._device, self._overflow = driver, device, overflow
        self._room = HostRoom()
        self._limits = self._tell_limits(overflow.stats(device).managed_bytes)
        weights, state = settings.class_patterns.weights, settings.class_patterns.state
        self._patterns: dict[Class, Pattern] = {
            "weights": weights or settings.access_pattern,
            "state": state or settings.access_pattern,
        }
        used = dict.fromkeys((settings.access_pattern, *self._patterns.values()))
        path, free = str(overflow.library), FREE
        self._allocators = {pattern: CUDAPluggableAllocator(path, alloc_name(pattern), free) for pattern in used}
        self._pools = {pattern: self._new_pool(pattern) for pattern in used}
        self._current: Pattern = settings.access_pattern
        self._steps = self._peak = 0
        self._refusals = overflow.stats(device).refusals
        self._light_at: int | None = None
        self._light_from = 0
        self._given_at_light = -1
        self._next_look_s = 0.0
        self._hard_at: int | None = None
        self._retired = False
        self._route = self._told(self._open_route())

    def __enter__(self) -> Pools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the routing. What was given stays valid, and is freed through the plugin."""
        if self._pools:
            self._route.end(self._pools[self._current])
            self._route.close()
            self._pools = {}

    @contextmanager
    def placing(self, what: Class) -> Iterator[None]:
        """Allocations inside are of this class: the whole process's, where the whole process is routed."""
        before, pattern = self._current, self._patterns[what]
        self._refresh_limits(self.stats())
        self._switch(pattern)
        try:
            yield
        finally:
            self._switch(before)

    def stats(self) -> OverflowStats:
        return self._overflow.stats(self._device)

    def between_steps(self) -> Reclaimed:
        """Take back what is worth it: microseconds while nothing has spilled, a hundredth of the time from then on."""
        self._steps += 1
        account = self.stats()
        refused, self._refusals = account.refusals > self._refusals, account.refusals
        self._refresh_limits(account)
        began, idle = time.monotonic(), not account.managed_bytes and not self._retired
        if not refused and (idle or began < self._next_look_s):
            return Reclaimed()
        segments = self._segments()
        if self._retired:
            torch.cuda.empty_cache()  # segments of earlier pools, as far as their tensors are gone by now
            account = self.stats()
            held = account.device_bytes + account.managed_bytes
            self._retired = held > sum(segment.span.nbytes for segment in segments)
        now = self._situation(account, segments, refused)
        light = self._light(now)
        reason = reclaiming.hard_reason(self._situation(self.stats(), segments, refused) if light else now)
        self._next_look_s = time.monotonic() + (time.monotonic() - began) / LOOK_SHARE
        return Reclaimed(light, 0 if reason is None else self.rebuild(reason))

    def rebuild(self, reason: str) -> int:
        """Drop the pools and begin anew: cached segments go back to the driver. The bytes that went."""
        before = self.stats()
        torch.cuda.synchronize(self._device)
        before_pools, self._pools = self._pools, {pattern: self._new_pool(pattern) for pattern in self._pools}
        self._route.switch(before_pools[self._current], self._pools[self._current])
        before_pools.clear()
        torch.cuda.empty_cache()  # what earlier pools still held and nobody uses any more
        after = self.stats()
        freed = before.device_bytes + before.managed_bytes - after.device_bytes - after.managed_bytes
        self._retired, self._hard_at, self._next_look_s = True, self._steps, 0.0
        self._overflow.reclaimed(hard=1, device=self._device)
        self._tell("hard", freed, reason)
        self._sink.emit(NoteEvent(NAME, f"pools rebuilt, {bytes_text(freed)} given back: {reason}"))
        return freed

    def _tell_limits(self, managed_bytes: int) -> Limits:
        """What the host has left changes while a run goes on; a container's share of it only Python can see."""
        available = host_available_bytes(self._facts, self._host)
        room = None if available is None else self._room.seen(available, managed_bytes)
        limits = limits_of(self._settings, self._host, room=room)
        self._overflow.configure(limits, self._device)
        self._limits_until_s = time.monotonic() + LIMITS_AGE_S
        return limits

    def _refresh_limits(self, account: OverflowStats) -> None:
        if time.monotonic() >= self._limits_until_s:
            self._tell_limits(account.managed_bytes)

    def _new_pool(self, pattern: Pattern) -> torch.cuda.MemPool:
        allocator: Any = self._allocators[pattern]
        with torch.cuda.device(self._device):  # a pool has its allocator on the device that is current now, on no other
            return torch.cuda.MemPool(allocator.allocator())

    def _open_route(self) -> Route:
        why = routing.not_process_wide(torch.__version__, routing.begin_call())
        if why is None:
            everywhere = ProcessWide(self._device)
            if self._begins(everywhere, routing.other_thread_arrives):
                return everywhere
            why = "an allocation on another thread did not arrive"
        here = ThisThread(self._device)
        if not self._begins(here, routing.this_thread_arrives):
            raise MemoryEngineError(f"{NAME}: torch {torch.__version__} does not ask the plugin for memory ({why})")
        self._sink.emit(WarningEvent(NAME, f"only {here.how} are routed: {why}"))
        return here

    def _begins(self, route: Route, arrives: Callable[[int, Callable[[], int]], bool]) -> bool:
        """Whether allocations arrive by this route, which is then begun; otherwise torch is as it was."""
        with ExitStack() as undo:
            undo.callback(route.close)
            route.begin(self._pools[self._current])
            undo.callback(route.end, self._pools[self._current])
            if arrives(self._device, self._arrivals):
                undo.pop_all()
                return True
        return False

    def _told(self, route: Route) -> Route:
        account, limits = self.stats(), self._limits
        spilled = (
            f"then managed memory ({self._settings.access_pattern}) up to {bytes_text(account.limit_bytes)} in all"
        )
        if (surprise := doubt(self._settings, account.total_bytes)) is not None:
            self._sink.emit(WarningEvent(NAME, surprise))
        reserve = min(account.reserve_bytes, account.total_bytes)
        gpu, host = bytes_text(reserve), bytes_text(limits.host_floor_bytes)
        kept = f"{gpu} of the GPU and {host} of the host stay free"
        patterns: dict[str, JSON] = {"all": self._current, **{name: of for name, of in self._patterns.items()}}
        value: dict[str, JSON] = {"oversubscription_ratio": limits.ratio, "patterns": patterns}
        self._sink.emit(DecisionEvent(NAME, value, f"device memory first, {spilled}; {kept}; routed: {route.how}"))
        return route

    def _arrivals(self) -> int:
        account = self.stats()
        return account.device_allocations + account.managed_allocations + account.refusals

    def _switch(self, pattern: Pattern) -> None:
        if self._pools and pattern != self._current:
            self._route.switch(self._pools[self._current], self._pools[pattern])
            self._current = pattern

    @contextmanager
    def _nothing_taken(self) -> Iterator[None]:
        """Inside, what is free in the pools stays free: what other threads allocate comes from a pool of its own."""
        aside: Any = self._new_pool(self._current)
        self._route.switch(self._pools[self._current], aside)
        try:
            yield
        finally:
            self._route.switch(aside, self._pools[self._current])
            self._retired = self._retired or bool(aside.snapshot(include_traces=False))

    def _segments(self) -> tuple[reclaiming.Segment, ...]:
        pools: list[Any] = list(self._pools.values())
        snapshots = [one for pool in pools for one in pool.snapshot(include_traces=False)]
        return reclaiming.segments_of(snapshots, self._overflow.kind_of)

    def _given(self) -> int:
        """How many allocations torch has served, from its cache or not."""
        return int(torch.cuda.memory_stats(self._device)["allocation.all.allocated"])

    def _page_bytes(self) -> int:
        return 2 * MIB if isinstance(self._driver, Missing) else self._driver.page_bytes

    def _situation(
        self, account: OverflowStats, segments: tuple[reclaiming.Segment, ...], refused: bool
    ) -> reclaiming.Situation:
        cold = reclaiming.cold_spans(segments, self._page_bytes())
        free, total = torch.cuda.mem_get_info(self._device)
        self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))  # others may reset torch's own
        return reclaiming.Situation(
            stage=account.stage,
            total_bytes=total,
            gpu_free_bytes=free,
            needed_free_bytes=account.reserve_bytes + account.margin_bytes,
            reserved_bytes=sum(segment.span.nbytes for segment in segments),
            cached_bytes=sum(segment.free_bytes for segment in segments),
            cold_bytes=sum(span.nbytes for span in cold),
            peak_bytes=self._peak,
            refused=refused,
            used_since_light=self._given() != self._given_at_light,
            can_discard=not isinstance(self._driver, Missing) and self._driver.version() >= DISCARDS_SINCE,
            steps_since_light=None if self._light_at is None else self._steps - self._light_at,
            steps_since_hard=None if self._hard_at is None else self._steps - self._hard_at,
        )

    def _light(self, now: reclaiming.Situation) -> int:
        reason = reclaiming.light_reason(now)
        if reason is None or isinstance(self._driver, Missing) or self._steps < self._light_from:
            return 0
        with self._nothing_taken():
            spans = reclaiming.cold_spans(self._segments(), self._page_bytes())
            nbytes = sum(span.nbytes for span in spans)
            torch.cuda.synchronize(self._device)  # kernels that were queued before a block was freed may still use it
            self._light_at, self._given_at_light = self._steps, self._given()
            try:
                if now.can_discard:
                    self._driver.discard(spans)
                else:
                    self._driver.prefetch(spans, HOST)
                self._driver.synchronize(self._device)
            except Refused as refused:
                self._light_from = self._steps + reclaiming.LIGHT_EVERY_STEPS  # it would say so again at every step
                self._sink.emit(WarningEvent(NAME, f"{bytes_text(nbytes)} could not be taken back: {refused}"))
                return 0
        self._overflow.reclaimed(light=1, device=self._device)
        self._tell("light", nbytes, reason)
        return nbytes

    def _tell(self, how: str, nbytes: int, reason: str) -> None:
        figures: dict[str, JSON] = {"how": how, "bytes": nbytes, "step_ends": self._steps, "reason": reason}
        self._sink.emit(MeasurementEvent(RECLAIMED, figures))
