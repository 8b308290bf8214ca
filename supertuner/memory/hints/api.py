"""Residency hints for tensors and batches, also under the names of the GH200 forks of SimpleTuner and ai-toolkit. Every
call returns its outcome.

A trainer creates its own `ResidencyHints`. The functions at the end are for scripts that use the names of the forks:
they share one `ResidencyHints` per process, held by the only process-wide state that the architecture tests allow,
which is filled from configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, Union

from supertuner.core.types import bytes_text
from supertuner.memory.driver import HOST, AddressRange, Driver, GpuLocation, MemoryLocation, NotAvailable, find_device
from supertuner.memory.hints.applied_cache import AppliedHintCache
from supertuner.memory.hints.enabled import HintDecision, HintSupport, decide_hints, hint_support
from supertuner.memory.hints.issue import HintIssuer, HintRequest, HintVerb
from supertuner.memory.hints.outcomes import BatchHintSummary as BatchHintSummary
from supertuner.memory.hints.outcomes import HintOutcome as HintOutcome
from supertuner.memory.hints.outcomes import HintStatus as HintStatus
from supertuner.memory.hints.outcomes import OutcomeCounts, combine_outcomes
from supertuner.memory.hints.page_ranges import (
    NoAddress,
    StridedLayout,
    TooManyPieces,
    plain_parts,
    strided_layout,
    whole_pages,
)
from supertuner.memory.hints.policy import POLICIES, BatchHint, BatchTensorKind, PolicyName, named_tensors, tensor_kind

if TYPE_CHECKING:
    import torch

DeviceLike: TypeAlias = Union["torch.device", str, int, None]
"""A device as torch functions accept it; None: the GPU of these hints."""


class ResidencyHints:
    """Hints for one GPU of a driver. Remembers applied hints, so that a repeated hint costs a look-up.

    May be used from several threads.
    """

    def __init__(
        self,
        driver: Driver | NotAvailable,
        device: int = 0,
        *,
        policy: PolicyName = "default",
        headroom_bytes: int | None = None,
        free_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        """`headroom_bytes` and `free_bytes`: see `HintIssuer`."""
        self.device = device
        self._policy = POLICIES[policy]
        self._issuer: HintIssuer | None = None
        self._unavailable_outcome = HintOutcome(HintStatus.UNSUPPORTED, f"the driver has no GPU {device}")
        """The outcome of every hint if there is no issuer."""
        if isinstance(driver, NotAvailable):
            self._unavailable_outcome = HintOutcome(HintStatus.UNSUPPORTED, driver.reason)
        elif (properties := find_device(driver, device)) is not None:
            self._issuer = HintIssuer(driver, properties, headroom_bytes, free_bytes)
        self._applied_hints = AppliedHintCache()
        self._requests_by_name: dict[str, tuple[BatchTensorKind, tuple[HintRequest, ...]]] = {}
        self._requests = {
            BatchHint.PREFER_CPU: HintRequest(HintVerb.PREFER, HOST),
            BatchHint.PREFER_GPU: HintRequest(HintVerb.PREFER, GpuLocation(device)),
            BatchHint.PREFETCH: HintRequest(HintVerb.PREFETCH, GpuLocation(device)),
        }

    def prefer_cpu(self, tensor: torch.Tensor) -> HintOutcome:
        """Prefer host memory for this tensor. Moves nothing."""
        return self._hint(tensor, self._requests[BatchHint.PREFER_CPU])

    def prefer_gpu(self, tensor: torch.Tensor) -> HintOutcome:
        """Prefer GPU memory for this tensor. Moves nothing."""
        return self._hint(tensor, self._requests[BatchHint.PREFER_GPU])

    def prefetch(
        self, tensor: torch.Tensor, device: DeviceLike = None, *, wait: bool = True, force: bool = False
    ) -> HintOutcome:
        """Start migrating the tensor to a device.

        With `wait`, waits until pages of ordinary memory have arrived, to verify that they did. With `force`, issues
        the hint even if it was applied before, for example because pages were evicted since.
        """
        request = HintRequest(HintVerb.PREFETCH, self._location(device))
        if force and isinstance(parts := plain_parts(tensor), tuple):
            for part in parts:
                self.forget(strided_layout(part).span)
        return self._hint(tensor, request, wait=wait)

    def accessed_by(self, tensor: torch.Tensor, device: DeviceLike = None) -> HintOutcome:
        """Map the tensor for a device without migrating it."""
        return self._hint(tensor, HintRequest(HintVerb.ACCESSED_BY, self._location(device)))

    def read_mostly(self, tensor: torch.Tensor) -> HintOutcome:
        """Let each reading processor have its own copy."""
        return self._hint(tensor, HintRequest(HintVerb.READ_MOSTLY, GpuLocation(self.device)))

    def prefer_host_range(self, address: int, nbytes: int) -> HintOutcome:
        """Prefer host memory for a mapped range, such as a cache's arena.

        Not remembered: the caller requests it once per mapping.
        """
        layout = StridedLayout(address, 1, (nbytes,), (1,))
        return self._issue_layout(layout, self._requests[BatchHint.PREFER_CPU])

    def forget(self, span: AddressRange | None = None) -> None:
        """Forget applied hints of a range, because its memory was freed or moved by others; None: all."""
        self._applied_hints.forget(span)

    def place_batch(self, batch: object) -> OutcomeCounts:
        """Apply the policy's hints to every tensor of a batch, without waiting."""
        counts: OutcomeCounts = Counter()
        for name, tensor in named_tensors(batch):
            kind, requests = self._requests_by_name.get(name) or self._requests_for(name)
            if not requests:
                counts[HintStatus.NO_EFFECT, f"the policy has no hint for {kind}"] += 1
            for request in requests:
                outcome = self._hint(tensor, request, wait=False)
                reason = outcome.reason if kind is not BatchTensorKind.OTHER else f'{outcome.reason} (of kind "other")'
                counts[outcome.status, reason] += 1
        return counts

    def hint_batch(self, batch: object, hint: BatchHint) -> BatchHintSummary:
        """Apply one hint to every tensor of a batch."""
        counts: OutcomeCounts = Counter()
        for _, tensor in named_tensors(batch):
            outcome = self._hint(tensor, self._requests[hint])
            counts[outcome.status, outcome.reason] += 1
        return BatchHintSummary.from_counts(counts)

    def _requests_for(self, name: str) -> tuple[BatchTensorKind, tuple[HintRequest, ...]]:
        """The kind and requests for a tensor name, cached: names are few and repeat in every batch."""
        kind = tensor_kind(name)
        entry = self._requests_by_name[name] = (kind, tuple(self._requests[hint] for hint in self._policy[kind]))
        return entry

    def _hint(self, tensor: torch.Tensor, request: HintRequest, *, wait: bool = True) -> HintOutcome:
        import torch

        if type(tensor) is torch.Tensor:
            try:
                cached = self._applied_hints.find(tensor, request)
            except RuntimeError:
                cached = None  # a tensor without storage; the reason is determined below
            if cached is not None:
                return cached
        parts = plain_parts(tensor)
        if isinstance(parts, NoAddress):
            return HintOutcome(HintStatus.UNSUPPORTED, parts.reason)
        find = self._applied_hints.find
        return combine_outcomes([find(part, request) or self._issue(part, request, wait) for part in parts])

    def _issue(self, tensor: torch.Tensor, request: HintRequest, wait: bool) -> HintOutcome:
        layout = strided_layout(tensor)
        outcome = self._issue_layout(layout, request, tensor.device.index, wait)
        if outcome.status not in (HintStatus.REFUSED, HintStatus.ERROR):  # those may succeed the next time
            self._applied_hints.store(tensor, request, layout.span, outcome)
        return outcome

    def _issue_layout(
        self, layout: StridedLayout, request: HintRequest, gpu: int | None = None, wait: bool = True
    ) -> HintOutcome:
        nbytes = layout.span.nbytes
        if self._issuer is None:
            outcome = self._unavailable_outcome
        elif nbytes == 0:
            outcome = HintOutcome(HintStatus.NO_EFFECT, "an empty tensor")
        else:
            page_bytes = self._issuer.driver.page_bytes
            pages = whole_pages(layout, page_bytes)
            if isinstance(pages, TooManyPieces):
                outcome = HintOutcome(HintStatus.UNSUPPORTED, "a view in too many pieces")
            elif pages:
                outcome = self._issuer.issue(pages, request, gpu=gpu, wait=wait)
            else:
                problem = "smaller than a page of" if nbytes < page_bytes else "it does not cover a whole page of"
                outcome = HintOutcome(HintStatus.NO_EFFECT, f"{problem} {bytes_text(page_bytes)}")
        return replace(outcome, requested=layout.span)

    def _location(self, device: DeviceLike) -> MemoryLocation:
        if device is None:
            return GpuLocation(self.device)
        if isinstance(device, int):
            return GpuLocation(device)
        import torch

        torch_device = torch.device(device)
        if torch_device.type == "cpu":
            return HOST
        return GpuLocation(self.device if torch_device.index is None else torch_device.index)


