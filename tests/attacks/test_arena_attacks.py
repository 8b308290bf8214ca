"""Maliciously changed arenas: always ArenaDamagedError with file and remedy; no crash, no large allocation."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from supertuner.arena import format as fmt
from supertuner.arena.home import ArenaHome
from supertuner.arena.index import _COUNTS, IndexCounts, index_sections
from supertuner.arena.journal import JournalField, pack_entry
from supertuner.core.errors import ArenaDamagedError
from tests.arena.arena_helpers import build, contents, fresh_home, units


@pytest.fixture
def home() -> Iterator[ArenaHome]:
    with fresh_home() as made:
        build(made, "a", units(12, seed=1), writers=2)
        yield made


def refused(home: ArenaHome, *, verify: bool = False) -> ArenaDamagedError:
    """The error for arena "a", raised by attaching, or by verifying at the latest. It allocates almost no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ArenaDamagedError) as raised:
            if verify:
                contents(home, "a")
            home.attach("a").close()
            pytest.fail("it was attached")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20, "a huge allocation"
    finally:
        tracemalloc.stop()
    assert str(home.path / "a") in str(raised.value), "the error names the file"
    assert "supertuner arena rm" in str(raised.value) or "manually" in str(raised.value), "the error names the remedy"
    assert home.list_arenas()[0].state == ("sealed" if verify else "damaged")
    return raised.value


def forge(home: ArenaHome, change: Callable[[dict[str, bytearray], IndexCounts], IndexCounts | None]) -> None:
    """Change the index's columns and counts, and recompute all its checksums."""
    path = home.path / "a" / "index"
    content = path.read_bytes()
    uuid, body = fmt.unpack_header(path, content, fmt.INDEX_MAGIC, fmt.INDEX_NBYTES)
    counts = IndexCounts(*_COUNTS.unpack_from(body))
    columns = {
        s.name: bytearray(content[s.begin : s.begin + s.dtype.itemsize * s.count]) for s in index_sections(counts)
    }
    counts = change(columns, counts) or counts
    rest, checksums = b"", []
    for name, column in columns.items():
        padded = bytes(column).ljust(fmt.round_up(len(column), 64), b"\0")
        assert name in {s.name for s in index_sections(counts)}
        checksums.append(xxhash.xxh3_64_intdigest(padded))
        rest += padded
    body = _COUNTS.pack(*counts) + struct.pack(f"<{len(checksums)}Q", *checksums)
    path.write_bytes(fmt.pack_header(fmt.INDEX_MAGIC, uuid, body, fmt.INDEX_NBYTES) + rest)


def u64(column: bytearray) -> np.ndarray:
    return np.frombuffer(column, "<u8")


def test_rewriting_the_index_without_a_change_is_accepted(home: ArenaHome) -> None:
    forge(home, lambda columns, counts: None)
    assert contents(home, "a") == units(12, seed=1)


@pytest.mark.parametrize("name", ["head", "index", "0000.data"])
def test_a_change_of_any_header_byte_is_found(home: ArenaHome, name: str) -> None:
    file = home.path / "a" / name
    content = file.read_bytes()
    header = {"head": fmt.HEAD_NBYTES, "index": fmt.INDEX_NBYTES, "0000.data": fmt.PAGE}[name]
    with file.open("r+b", buffering=0) as opened:
        for at in range(header):
            os.pwrite(opened.fileno(), bytes([content[at] ^ (1 << at % 8)]), at)
            with pytest.raises(ArenaDamagedError, match=name):
                home.attach("a").close()
            os.pwrite(opened.fileno(), content[at : at + 1], at)
    home.attach("a").close()


@pytest.mark.parametrize("name", ["head", "index", "0000.data", "0001.data", "0002.data"])
def test_a_file_truncated_or_extended_at_any_boundary_is_refused(home: ArenaHome, name: str) -> None:
    file = home.path / "a" / name
    content = file.read_bytes()
    edges = {0, 1, len(content), *range(0, len(content), 4096)}
    if name == "index":
        counts = IndexCounts(*_COUNTS.unpack_from(content, 32))
        edges |= {edge for section in index_sections(counts) for edge in (section.begin, section.end)}
    lengths = {edge + step for edge in edges for step in (-1, 0, 1)} - {len(content)}
    for length in sorted(n for n in lengths if 0 <= n <= len(content) + 1):
        os.truncate(file, length)
        with pytest.raises(ArenaDamagedError, match=name):
            home.attach("a").close()
        file.write_bytes(content)
    home.attach("a").close()


