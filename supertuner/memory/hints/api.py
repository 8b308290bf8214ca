"""Residency hints for tensors and batches, and the names that the seeds give them. Every call says what became of it.

A trainer builds its own `Hints`. The functions at the end are for scripts that know only the seeds' names: they share
one `Hints` of the process, and the one holder of process-wide state that the house allows, filled from configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from supertuner.core.types import bytes_text
from supertuner.memory.driver import HOST, Driver, Gpu, Home, Missing, Span
from supertuner.memory.hints.applied_cache import Recall
from supertuner.memory.hints.enabled import Enabled as Enabled
from supertuner.memory.hints.enabled import Support as Support
from supertuner.memory.hints.enabled import decide as decide
from supertuner.memory.hints.enabled import supported as supported
from supertuner.memory.hints.outcomes import Counted as Counted
from supertuner.memory.hints.outcomes import Counts as Counts
from supertuner.memory.hints.outcomes import Outcome as Outcome
from supertuner.memory.hints.outcomes import Status as Status
from supertuner.memory.hints.outcomes import Tally as Tally
from supertuner.memory.hints.outcomes import combined
from supertuner.memory.hints.page_ranges import NoAddress, TooMany, inward, layout_of, parts_of, whole_pages
from supertuner.memory.hints.policy import POLICIES, Hint, Kind, Name, kind_named, tensors_in
from supertuner.memory.hints.request import Ask, Desk, Verb

Where: TypeAlias = torch.device | str | int | None
"""A device as torch's functions take it; None: the GPU that hints are for."""