@dataclass(slots=True)
class _ProcessHints:
    """State shared by the functions below. The override takes precedence; the rest is filled from configuration."""

    override: bool | None = None
    configured: tuple[bool | None, tuple[str, ...]] | None = None
    """`gh200_optimizations.enable_uvm_hints` and the types of the caches; None: no configuration was set."""
    hints: ResidencyHints | None = None
    decision: HintDecision | None = None
    """The cached decision, until one of its inputs changes."""
    support: HintSupport | None = None


_process = _ProcessHints()
"""Process-wide state, which the architecture tests allow only here and for the lock around loading models."""


def set_uvm_hint_override(value: bool | None) -> None:
    """Turn hints on or off regardless of the configuration; None: as configured."""
    if value is not None and not isinstance(value, bool):  # "0" and "no" would both turn hints on
        raise TypeError(f"set_uvm_hint_override takes True, False or None, not {value!r}")
    _process.override, _process.decision = value, None


def uvm_hint_override() -> bool | None:
    """The last value that was passed to `set_uvm_hint_override`."""
    return _process.override


def use_hints(
    hints: ResidencyHints | None, setting: bool | None, cache_types: Sequence[str], support: HintSupport
) -> None:
    """Let the functions below use a run's hints and configuration; `hints` is None for a run without hints."""
    _process.hints, _process.support = hints, support
    _process.configured, _process.decision = (setting, tuple(cache_types)), None


