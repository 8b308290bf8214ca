"""Hints report their outcome correctly: for each kind of memory and tensor, and remembered exactly as long as they
hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from supertuner.memory.driver import (
    HOST,
    AddressRange,
    GpuLocation,
    HostNumaLocation,
    MemoryKind,
    MemoryLocation,
    NotAvailable,
)
from supertuner.memory.emulator.configuration import InjectedFault
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.hints.api import HintOutcome, HintStatus, ResidencyHints
from supertuner.memory.hints.issue import HintIssuer, HintRequest, HintVerb, page_addresses, same_location
from supertuner.memory.hints.outcomes import HintTally, combine_outcomes
from tests.memory.tensors import CARD, GB10, PAGE, DriverMemory, host_tensor, superchip

GPU = GpuLocation(0)
KIB64 = "64.0 KiB"


def status_and_reason(outcome: HintOutcome) -> tuple[str, str]:
    return outcome.status.value, outcome.reason


# ── by kind of memory ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("hint", "status", "reason"),
    [
        ("prefer_gpu", "no-effect", "device memory never leaves its GPU"),
        ("prefetch", "no-effect", "device memory never leaves its GPU"),
        ("read_mostly", "no-effect", "device memory never leaves its GPU"),
        ("prefer_cpu", "unsupported", "device memory never leaves its GPU, so it cannot move to the host"),
    ],
)
def test_a_hint_for_device_memory_has_no_effect_or_is_unsupported(hint: str, status: str, reason: str) -> None:
    driver = superchip()
    tensor = DriverMemory(driver, MemoryKind.DEVICE).tensor()
    outcome = getattr(ResidencyHints(driver), hint)(tensor)
    assert status_and_reason(outcome) == (status, reason)
    assert outcome.requested == AddressRange(tensor.data_ptr(), tensor.nbytes)
    assert outcome.applied_to == ()


def test_device_memory_cannot_move_to_another_gpu() -> None:
    driver = superchip()
    issuer = HintIssuer(driver, driver.devices()[0], 0, lambda: None)
    predicted = issuer.predict_outcome(MemoryKind.DEVICE, HintRequest(HintVerb.PREFETCH, GpuLocation(1)), gpu=0)
    assert predicted is not None
    assert predicted.reason.endswith("it cannot move to another GPU")


@pytest.mark.parametrize(
    ("hint", "is_applied"),
    [
        ("prefer_cpu", lambda driver, span: driver.preferred_location(span) == HOST),
        ("prefer_gpu", lambda driver, span: driver.preferred_location(span) == GPU),
        (
            "prefetch",
            lambda driver, span: (
                driver.last_prefetch_location(span) == GPU and driver.resident_pages(span) == {GPU: 16}
            ),
        ),
        ("accessed_by", lambda driver, span: driver.accessed_by(span) == (GPU,)),
        ("read_mostly", lambda driver, span: driver.read_mostly(span)),
    ],
)
def test_hints_for_managed_memory_are_applied_and_read_back(
    hint: str, is_applied: Callable[[EmulatedSuperchip, AddressRange], bool]
) -> None:
    driver = superchip()
    memory = DriverMemory(driver, MemoryKind.MANAGED)
    outcome = getattr(ResidencyHints(driver), hint)(memory.tensor())
    assert status_and_reason(outcome) == ("applied", "read back as requested")
    assert outcome.applied_to == (memory.span,)
    assert is_applied(driver, memory.span)


def test_a_prefetch_to_the_host_moves_the_memory_there() -> None:
    driver = superchip()
    memory = DriverMemory(driver, MemoryKind.MANAGED)
    driver.touch(memory.span, GPU)
    assert ResidencyHints(driver).prefetch(memory.tensor(), "cpu").status is HintStatus.APPLIED
    assert driver.resident_pages(memory.span) == {HOST: 16}


class MisreportingSuperchip(EmulatedSuperchip):
    """A driver that accepts preferred locations and reads back another one."""

    reported_location: MemoryLocation | None = None

    def preferred_location(self, span: AddressRange) -> MemoryLocation | None:
        return self.reported_location


@pytest.mark.parametrize(
    ("says", "status"),
    [(HOST, "applied"), (HostNumaLocation(0), "applied"), (None, "applied-unverified"), (GPU, "error")],
)
def test_the_location_read_back_decides_between_applied_unverified_and_error(
    says: MemoryLocation | None, status: str
) -> None:
    driver = MisreportingSuperchip(superchip().machine, page_bytes=PAGE)
    driver.reported_location = says
    assert ResidencyHints(driver).prefer_cpu(DriverMemory(driver, MemoryKind.MANAGED).tensor()).status == status


def test_ordinary_memory_on_ats_is_prefetched_and_its_pages_are_located() -> None:
    driver, tensor = superchip(), host_tensor()
    outcome = ResidencyHints(driver).prefetch(tensor)
    assert status_and_reason(outcome) == ("applied", "the kernel finds its pages there")
    assert driver.resident_pages(AddressRange(tensor.data_ptr(), tensor.nbytes)) == {GPU: 16}


def test_a_prefetch_of_ordinary_memory_without_waiting_is_unverified() -> None:
    assert status_and_reason(ResidencyHints(superchip()).prefetch(host_tensor(), wait=False)) == (
        "applied-unverified",
        "started, and not waited for",
    )


class FixedNodesSuperchip(EmulatedSuperchip):
    """A machine whose kernel reports `nodes` for the first pages of a range."""

    nodes: tuple[int | None, ...] = ()

    def locate(self, addresses: list[int]) -> list[int | None]:  # type: ignore[override]
        return [*self.nodes, *super().locate(addresses)[len(self.nodes) :]]


@pytest.mark.parametrize(
    ("nodes", "status"),
    [
        ((), "applied"),
        ((None,), "applied-unverified"),
        ((None,) * 16, "applied-unverified"),
        ((0,), "applied-unverified"),
        ((0,) * 16, "no-effect"),
    ],
)
def test_the_nodes_that_the_kernel_reports_decide_the_status(nodes: tuple[int | None, ...], status: str) -> None:
    driver = FixedNodesSuperchip(superchip().machine, page_bytes=PAGE)
    driver.nodes = nodes
    assert ResidencyHints(driver).prefetch(host_tensor()).status == status


def test_a_preferred_location_of_ordinary_memory_is_unverified() -> None:
    outcome = ResidencyHints(superchip()).prefer_cpu(host_tensor())
    assert status_and_reason(outcome) == ("applied-unverified", "accepted by the driver, which does not report it")


@pytest.mark.parametrize("hint", ["accessed_by", "read_mostly"])
def test_advice_that_is_documented_to_do_nothing_on_ats_reports_no_effect(hint: str) -> None:
    driver = superchip()
    driver.inject_fault(InjectedFault("advise", "CUDA_ERROR_UNKNOWN", times=100))  # the driver must not be called
    outcome = getattr(ResidencyHints(driver), hint)(host_tensor())
    assert outcome.status is HintStatus.NO_EFFECT
    assert "documented to do nothing" in outcome.reason


@pytest.mark.parametrize("hint", ["prefer_cpu", "prefer_gpu", "prefetch"])
def test_ordinary_memory_that_the_gpu_cannot_read_is_unsupported(hint: str) -> None:
    outcome = getattr(ResidencyHints(superchip(CARD)), hint)(host_tensor())
    assert status_and_reason(outcome) == ("unsupported", "ordinary memory, which this GPU cannot read")


def test_a_hint_for_pinned_memory_has_no_effect() -> None:
    driver = superchip()
    issuer = HintIssuer(driver, driver.devices()[0], 0, lambda: None)
    for verb in HintVerb:
        for home in (GPU, HOST):
            predicted = issuer.predict_outcome(MemoryKind.PINNED, HintRequest(verb, home))
            assert predicted is not None
            assert status_and_reason(predicted) == ("no-effect", "pinned memory is locked in host memory")


def test_managed_memory_without_concurrent_access_accepts_no_hints() -> None:
    driver = superchip(replace(CARD, concurrent=False))
    outcome = ResidencyHints(driver).prefetch(DriverMemory(driver, MemoryKind.MANAGED).tensor())
    assert status_and_reason(outcome) == ("unsupported", "this GPU accepts no hints for managed memory")


def test_a_hint_on_a_one_pool_machine_has_no_effect() -> None:
    outcome = ResidencyHints(superchip(GB10)).prefetch(host_tensor())
    assert status_and_reason(outcome) == ("no-effect", "CPU and GPU share one pool of memory")


def test_without_a_driver_every_hint_is_unsupported_for_its_reason() -> None:
    hints = ResidencyHints(NotAvailable("no NVIDIA driver here"))
    for outcome in (
        hints.prefer_cpu(host_tensor(1)),
        hints.prefetch(torch.zeros(0)),
        hints.prefer_host_range(0, 1 << 20),
    ):
        assert status_and_reason(outcome) == ("unsupported", "no NVIDIA driver here")
    assert status_and_reason(ResidencyHints(superchip(), 3).prefer_gpu(torch.zeros(1))) == (
        "unsupported",
        "the driver has no GPU 3",
    )


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("verb", "name", "status"),
    [
        ("prefetch", "CUDA_ERROR_INVALID_VALUE", "refused"),
        ("prefetch", "CUDA_ERROR_NOT_SUPPORTED", "unsupported"),
        ("prefetch", "CUDA_ERROR_UNKNOWN", "error"),
        ("memory_kind_at", "CUDA_ERROR_UNKNOWN", "error"),
        ("free_bytes", "CUDA_ERROR_UNKNOWN", "error"),
        ("synchronize", "CUDA_ERROR_UNKNOWN", "error"),
        ("locate", "CUDA_ERROR_UNKNOWN", "error"),
    ],
)
def test_a_driver_error_is_reported_by_its_name(verb: str, name: str, status: str) -> None:
    driver = superchip()
    driver.inject_fault(InjectedFault(verb, name))
    outcome = ResidencyHints(driver).prefetch(host_tensor())
    assert status_and_reason(outcome) == (status, f"{verb}: {name}")


def test_ranges_applied_before_an_error_are_reported() -> None:
    driver = superchip()
    memory = DriverMemory(driver, MemoryKind.MANAGED)
    driver.inject_fault(InjectedFault("advise", "CUDA_ERROR_INVALID_VALUE", first=2))
    rows = memory.tensor().view(8, 2 * PAGE)[:, :PAGE]
    outcome = ResidencyHints(driver).prefer_gpu(rows)
    assert outcome.status is HintStatus.REFUSED
    assert outcome.applied_to == (AddressRange(memory.span.address, PAGE),)


def test_a_refused_hint_is_tried_again() -> None:
    driver, tensor = superchip(), host_tensor()
    hints = ResidencyHints(driver)
    driver.inject_fault(InjectedFault("prefetch", "CUDA_ERROR_INVALID_VALUE"))
    assert hints.prefetch(tensor).status is HintStatus.REFUSED
    assert hints.prefetch(tensor).status is HintStatus.APPLIED


@pytest.mark.parametrize(
    ("free", "status"), [(16 * PAGE + 4095, "refused"), (16 * PAGE + 4096, "applied"), (None, "applied")]
)
def test_a_prefetch_that_would_leave_too_little_free_memory_is_refused(free: int | None, status: str) -> None:
    driver = superchip()
    hints = ResidencyHints(driver, headroom_bytes=4096, free_bytes=lambda: free)
    outcome = hints.prefetch(host_tensor())
    assert outcome.status == status
    if status == "refused":
        assert outcome.reason == "too little GPU memory would stay free"
        assert outcome.applied_to == ()


def test_five_percent_of_the_gpu_stay_free_by_default() -> None:
    driver = superchip()
    driver.allocate(MemoryKind.DEVICE, driver.free_bytes(0) * 95 // 100)
    assert ResidencyHints(driver).prefetch(host_tensor(1)).status is HintStatus.REFUSED
    assert ResidencyHints(driver, headroom_bytes=0).prefetch(host_tensor(1)).status is HintStatus.APPLIED


# ── kinds of tensors ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_hint_covers_a_view_and_not_its_storage() -> None:
    driver, tensor = superchip(), host_tensor()
    outcome = ResidencyHints(driver).prefetch(tensor[3 * PAGE + 5 : 7 * PAGE])
    assert outcome.requested == AddressRange(tensor.data_ptr() + 3 * PAGE + 5, 4 * PAGE - 5)
    assert outcome.applied_to == (AddressRange(tensor.data_ptr() + 4 * PAGE, 3 * PAGE),)
    assert driver.resident_pages(AddressRange(tensor.data_ptr(), tensor.nbytes)) == {GPU: 3, HOST: 13}


def test_each_contiguous_piece_of_a_view_is_hinted_and_nothing_else() -> None:
    driver, tensor = superchip(), host_tensor()
    rows = tensor.view(4, 4 * PAGE)[:, : 2 * PAGE]
    outcome = ResidencyHints(driver).prefetch(rows)
    assert outcome.status is HintStatus.APPLIED
    assert [span.address - tensor.data_ptr() for span in outcome.applied_to] == [0, 4 * PAGE, 8 * PAGE, 12 * PAGE]
    assert driver.resident_pages(AddressRange(tensor.data_ptr(), tensor.nbytes)) == {GPU: 8, HOST: 8}


@pytest.mark.parametrize(
    ("make", "status", "reason"),
    [
        (lambda t: t[:0], "no-effect", "an empty tensor"),
        (lambda t: t[:100], "no-effect", f"smaller than a page of {KIB64}"),
        (lambda t: t[100 : PAGE + 200], "no-effect", f"it does not cover a whole page of {KIB64}"),
        (lambda t: t.view(-1, 64)[:, :32], "no-effect", f"it does not cover a whole page of {KIB64}"),
        (lambda t: t.to("meta"), "unsupported", "a tensor on the meta device has no memory"),
        (
            lambda t: t[:64].view(8, 8).to_sparse(),
            "unsupported",
            "a tensor of layout sparse_coo is not a single block of memory",
        ),
    ],
)
def test_tensors_that_cannot_be_hinted_have_a_reason(
    make: Callable[[torch.Tensor], torch.Tensor], status: str, reason: str
) -> None:
    hints, tensor = ResidencyHints(superchip()), make(host_tensor())
    for outcome in (hints.prefer_cpu(tensor), hints.prefer_gpu(tensor), hints.prefetch(tensor)):
        assert status_and_reason(outcome) == (status, reason)
        assert outcome.applied_to == ()


def test_a_view_in_thousands_of_large_pieces_is_not_hinted() -> None:
    driver = superchip()
    many = DriverMemory(driver, MemoryKind.MANAGED, pages=4200).tensor().view(2100, 2 * PAGE)[:, :PAGE]
    assert status_and_reason(ResidencyHints(driver).prefer_cpu(many)) == ("unsupported", "a view in too many pieces")


def test_the_components_of_a_quantised_weight_are_hinted() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(1024, 1024, bias=False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    outcome = ResidencyHints(superchip()).prefetch(linear.weight)
    assert outcome.requested is None
    assert 900_000 < sum(span.nbytes for span in outcome.applied_to) <= 1024 * 1024
    assert status_and_reason(outcome)[0] == "applied"


# ── batches, ranges and counts ────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_is_placed_by_the_policy_and_counted() -> None:
    driver = superchip()
    memory, hints = DriverMemory(driver, MemoryKind.MANAGED), ResidencyHints(driver)
    batch = {"latents": host_tensor(2), "text": {"mask": torch.zeros(3)}, "odd": memory.tensor()}
    assert hints.place_batch(batch) == {
        (HintStatus.UNVERIFIED, "started, and not waited for"): 1,
        (HintStatus.NO_EFFECT, f"smaller than a page of {KIB64}"): 1,
        (HintStatus.APPLIED, 'read back as requested (of kind "other")'): 1,
    }
    assert driver.resident_pages(memory.span) == {GPU: 16}


def test_the_forks_policy_prefers_the_host_for_latents_and_the_gpu_for_text() -> None:
    driver = superchip()
    latents, text = DriverMemory(driver, MemoryKind.MANAGED), DriverMemory(driver, MemoryKind.MANAGED)
    batch = {"latents": latents.tensor(), "prompt_embeds": [text.tensor()], "noise": host_tensor(1)}
    counts = ResidencyHints(driver, policy="forks").place_batch(batch)
    assert (driver.preferred_location(latents.span), driver.last_prefetch_location(latents.span)) == (HOST, None)
    assert (driver.preferred_location(text.span), driver.last_prefetch_location(text.span)) == (GPU, GPU)
    assert counts == {
        (HintStatus.APPLIED, "read back as requested"): 3,
        (HintStatus.NO_EFFECT, "the policy has no hint for noise"): 1,
    }


def test_whole_pages_of_a_mapped_range_prefer_host_memory() -> None:
    driver = superchip()
    memory = DriverMemory(driver, MemoryKind.MANAGED)
    outcome = ResidencyHints(driver).prefer_host_range(memory.span.address + 1, memory.span.nbytes - 1)
    inside = AddressRange(memory.span.address + PAGE, memory.span.nbytes - PAGE)
    assert (outcome.status, outcome.applied_to) == (HintStatus.APPLIED, (inside,))
    assert driver.preferred_location(inside) == HOST
    assert status_and_reason(ResidencyHints(driver).prefer_host_range(1, 100)) == (
        "no-effect",
        f"smaller than a page of {KIB64}",
    )


def test_a_tally_lists_the_most_frequent_outcome_first_and_sums_by_status() -> None:
    tally = HintTally()
    tally.add(HintOutcome(HintStatus.APPLIED, "read back as requested"))
    tally.add(Counter({(HintStatus.NO_EFFECT, "an empty tensor"): 1200}))
    tally.add(Counter({(HintStatus.NO_EFFECT, "small"): 3}))
    assert tally.lines() == [
        "no-effect: an empty tensor (1,200)",
        "no-effect: small (3)",
        "applied: read back as requested (1)",
    ]
    assert tally.by_status() == {"applied": 1, "no-effect": 1203}


def test_the_outcome_of_a_tensor_is_that_of_its_worst_part() -> None:
    good, bad = (
        HintOutcome(HintStatus.APPLIED, "fine", None, (AddressRange(0, 1),)),
        HintOutcome(HintStatus.REFUSED, "no"),
    )
    assert combine_outcomes([good]) is good
    assert status_and_reason(combine_outcomes([good, bad, good])) == ("refused", "for a part of it: no")
    assert combine_outcomes([good, good]) == HintOutcome(
        HintStatus.APPLIED, "fine", None, (AddressRange(0, 1), AddressRange(0, 1))
    )


def test_the_host_matches_each_of_its_nodes_and_a_node_only_itself() -> None:
    assert same_location(HOST, HostNumaLocation(3))
    assert not same_location(HostNumaLocation(3), HostNumaLocation(4))
    assert not same_location(HostNumaLocation(3), HOST)
    assert not same_location(HOST, GPU)
    assert not same_location(GPU, GpuLocation(1))


def test_the_pages_to_locate_are_sampled_evenly() -> None:
    assert page_addresses([AddressRange(0, 8), AddressRange(100, 4)], 4) == [0, 4, 100]
    assert page_addresses([AddressRange(0, 100)], 1, limit=10) == list(range(0, 100, 10))