class Hints:
    """Hints on one GPU of a driver. Remembers what it hinted; a repeated hint costs a look-up.

    May be used from several threads.
    """

    def __init__(
        self,
        driver: Driver | Missing,
        device: int = 0,
        *,
        policy: Name = "default",
        headroom_bytes: int | None = None,
        free_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        """`headroom_bytes` of the GPU stay free of prefetched memory; unset: 5 % of it. `free_bytes` tells what is
        free where the driver's own answer misleads."""
        self.device = device
        self._policy = POLICIES[policy]
        self._desk, self._nothing = _desk(driver, device, headroom_bytes, free_bytes)
        self._recall = Recall()
        self._named: dict[str, tuple[Kind, tuple[Ask, ...]]] = {}
        self._asks = {
            Hint.PREFER_CPU: Ask(Verb.PREFER, HOST),
            Hint.PREFER_GPU: Ask(Verb.PREFER, Gpu(device)),
            Hint.PREFETCH: Ask(Verb.PREFETCH, Gpu(device)),
        }

    def prefer_cpu(self, tensor: torch.Tensor) -> Outcome:
        """Keep it in host memory where there is a choice. Moves nothing."""
        return self._ask(tensor, self._asks[Hint.PREFER_CPU])

    def prefer_gpu(self, tensor: torch.Tensor) -> Outcome:
        """Keep it in the GPU's memory where there is a choice. Moves nothing."""
        return self._ask(tensor, self._asks[Hint.PREFER_GPU])

    def prefetch(
        self, tensor: torch.Tensor, device: Where = None, *, wait: bool = True, again: bool = False
    ) -> Outcome:
        """Begin to move it. `wait`: until the pages of ordinary memory have arrived, to tell whether they did.
        `again`: even if it was prefetched before, as after pages have been evicted."""
        ask = Ask(Verb.PREFETCH, self._home(device))
        if again and isinstance(parts := parts_of(tensor), tuple):
            for part in parts:
                self.forget(layout_of(part).span)
        return self._ask(tensor, ask, wait=wait)

    def accessed_by(self, tensor: torch.Tensor, device: Where = None) -> Outcome:
        """Map it for a device without moving it."""
        return self._ask(tensor, Ask(Verb.ACCESSED_BY, self._home(device)))

    def read_mostly(self, tensor: torch.Tensor) -> Outcome:
        """Let each reader have a copy of its own."""
        return self._ask(tensor, Ask(Verb.READ_MOSTLY, Gpu(self.device)))

    def keep_in_host(self, address: int, nbytes: int) -> Outcome:
        """Ask that a mapped range, such as a cache's arena, stay in host memory where there is a choice.

        Not remembered: whoever maps it asks once."""
        asked = Span(address, nbytes)
        if self._desk is None:
            return replace(self._nothing, asked=asked)
        pages = inward((asked,), self._desk.driver.page_bytes)
        if not pages:
            return replace(_smaller(self._desk), asked=asked)
        return replace(self._desk.ask(pages, self._asks[Hint.PREFER_CPU]), asked=asked)

    def forget(self, span: Span | None = None) -> None:
        """Remember nothing of a range any more: its memory was given up, or another has moved it."""
        self._recall.forget(span)

    def place_batch(self, batch: object) -> Counts:
        """Ask for every tensor of a batch what the policy says of its kind. Begun, not waited for."""
        counts: Counts = Counter()
        for name, tensor in tensors_in(batch):
            kind, asks = self._named.get(name) or self._name(name)
            if not asks:
                counts[Status.NO_EFFECT, f"the policy asks nothing for {kind}"] += 1
            for ask in asks:
                outcome = self._ask(tensor, ask, wait=False)
                reason = outcome.reason if kind is not Kind.OTHER else f'{outcome.reason} (of kind "other")'
                counts[outcome.status, reason] += 1
        return counts

    def each(self, batch: object, hint: Hint) -> Counted:
        """The same hint for every tensor of a batch."""
        counts: Counts = Counter()
        for _, tensor in tensors_in(batch):
            outcome = self._ask(tensor, self._asks[hint])
            counts[outcome.status, outcome.reason] += 1
        return Counted.of(counts)

    def _name(self, name: str) -> tuple[Kind, tuple[Ask, ...]]:
        """What is asked for tensors of a name. Names are few and come again with every batch."""
        kind = kind_named(name)
        found = self._named[name] = (kind, tuple(self._asks[hint] for hint in self._policy[kind]))
        return found

    def _ask(self, tensor: torch.Tensor, ask: Ask, *, wait: bool = True) -> Outcome:
        if type(tensor) is torch.Tensor:
            try:
                known = self._recall.find(tensor, ask)
            except RuntimeError:
                known = None  # a tensor without a storage: why that is so is said below
            if known is not None:
                return known
        parts = parts_of(tensor)
        if isinstance(parts, NoAddress):
            return Outcome(Status.UNSUPPORTED, parts.reason)
        return combined([self._recall.find(part, ask) or self._ask_anew(part, ask, wait) for part in parts])

    def _ask_anew(self, tensor: torch.Tensor, ask: Ask, wait: bool) -> Outcome:
        layout = layout_of(tensor)
        asked = layout.span
        if self._desk is None:
            outcome = self._nothing
        elif asked.nbytes == 0:
            outcome = Outcome(Status.NO_EFFECT, "an empty tensor")
        else:
            pages = whole_pages(layout, self._desk.driver.page_bytes)
            if isinstance(pages, TooMany):
                outcome = Outcome(Status.UNSUPPORTED, "a view in too many pieces")
            elif not pages:
                outcome = _smaller(self._desk) if asked.nbytes < self._desk.driver.page_bytes else _no_page(self._desk)
            else:
                outcome = self._desk.ask(pages, ask, on=tensor.device.index, wait=wait)
        outcome = replace(outcome, asked=asked)
        if outcome.status not in (Status.REFUSED, Status.ERROR):  # those may go better the next time
            self._recall.keep(tensor, ask, asked, outcome)
        return outcome

    def _home(self, device: Where) -> Home:
        if device is None:
            return Gpu(self.device)
        if isinstance(device, int):
            return Gpu(device)
        wanted = torch.device(device)
        if wanted.type == "cpu":
            return HOST
        return Gpu(self.device if wanted.index is None else wanted.index)


def _desk(
    driver: Driver | Missing, number: int, headroom_bytes: int | None, free_bytes: Callable[[], int | None] | None
) -> tuple[Desk | None, Outcome]:
    """Where to ask, or the answer to everything."""
    if isinstance(driver, Missing):
        return None, Outcome(Status.UNSUPPORTED, driver.reason)
    device = next((one for one in driver.devices() if one.number == number), None)
    if device is None:
        return None, Outcome(Status.UNSUPPORTED, f"the driver knows no GPU {number}")
    headroom = device.total_bytes // 20 if headroom_bytes is None else headroom_bytes
    free = free_bytes or partial(driver.free_bytes, number)
    return Desk(driver, device, headroom, free), Outcome(Status.NO_EFFECT, "hints are on")


def _smaller(desk: Desk) -> Outcome:
    return Outcome(Status.NO_EFFECT, f"smaller than a page of {bytes_text(desk.driver.page_bytes)}")


def _no_page(desk: Desk) -> Outcome:
    page = bytes_text(desk.driver.page_bytes)
    return Outcome(Status.NO_EFFECT, f"no whole page of {page} belongs to it alone")


@dataclass(slots=True)
class _Process:
    """What the functions below share. The override is code's last word; the rest is filled from configuration."""

    override: bool | None = None
    asked: tuple[bool | None, tuple[str, ...]] | None = None
    """`gh200_optimizations.enable_uvm_hints` and the types of the caches; None: no configuration was given."""
    hints: Hints | None = None
    enabled: Enabled | None = None
    """The decision, until something it rests on changes."""
    support: Support | None = None


_process = _Process()
"""The one process-wide holder that the house allows (tests/architecture/test_the_house.py names it)."""


def set_uvm_hint_override(value: bool | None) -> None:
    """Turn hints on or off over whatever the configuration says; None: as the configuration says."""
    if value is not None and not isinstance(value, bool):  # "0" and "no" would both turn them on
        raise TypeError(f"set_uvm_hint_override takes True, False or None, not {value!r}")
    _process.override, _process.enabled = value, None


def uvm_hint_override() -> bool | None:
    """What `set_uvm_hint_override` was last given."""
    return _process.override


def use_hints(hints: Hints | None, setting: bool | None, cache_types: Sequence[str], support: Support) -> None:
    """Let the functions below use a run's own hints and configuration. For a run without hints too: None."""
    _process.hints, _process.support = hints, support
    _process.asked, _process.enabled = (setting, tuple(cache_types)), None


def drop_hints() -> None:
    """The run is over: its hints and configuration are nobody's. The override stays."""
    _process.asked = _process.hints = _process.enabled = _process.support = None


def reset_hints() -> None:
    """Forget override, configuration and hints: as in a new process."""
    drop_hints()
    _process.override = None


def hints_enabled() -> Enabled:
    """Whether hints are on in this process, and why. Without a run's configuration, the environment's variables ask."""
    if _process.enabled is None:
        if _process.asked is None:
            _process.asked = (_setting_of_environment(), ())
        wanted = decide(_process.override, *_process.asked, Support(True, "not looked at yet"))
        if wanted.on:  # only now is there a reason to wake the driver
            if _process.support is None:
                _ready()
            assert _process.support is not None
            wanted = decide(_process.override, *_process.asked, _process.support)
        _process.enabled = wanted
    return _process.enabled


def gh200_uvm_enabled() -> bool:
    """Whether hints are asked for and supported here."""
    return hints_enabled().on


def prefer_cpu_residency(tensor: torch.Tensor) -> Outcome:
    return _off() or _ready().prefer_cpu(tensor)


def prefer_gpu_residency(tensor: torch.Tensor) -> Outcome:
    return _off() or _ready().prefer_gpu(tensor)


def prefetch_to_device(tensor: torch.Tensor, device: Where = None) -> Outcome:
    return _off() or _ready().prefetch(tensor, device)


def prefer_cpu_residency_batch(batch: object) -> Counted:
    return _each(batch, Hint.PREFER_CPU)


def prefer_gpu_residency_batch(batch: object) -> Counted:
    return _each(batch, Hint.PREFER_GPU)


def prefetch_batch_to_device(batch: object) -> Counted:
    return _each(batch, Hint.PREFETCH)


def optimize_batch_for_gh200(batch: object) -> Counted:
    """Ask that a batch lie where the next step reads it, by the policy table; what became of it, counted."""
    off = _off()
    return Counted.of(_all(batch, off) if off else _ready().place_batch(batch))


def _each(batch: object, hint: Hint) -> Counted:
    off = _off()
    return Counted.of(_all(batch, off)) if off else _ready().each(batch, hint)


def _all(batch: object, outcome: Outcome) -> Counts:
    return Counter({(outcome.status, outcome.reason): sum(1 for _ in tensors_in(batch))})


def _off() -> Outcome | None:
    """What becomes of every hint while they are off; None: they are on."""
    enabled = hints_enabled()
    if enabled.on:
        return None
    status = Status.UNSUPPORTED if enabled.asked else Status.NO_EFFECT
    return Outcome(status, f"hints are off: {enabled.reason}")


def _ready() -> Hints:
    """The process's hints, opened when first needed."""
    if _process.hints is None or _process.support is None:
        from supertuner.memory.cuda import open_cuda

        driver = open_cuda()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        _process.hints, _process.support = Hints(driver, device), supported(driver, device)
    return _process.hints


def _setting_of_environment() -> bool | None:
    from supertuner.config.sources.load import load_config

    return load_config(None, check_paths=False).config.gh200_optimizations.enable_uvm_hints