@pytest.mark.parametrize("name", ["head", "index", "0000.data"])
def test_a_missing_file_a_link_a_folder_or_a_pipe_is_refused(home: ArenaHome, name: str) -> None:
    file, kept = home.path / "a" / name, home.path / "a" / "kept"
    file.rename(kept)
    if name != "index":  # without an index the arena is not sealed
        assert "is missing" in str(refused(home))
    file.symlink_to("kept")
    assert "is a link" in str(refused(home))
    file.unlink()
    file.mkdir()
    assert "not a regular file" in str(refused(home))
    file.rmdir()
    os.mkfifo(file)
    assert "not a regular file" in str(refused(home))


def test_a_future_version_raises_an_error_with_the_supported_version(home: ArenaHome) -> None:
    for name in ("head", "index", "0001.data"):
        file = home.path / "a" / name
        content = file.read_bytes()
        file.write_bytes(content[:8] + struct.pack("<I", 7) + content[12:])
        text = str(refused(home))
        assert "version 7" in text and "reads version 1" in text and name in text
        file.write_bytes(content)


@pytest.mark.parametrize("garbage", [b"", b"x", b"\0" * 100_000, os.urandom(5000), b"STARindx" + b"\xff" * 10_000])
def test_an_index_of_garbage_is_refused(home: ArenaHome, garbage: bytes) -> None:
    (home.path / "a" / "index").write_bytes(garbage)
    refused(home)


def test_swapped_segments_are_refused(home: ArenaHome) -> None:
    first, second = home.path / "a" / "0000.data", home.path / "a" / "0001.data"
    first.rename(home.path / "a" / "x")
    second.rename(first)
    (home.path / "a" / "x").rename(second)
    assert "contains segment 1, but its name says segment 0" in str(refused(home))


@pytest.mark.parametrize("name", ["head", "index", "0000.data"])
def test_a_file_of_another_arena_is_refused(home: ArenaHome, name: str) -> None:
    build(home, "b", units(12, seed=1), writers=2)
    shutil.copyfile(home.path / "b" / name, home.path / "a" / name)
    refused(home)


def test_swapped_records_are_found(home: ArenaHome) -> None:
    file = home.path / "a" / "0001.data"  # the odd units, among them ones of 4096 and 70000 bytes
    content = bytearray(file.read_bytes())
    content[4096:8192], content[8192:12288] = content[8192:12288], content[4096:8192]
    file.write_bytes(content)
    refused(home, verify=True)


Change = Callable[[dict[str, bytearray], IndexCounts], IndexCounts | None]


