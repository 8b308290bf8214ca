"""Units added in bulk are units like any others: same bytes on disk, seen after the flush and not before."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.arena.bulk import Bulk
from supertuner.arena.format import Kind, pack_kind
from supertuner.arena.home import Home
from supertuner.arena.journal import Placed, one_field_packer, pack_entry


@given(st.binary(min_size=1, max_size=300), *[st.integers(0, 2**63) for _ in range(4)])
def test_the_quick_packer_writes_what_the_general_one_writes(key, position, offset, nbytes, checksum):
    kind = pack_kind(Kind("uint8", None))
    general = pack_entry(position, key, [Placed(b"media", kind, offset, nbytes, nbytes, checksum)])
    assert one_field_packer(b"media", kind)(position, key, offset, nbytes, checksum) == general


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=200_000)), max_size=30))
def test_bulk_and_single_units_can_take_turns_in_one_segment(tmp_path_factory, units):
    home = Home(tmp_path_factory.mktemp("home"))
    with home.build("x") as build:
        writer = build.writer()
        bulk = Bulk(writer, "media")
        for number, (in_bulk, content) in enumerate(units):
            if in_bulk:
                bulk.add(f"{number:03d}", memoryview(content))
            else:
                bulk.flush()
                with writer.begin(f"{number:03d}") as unit:
                    unit.put("media", content)
        bulk.flush()
        build.seal({})
    with home.attach("x", verify="always") as reader:
        assert [bytes(reader.view(i)) for i in range(len(reader))] == [content for _, content in units]
        reader.verify()


def test_a_reader_sees_units_added_in_bulk_after_the_flush_and_not_before(tmp_path):
    home = Home(tmp_path / "home")
    with home.build("x") as build:
        bulk = Bulk(build.writer(), "media")
        bulk.add("a", memoryview(b"1"))
        assert build.committed() == frozenset()
        bulk.flush()
        assert build.committed() == {"a"}
        build.seal({})
    with home.attach("x") as reader:
        assert np.array_equal(reader.array(0, "media"), np.frombuffer(b"1", np.uint8))