def drop_hints() -> None:
    """Drop a run's hints and configuration when it ends. The override stays."""
    _process.configured = _process.hints = _process.decision = _process.support = None


def reset_hints() -> None:
    """Reset override, configuration and hints, as in a new process."""
    drop_hints()
    _process.override = None


def hints_enabled() -> HintDecision:
    """Whether hints are on in this process, and why. Without a run's configuration the environment variables decide."""
    if _process.decision is None:
        if _process.configured is None:
            _process.configured = (_environment_setting(), ())
        decision = decide_hints(_process.override, *_process.configured, HintSupport(True, "not checked yet"))
        if decision.on:  # only now must the driver be opened
            if _process.support is None:
                _process_hints()
            assert _process.support is not None
            decision = decide_hints(_process.override, *_process.configured, _process.support)
        _process.decision = decision
    return _process.decision


def gh200_uvm_enabled() -> bool:
    """Whether hints are requested, and supported on this machine."""
    return hints_enabled().on


def prefer_cpu_residency(tensor: torch.Tensor) -> HintOutcome:
    return _disabled_outcome() or _process_hints().prefer_cpu(tensor)


def prefer_gpu_residency(tensor: torch.Tensor) -> HintOutcome:
    return _disabled_outcome() or _process_hints().prefer_gpu(tensor)


def prefetch_to_device(tensor: torch.Tensor, device: DeviceLike = None) -> HintOutcome:
    return _disabled_outcome() or _process_hints().prefetch(tensor, device)


def prefer_cpu_residency_batch(batch: object) -> BatchHintSummary:
    return _hint_each(batch, BatchHint.PREFER_CPU)


def prefer_gpu_residency_batch(batch: object) -> BatchHintSummary:
    return _hint_each(batch, BatchHint.PREFER_GPU)


def prefetch_batch_to_device(batch: object) -> BatchHintSummary:
    return _hint_each(batch, BatchHint.PREFETCH)


def optimize_batch_for_gh200(batch: object) -> BatchHintSummary:
    """Place a batch where the next step reads it, by the policy table; returns the counted outcomes."""
    disabled = _disabled_outcome()
    if disabled:
        return _count_all(batch, disabled)
    return BatchHintSummary.from_counts(_process_hints().place_batch(batch))


def _hint_each(batch: object, hint: BatchHint) -> BatchHintSummary:
    disabled = _disabled_outcome()
    return _count_all(batch, disabled) if disabled else _process_hints().hint_batch(batch, hint)


def _count_all(batch: object, outcome: HintOutcome) -> BatchHintSummary:
    """The summary of a batch whose tensors all have this outcome."""
    return BatchHintSummary.from_counts({(outcome.status, outcome.reason): sum(1 for _ in named_tensors(batch))})


def _disabled_outcome() -> HintOutcome | None:
    """The outcome of every hint while hints are off; None if they are on."""
    decision = hints_enabled()
    if decision.on:
        return None
    status = HintStatus.UNSUPPORTED if decision.asked else HintStatus.NO_EFFECT
    return HintOutcome(status, f"hints are off: {decision.reason}")


def requested_hints() -> ResidencyHints | HintOutcome:
    """The hints of this process for callers whose call is itself the request, or the outcome of every hint if the
    configuration or the override turned hints off, or the machine does not support them."""
    decision = hints_enabled()
    if decision.asked is False:
        return HintOutcome(HintStatus.NO_EFFECT, f"hints are off: {decision.reason}")
    hints, support = _process_hints(), _process.support
    assert support is not None
    return hints if support.supported else HintOutcome(HintStatus.UNSUPPORTED, support.reason)


def _process_hints() -> ResidencyHints:
    """The hints of this process, opened at first use."""
    if _process.hints is None or _process.support is None:
        import torch

        from supertuner.memory.cuda import open_cuda

        driver = open_cuda()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        _process.hints, _process.support = ResidencyHints(driver, device), hint_support(driver, device)
    return _process.hints


def _environment_setting() -> bool | None:
    from supertuner.config.sources.load import load_config

    return load_config(None, check_paths=False).config.gh200_optimizations.enable_uvm_hints
