"""Units added in bulk equal other units: the same bytes on disk, visible after the flush and not before."""

from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.arena.format import RecordKind, pack_kind
from supertuner.arena.home import ArenaHome
from supertuner.arena.journal import JournalField, pack_entry, single_field_packer
from supertuner.arena.writer import BulkUnitWriter
from supertuner.core.bulk_io import BulkReader, find_native_library


@given(st.binary(min_size=1, max_size=300), *[st.integers(0, 2**63) for _ in range(4)])
def test_the_single_field_packer_writes_the_same_bytes_as_pack_entry(key, position, offset, nbytes, checksum):
    kind = pack_kind(RecordKind("uint8", None))
    general = pack_entry(position, key, [JournalField(b"media", kind, offset, nbytes, nbytes, checksum)])
    assert single_field_packer(b"media", kind)(position, key, offset, nbytes, checksum) == general


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=200_000)), max_size=30))
def test_bulk_and_single_units_can_alternate_in_one_segment(tmp_path_factory, units):
    home = ArenaHome(tmp_path_factory.mktemp("home"))
    with home.build("x") as build:
        writer = build.open_writer()
        buffer = BulkReader(200_000, find_native_library())
        bulk = BulkUnitWriter(writer, "media", buffer)
        for number, (in_bulk, content) in enumerate(units):
            if in_bulk:
                buffer.view[: len(content)] = content
                bulk.add(f"{number:03d}", 0, len(content))
                bulk.flush()
            else:
                with writer.begin(f"{number:03d}") as unit:
                    unit.put("media", content)
        build.seal({})
    with home.attach("x", verify="always") as reader:
        assert [bytes(reader.view(i)) for i in range(len(reader))] == [content for _, content in units]
        reader.verify()


def test_a_reader_sees_units_added_in_bulk_after_the_flush_and_not_before(tmp_path):
    home = ArenaHome(tmp_path / "home")
    with home.build("x") as build:
        buffer = BulkReader(4096, find_native_library())
        bulk = BulkUnitWriter(build.open_writer(), "media", buffer)
        buffer.view[:2] = b"12"
        bulk.add("a", 0, 1)
        bulk.add("b", 1, 1)
        assert build.committed_keys() == frozenset()
        bulk.flush()
        assert build.committed_keys() == {"a", "b"}
        build.seal({})
    with home.attach("x") as reader:
        assert [bytes(reader.view(i)) for i in range(2)] == [b"1", b"2"]
