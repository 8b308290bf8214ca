"""A hint covers whole pages that hold only bytes of the view, checked against a brute-force set of bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.memory.driver import AddressRange
from supertuner.memory.hints.page_ranges import (
    NoAddress,
    StridedLayout,
    TooManyPieces,
    contiguous_pieces,
    plain_parts,
    strided_layout,
    whole_pages,
    whole_pages_inside,
)

layouts = st.integers(0, 3).flatmap(
    lambda dimensions: st.builds(
        StridedLayout,
        address=st.integers(0, 200),
        itemsize=st.sampled_from([1, 2, 4, 8]),
        shape=st.tuples(*[st.integers(0, 6)] * dimensions),
        strides=st.tuples(*[st.integers(0, 40)] * dimensions),
    )
)


def bytes_of(layout: StridedLayout) -> set[int]:
    """Every byte of every element."""
    found = set()
    for index in itertools.product(*map(range, layout.shape)):
        at = layout.address + layout.itemsize * sum(i * s for i, s in zip(index, layout.strides, strict=True))
        found.update(range(at, at + layout.itemsize))
    return found


def bytes_in(spans: tuple[AddressRange, ...]) -> set[int]:
    return {address for span in spans for address in range(span.address, span.end)}


def pages_inside(owned: set[int], page: int) -> set[int]:
    """The bytes of all pages that are completely owned."""
    candidates = {address // page for address in owned}
    whole = [p for p in candidates if owned.issuperset(range(p * page, (p + 1) * page))]
    return {address for p in whole for address in range(p * page, (p + 1) * page)}


@given(layouts)
def test_the_pieces_of_a_view_are_its_bytes_in_order_and_disjoint(layout: StridedLayout) -> None:
    found = contiguous_pieces(layout)
    assert not isinstance(found, TooManyPieces)
    assert bytes_in(found) == bytes_of(layout)
    assert all(one.end < other.address for one, other in itertools.pairwise(found))


@given(layouts, st.sampled_from([1, 4, 16, 64]))
def test_whole_pages_are_exactly_the_pages_that_belong_to_the_view_alone(layout: StridedLayout, page: int) -> None:
    found = whole_pages(layout, page)
    assert not isinstance(found, TooManyPieces)
    assert bytes_in(found) == pages_inside(bytes_of(layout), page)
    assert all(span.address % page == 0 and span.nbytes % page == 0 for span in found)


@given(layouts, st.sampled_from([4, 16, 64]), st.integers(1, 5))
def test_a_view_in_too_many_pieces_never_covers_other_memory(layout: StridedLayout, page: int, most: int) -> None:
    found = whole_pages(layout, page, most)
    if not isinstance(found, TooManyPieces):
        assert bytes_in(found) <= pages_inside(bytes_of(layout), page)


@given(layouts)
def test_the_requested_range_runs_from_the_first_byte_to_the_last(layout: StridedLayout) -> None:
    owned, asked = bytes_of(layout), layout.span
    assert asked == (
        AddressRange(min(owned), max(owned) + 1 - min(owned)) if owned else AddressRange(layout.address, 0)
    )


@pytest.mark.parametrize(
    ("make", "pages"),
    [
        (lambda base: base, 64),
        (lambda base: base[16:48], 32),
        (lambda base: base.t(), 64),
        (lambda base: base[::2], 32),
        (lambda base: base.view(64, 2, 512)[:, 0], 0),
        (lambda base: base[:, :1000], 0),
        (lambda base: base[:0], 0),
        (lambda base: base[0, 0], 0),
        (lambda base: base[:1].expand(100, 1024), 1),
        (lambda base: base.flatten().unfold(0, 2048, 1024), 64),
        (lambda base: base.view(torch.int16)[:, :2048], 64),
    ],
)
def test_views_of_one_storage_cover_their_own_pages(make: object, pages: int) -> None:
    """Rows of one page each, in a page-aligned storage."""
    memory = torch.zeros(65 * 4096, dtype=torch.uint8)
    begin = -memory.data_ptr() % 4096
    base = memory[begin : begin + 64 * 4096].view(torch.float32).view(64, 1024)
    found = whole_pages(strided_layout(make(base)), 4096)  # type: ignore[operator]
    assert not isinstance(found, TooManyPieces)
    assert sum(span.nbytes for span in found) == pages * 4096


def test_thousands_of_large_rows_are_too_many_pieces_and_thousands_of_small_rows_have_no_whole_page() -> None:
    large = StridedLayout(0, 4, (5000, 4096), (8192, 1))
    assert whole_pages(large, 4096) == TooManyPieces(5000)
    assert whole_pages(StridedLayout(0, 4, (50_000, 8), (4096, 1)), 4096) == ()


def test_ranges_are_rounded_inward_to_pages() -> None:
    assert whole_pages_inside((AddressRange(1, 10), AddressRange(13, 20)), 4) == (
        AddressRange(4, 4),
        AddressRange(16, 16),
    )


def test_tensors_without_memory_have_a_reason() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4)
    cases = {
        "a fake tensor has no memory": fake,
        "a tensor on the meta device has no memory": torch.zeros(4, device="meta"),
        "a tensor of layout sparse_coo is not a single block of memory": torch.eye(4).to_sparse(),
        "this tensor has no memory": torch.nn.UninitializedParameter(),
    }
    for reason, tensor in cases.items():
        assert plain_parts(tensor) == NoAddress(reason)
    for wrong in ("latents", None, [fake]):
        expected = NoAddress(f"{type(wrong).__name__} is not a tensor; use the batch functions for a batch")
        assert plain_parts(wrong) == expected  # type: ignore[arg-type]


def test_a_vmap_wrapper_has_no_memory() -> None:
    seen = []
    torch.vmap(lambda row: (seen.append(plain_parts(row)), row)[1])(torch.zeros(2, 3))
    assert seen == [NoAddress("this tensor has no memory")]


def test_a_quantised_tensor_consists_of_its_inner_tensors() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(64, 64, bias=False)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    parts = plain_parts(linear.weight)
    assert isinstance(parts, tuple)
    assert {part.dtype for part in parts} >= {torch.int8}
    assert all(type(part) is torch.Tensor and part.data_ptr() for part in parts)


def test_parameters_and_views_of_them_are_plain_tensors() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8))
    assert plain_parts(parameter) == (parameter,)
    assert strided_layout(parameter[2:]).address == parameter.data_ptr() + 8
