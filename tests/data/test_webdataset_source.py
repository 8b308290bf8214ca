"""WebDatasetSource groups members as the webdataset library does, and skips hostile members with a reason."""

import io
import pickle
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.config.settings.data import CaptionSettings
from supertuner.core.types import MediaKind
from supertuner.data.sources.listing import FileSpan
from supertuner.data.sources.tar_index import iter_tar_members
from supertuner.data.sources.webdataset import WebDatasetSource
from supertuner.data.staging.span_reader import read_captions, read_span
from tests.data.media_files import picture, tar

JPEG = picture("jpeg", (8, 8))


def listing(path, limit=None, **captions):
    return WebDatasetSource(path, MediaKind.IMAGE, CaptionSettings(**captions), limit).list_items()


def texts(path, **captions):
    listed = listing(path, **captions)
    return {i.key: read_captions(i, listed.caption_syntax, CaptionSettings()) for i in listed.items}


def indexed(path):
    with path.open("rb") as file:
        return list(iter_tar_members(file.fileno()))


def test_members_with_equal_names_up_to_the_first_dot_are_one_sample(tmp_path):
    other = picture("png", (9, 9))
    path = tar(
        tmp_path / "s.tar", {"d.x/a.jpg": JPEG, "d.x/a.txt": "one", "b.left.png": other, "b.txt": "two", "b.cls": "3"}
    )
    assert texts(path) == {"s/b": ("two",), "s/d.x/a": ("one",)}
    listed = listing(path)
    assert {i.key: bytes(read_span(i.media)) for i in listed.items} == {"s/b": other, "s/d.x/a": JPEG}
    assert any(".cls member" in note for note in listed.notes)


def test_captions_from_json_members_or_another_extension(tmp_path):
    path = tar(tmp_path / "s.tar", {"a.jpg": JPEG, "a.json": '{"text": ["x", "y"]}', "a.cls": "7", "b.jpg": JPEG})
    assert texts(path) == {"s/a": ("x", "y"), "s/b": ()}
    assert texts(path, extension=".cls") == {"s/a": ("7",), "s/b": ()}


def test_shards_of_a_folder_may_use_the_same_names(tmp_path):
    for shard in "01":
        tar(tmp_path / f"{shard}.tar", {"a.jpg": JPEG, "a.txt": shard})
    assert texts(tmp_path) == {"0/a": ("0",), "1/a": ("1",)}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_every_tar_format_gives_the_members_that_tarfile_finds(tmp_path, format):
    deep = "/".join(["directory"] * (9 if format == tarfile.USTAR_FORMAT else 40))
    path = tar(tmp_path / "s.tar", {f"{deep}/ünï.jpg": JPEG, "b.jpg": b"x" * 1025, "c.jpg": b""}, format)
    with tarfile.open(path) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive]
    assert [(m.name, m.offset, m.nbytes) for m in indexed(path)] == expected


def test_outside_paths_links_and_devices_are_skipped(tmp_path):
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in [
            ("../up.jpg", tarfile.REGTYPE),
            ("/abs.jpg", tarfile.REGTYPE),
            ("link.jpg", tarfile.SYMTYPE),
            ("hard.jpg", tarfile.LNKTYPE),
            ("dev.jpg", tarfile.CHRTYPE),
            ("pipe.jpg", tarfile.FIFOTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            info.size = len(JPEG) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(JPEG))
        info = tarfile.TarInfo("good.jpg")
        info.size = len(JPEG)
        archive.addfile(info, io.BytesIO(JPEG))
    listed = listing(path)
    assert [item.key for item in listed.items] == ["s/good"]
    assert len(listed.skipped) == 6 and all(skipped.reason for skipped in listed.skipped)


def test_a_truncated_shard_keeps_its_complete_members(tmp_path):
    path = tar(tmp_path / "s.tar", {"a.jpg": JPEG, "b.jpg": b"x" * 100_000})
    path.write_bytes(path.read_bytes()[:50_000])
    listed = listing(path)
    assert [item.key for item in listed.items] == ["s/a"]
    assert [skipped.reason for skipped in listed.skipped] == [
        "the archive is truncated: it ends inside 'b.jpg'; the rest of the archive is not read"
    ]


@pytest.mark.parametrize("size", [b"77777777777\0", b"\x80" + b"\xff" * 11])
def test_a_huge_stated_size_is_refused_without_allocation(tmp_path, size):
    content = bytearray(tar(tmp_path / "s.tar", {"a.jpg": JPEG}, tarfile.USTAR_FORMAT).read_bytes())
    content[124:136] = size
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    (tmp_path / "s.tar").write_bytes(content)
    listed = listing(tmp_path / "s.tar")
    assert not listed.items and "truncated" in listed.skipped[0].reason


def test_a_file_that_is_not_a_tar_is_skipped_by_its_name(tmp_path):
    path = tmp_path / "s.tar"
    path.write_bytes(b"hello" * 500)
    assert listing(path).skipped == (("s.tar", "no tar header at byte 0"),)
    path.write_bytes(b"")
    assert listing(path).skipped == (("s.tar", "zero bytes"),)


def test_pickles_in_a_shard_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    listed = texts(
        tar(tmp_path / "s.tar", {"a.jpg": JPEG, "a.pyd": pickle.dumps(Bomb()), "a.pth": pickle.dumps(Bomb())})
    )
    assert listed == {"s/a": ()} and not (tmp_path / "exploded").exists()


def test_a_limit_reads_only_the_first_shards(tmp_path):
    for shard in "012":
        tar(tmp_path / f"{shard}.tar", {"a.jpg": JPEG, "b.jpg": JPEG})
    assert [item.key for item in listing(tmp_path, limit=3).items] == ["0/a", "0/b", "1/a"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_shard_never_gives_a_span_outside_the_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("t") / "s.tar"
    content = bytearray(tar(path, {"a" * 120 + ".jpg": JPEG, "b.jpg": JPEG, "b.txt": "x"}).read_bytes())
    for _ in range(data.draw(st.integers(1, 10))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    size = path.stat().st_size
    for item in listing(path).items:
        assert isinstance(item.media, FileSpan)
        assert item.media.offset >= 0 and item.media.offset + item.media.nbytes <= size