def setting(column: str, at: int, value: int) -> Change:
    def change(columns: dict[str, bytearray], counts: IndexCounts) -> None:
        width = 4 if column in ("kind", "fields") else 8
        at_byte = (at % (len(columns[column]) // width)) * width
        columns[column][at_byte : at_byte + width] = value.to_bytes(width, "little")

    return change


def overlapping(columns: dict[str, bytearray], counts: IndexCounts) -> None:
    big = int(np.argmax(u64(columns["nbytes"])))
    u64(columns["nbytes"])[big - 1] = 65536 * 3
    u64(columns["raw_nbytes"])[big - 1] = 65536 * 3


def same_place(columns: dict[str, bytearray], counts: IndexCounts) -> None:
    u64(columns["offset"])[1] = u64(columns["offset"])[0]


FORGERIES: dict[str, Change] = {
    "offset beyond the end": setting("offset", 3, 1 << 40),
    "offset near 2^64": setting("offset", 3, (1 << 64) - 4096),
    "offset in the header": setting("offset", 0, 0),
    "offset unaligned": setting("offset", 0, 4097),
    "length beyond the end": setting("nbytes", 2, 1 << 40),
    "length of 2^64 - 1": setting("nbytes", 2, (1 << 64) - 1),
    "real length that is not the stored one": setting("raw_nbytes", 2, 5),
    "real length huge": setting("raw_nbytes", 2, 1 << 63),
    "records at the same place": same_place,
    "a kind that is not listed": setting("kind", 2, 99),
    "a record that is not there": setting("fields", 2, 5000),
    "keys beyond their heap": setting("key_end", -1, 1 << 50),
    "keys backwards": setting("key_end", 3, 0),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_wrong_index_with_valid_checksums_is_refused(home: ArenaHome, what: str) -> None:
    forge(home, FORGERIES[what])
    assert "index" in str(refused(home))


def test_overlapping_records_are_refused(home: ArenaHome) -> None:
    with home.build("b") as arena_build:
        writer = arena_build.open_writer()
        for key in ("k0", "k1", "k2"):
            with writer.begin(key) as unit:
                unit.put("media", bytes(65536))
        arena_build.seal({})
    home.remove("a")
    (home.path / "b").rename(home.path / "a")
    forge(home, overlapping)
    assert "over another record" in str(refused(home)) or "outside" in str(refused(home))


def test_a_large_record_that_is_not_aligned_is_refused(home: ArenaHome) -> None:
    home.remove("a")
    build(home, "a", {"k0": bytes(65536), "k1": b"1"}, writers=1)
    forge(home, setting("offset", 0, 65536 - 4096))
    assert "unaligned" in str(refused(home))


def test_a_dtype_that_does_not_divide_the_size_is_refused(home: ArenaHome) -> None:
    forge(home, lambda columns, counts: columns["kinds"].__setitem__(16, fmt.DTYPES["uint16"][0]))
    assert "which do not match" in str(refused(home))


def test_a_segment_listed_twice_is_refused(home: ArenaHome) -> None:
    home.remove("a")
    build(home, "a", {"k0": b"1", "k1": b"2"}, writers=2)
    forge(home, lambda columns, counts: columns["segments"].__setitem__(slice(24, 28), bytes(4)))
    assert "lists a segment twice" in str(refused(home))


def test_a_segment_of_another_kind_is_refused(home: ArenaHome) -> None:
    forge(home, lambda columns, counts: columns["segments"].__setitem__(4, fmt.TABLE_SEGMENT))
    message = str(refused(home))
    assert "has kind 0 " in message and "the index lists kind 1 " in message


def test_a_record_used_twice_is_found(home: ArenaHome) -> None:
    def change(columns: dict[str, bytearray], counts: IndexCounts) -> None:
        columns["fields"][0:4] = columns["fields"][4:8]

    forge(home, change)
    assert "is used 2 times instead of once" in str(refused(home, verify=True))


def test_keys_out_of_order_or_not_text_are_found(home: ArenaHome) -> None:
    original = (home.path / "a" / "index").read_bytes()
    for at, byte in ((0, 0xFF), (0, ord("z"))):
        forge(home, lambda columns, counts, at=at, byte=byte: columns["keys"].__setitem__(at, byte))  # type: ignore[misc]
        refused(home, verify=True)
        (home.path / "a" / "index").write_bytes(original)


@pytest.mark.parametrize("field", IndexCounts._fields)
@pytest.mark.parametrize("value", [(1 << 63) + 1, 1 << 40, 0])
def test_a_wrong_count_is_refused(home: ArenaHome, field: str, value: int) -> None:
    path = home.path / "a" / "index"
    content = path.read_bytes()
    uuid, body = fmt.unpack_header(path, content, fmt.INDEX_MAGIC, fmt.INDEX_NBYTES)
    counts = IndexCounts(*_COUNTS.unpack_from(body))._replace(**{field: value})
    body = _COUNTS.pack(*counts) + body[_COUNTS.size :].rstrip(b"\0")
    path.write_bytes(fmt.pack_header(fmt.INDEX_MAGIC, uuid, body, fmt.INDEX_NBYTES) + content[fmt.INDEX_NBYTES :])
    assert "index" in str(refused(home))


def with_info(info: bytes) -> Change:
    def change(columns: dict[str, bytearray], counts: IndexCounts) -> IndexCounts:
        columns["info"] = bytearray(info)
        return counts._replace(info_nbytes=len(info))

    return change


@pytest.mark.parametrize(
    "info",
    [
        b"",
        b"not JSON",
        b"\xff\xfe",
        b"[" * 100_000,
        b"9" * 10_000,
        b"null",
        b'{"meta": {}}',
        b'{"meta": {}, "fields": ["media"], "tables": {"lengths": "x"}}',
        b'{"meta": {}, "fields": ["media"], "tables": {"lengths": 5000}}',
        b'{"meta": {}, "fields": ["media"], "tables": {"lengths": -1}}',
        b'{"meta": {}, "fields": ["media"], "tables": {"lengths": true}}',
        b'{"meta": {}, "fields": ["media", "media"], "tables": {}}',
        b'{"meta": {}, "fields": [["media"]], "tables": {}}',
        b'{"meta": [], "fields": ["media"], "tables": {}}',
        b'{"meta": {"x": "' + b"y" * (5 << 20) + b'"}, "fields": ["media"], "tables": {}}',
    ],
    ids=lambda info: info[:40].decode("latin-1") + f" {len(info)}",
)
def test_a_description_that_is_too_large_or_malformed_is_refused(home: ArenaHome, info: bytes) -> None:
    forge(home, with_info(info))
    assert "index" in str(refused(home))


@pytest.mark.parametrize(
    ("at", "byte"), [(0, 0), (0, 0xFF), (16, 0), (16, 200), (17, 9), (17, 2), (18, 2), (18, 0), (20, 1), (24, 1)]
)
def test_an_impossible_record_kind_is_refused(home: ArenaHome, at: int, byte: int) -> None:
    forge(home, lambda columns, counts: columns["kinds"].__setitem__(at, byte))
    assert "index" in str(refused(home))


@pytest.mark.parametrize("number", [0, 5, 1 << 31])
def test_missing_segments_are_refused(home: ArenaHome, number: int) -> None:
    forge(home, lambda columns, counts: columns["segments"].__setitem__(slice(24, 28), number.to_bytes(4, "little")))
    refused(home)


@pytest.mark.parametrize("nbytes", [0, 4096, 1 << 40, (1 << 64) - 1])
def test_a_segment_of_another_length_is_refused(home: ArenaHome, nbytes: int) -> None:
    forge(home, lambda columns, counts: columns["segments"].__setitem__(slice(16, 24), nbytes.to_bytes(8, "little")))
    refused(home)


def bad_entries() -> dict[str, bytes]:
    kind = fmt.pack_kind(fmt.RecordKind("uint8", None))
    at = fmt.JOURNAL_NBYTES
    place = dict(name=b"media", kind=kind, offset=4096, nbytes=10, raw_nbytes=10, checksum=0)
    return {
        "beyond the data": pack_entry(at, b"k", [JournalField(**{**place, "offset": 1 << 40})]),
        "unaligned": pack_entry(at, b"k", [JournalField(**{**place, "offset": 4100})]),
        "unknown kind": pack_entry(at, b"k", [JournalField(**{**place, "kind": b"\xff" * 88})]),
        "name that is not text": pack_entry(at, b"k", [JournalField(**{**place, "name": b"\xff"})]),
        "over another": pack_entry(at, b"k", [JournalField(**place), JournalField(**{**place, "name": b"b"})]),
        "no key": pack_entry(at, b"", [JournalField(**place)]),
    }


@pytest.mark.parametrize("what", bad_entries())
def test_a_wrong_journal_is_refused_by_sealing(home: ArenaHome, what: str) -> None:
    with home.build("b") as arena_build:
        writer = arena_build.open_writer()
        writer.begin("x").put("media", b"0123456789")
        with (home.path / "b" / "0000.journal").open("ab") as journal:
            journal.write(bad_entries()[what])
        writer._open_unit = None
        with pytest.raises(ArenaDamagedError):
            arena_build.seal({})


@pytest.mark.parametrize("tail", [b"\0", b"\xff" * 16, struct.pack("<QQ", 1 << 62, 0), pack_entry(128, b"k", [])[:-1]])
def test_a_torn_tail_of_a_journal_is_ignored(home: ArenaHome, tail: bytes) -> None:
    with home.build("b", resume=True) as arena_build, arena_build.open_writer().begin("x") as unit:
        unit.put("media", b"1")
    with (home.path / "b" / "0000.journal").open("ab") as journal:
        journal.write(tail)
    with home.build("b", resume=True) as arena_build:
        assert arena_build.committed_keys() == {"x"}
        arena_build.seal({})
    assert contents(home, "b") == {"x": b"1"}


def test_sealing_finds_a_committed_unit_that_is_missing_from_a_journal(home: ArenaHome) -> None:
    with home.build("b") as arena_build:
        writer = arena_build.open_writer()
        for key in ("k0", "k1"):
            with writer.begin(key) as unit:
                unit.put("media", b"1")
        file = home.path / "b" / "0000.journal"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        with pytest.raises(ArenaDamagedError, match=r"0000\.journal: is not readable after 1 units"):
            arena_build.seal({})
        os.truncate(file, len(content) - 5)
        with pytest.raises(ArenaDamagedError, match=r"0000\.journal: is not readable after 1 units"):
            arena_build.seal({})


def test_links_in_a_build_are_not_written_through(home: ArenaHome, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    with home.build("b") as arena_build:
        (home.path / "b" / "0000.journal").symlink_to(precious)
        (home.path / "b" / "index.tmp").symlink_to(precious)
        with arena_build.open_writer().begin("k") as unit:
            unit.put("media", b"1" * 5000)
        (home.path / "b" / "0000.journal").unlink()
        arena_build.seal({})
    assert precious.read_text() == "precious"
    assert contents(home, "b") == {"k": b"1" * 5000}


def test_meta_is_never_executed(home: ArenaHome) -> None:
    forge(
        home,
        with_info(
            json.dumps({"meta": {"__class__": "os.system"}, "fields": ["media"], "tables": {"lengths": 0}}).encode()
        ),
    )
    with home.attach("a") as reader:
        assert reader.meta == {"__class__": "os.system"}
