"""FolderSource: which files are samples, which captions belong to them, and which files are skipped and why."""

import json
import os
import time

import pytest

from supertuner.config.settings.data import CaptionSettings, DatasetSettings
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.sources import detect_source_format, open_source
from supertuner.data.sources.folder import FolderSource
from supertuner.data.staging.span_reader import read_captions
from tests.data.media_files import picture, write

JPEG = picture("jpeg", (8, 8))


def listing(root, limit=None, **captions):
    return FolderSource(root, MediaKind.IMAGE, CaptionSettings(**captions), limit).list_items()


def texts(root, several=False, **captions):
    """Key → captions, as staging reads them."""
    listed = listing(root, several=several, **captions)
    return {
        item.key: read_captions(item, listed.caption_syntax, CaptionSettings(several=several)) for item in listed.items
    }


def fingerprint(root, **captions):
    return b"\0".join(FolderSource(root, MediaKind.IMAGE, CaptionSettings(**captions), None).fingerprint_parts())


def test_keys_are_paths_without_extension_in_bytewise_order(tmp_path):
    write(tmp_path, {"b.jpg": JPEG, "a/z.png": JPEG, "a/é.webp": JPEG, "B.JPEG": JPEG, "a.jpg": JPEG})
    keys = [item.key for item in listing(tmp_path).items]
    assert keys == sorted(keys, key=str.encode) and set(keys) == {"b", "a/z", "a/é", "B", "a"}


def test_of_two_files_with_one_key_the_first_by_name_is_used_and_the_other_skipped(tmp_path):
    write(tmp_path, {"a.png": JPEG, "a.jpg": JPEG})
    listed = listing(tmp_path)
    assert [item.name for item in listed.items] == ["a.jpg"]
    assert [(skipped.file, "a.jpg is kept" in skipped.reason) for skipped in listed.skipped] == [("a.png", True)]


def test_notes_count_files_of_other_kinds_and_formats_and_hidden_files(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "v.mp4": b"x", "w.mkv": b"x", "t.gif": b"x", ".hidden.jpg": JPEG, "readme": b"x"})
    notes = "\n".join(listing(tmp_path).notes)
    assert "2 video files skipped: dataset_type is image" in notes
    assert "1 .gif file skipped" in notes and "1 hidden file skipped" in notes


def test_links_to_files_and_folders_are_followed_also_outside_the_root(tmp_path):
    write(tmp_path / "else", {"deep/x.jpg": JPEG, "y.jpg": JPEG})
    root = write(tmp_path / "root", {"a.jpg": JPEG})
    (root / "linked").symlink_to(tmp_path / "else" / "deep")
    (root / "y.jpg").symlink_to(tmp_path / "else" / "y.jpg")
    (tmp_path / "link-to-root").symlink_to(root)
    assert [item.key for item in listing(tmp_path / "link-to-root").items] == ["a", "linked/x", "y"]


def test_loops_of_links_end_and_each_folder_is_listed_once_under_its_real_name(tmp_path):
    root = write(tmp_path / "root", {"sub/a.jpg": JPEG})
    (root / "sub" / "up").symlink_to(root)
    (root / "again").symlink_to(root / "sub")
    listed = listing(root)
    assert [item.key for item in listed.items] == ["sub/a"]
    assert sum("already listed" in note for note in listed.notes) == 2


def test_empty_and_special_files_are_skipped_with_their_reason(tmp_path):
    write(tmp_path, {"good.jpg": JPEG, "empty.jpg": b""})
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "nowhere.jpg").symlink_to(tmp_path / "gone")
    (tmp_path / os.fsdecode(b"b\xff.jpg")).write_bytes(JPEG)
    listed = listing(tmp_path)
    assert [item.key for item in listed.items] == ["good"]
    assert dict(listed.skipped) == {
        "empty.jpg": "zero bytes",
        "pipe.jpg": "not a file but a named pipe",
        "nowhere.jpg": "a link that leads nowhere",
        "b\\udcff.jpg": "its name is not UTF-8; rename it",
    }


def test_circular_links_are_skipped_with_their_reason(tmp_path):
    write(tmp_path, {"good.jpg": JPEG, "bad_caption.jpg": JPEG})
    for name in ("circle.jpg", "folder", "bad_caption.txt"):
        (tmp_path / name).symlink_to(name)
    listed = listing(tmp_path)
    assert dict(listed.skipped) == {"circle.jpg": "unreadable: Too many levels of symbolic links"}
    assert "folder skipped: Too many levels of symbolic links" in listed.notes
    assert [item.key for item in listed.items] == ["bad_caption", "good"]
    with pytest.raises(BrokenMediaError, match="caption"):
        read_captions(listed.items[0], listed.caption_syntax, CaptionSettings())


def test_a_relative_folder_is_the_same_dataset_as_its_absolute_path(tmp_path, monkeypatch):
    write(tmp_path / "set", {"a.jpg": JPEG, "a.txt": "cat"})
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    assert fingerprint(Path("set")) == fingerprint(tmp_path / "set")
    assert texts(Path("set")) == {"a": ("cat",)}


def test_a_caption_file_is_one_caption_or_one_per_line(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "a.txt": "\ufefftwo words\n\nmore \n", "b.jpg": JPEG, "b.txt": "", "c.jpg": JPEG})
    assert texts(tmp_path) == {"a": ("two words\n\nmore",), "b": ("",), "c": ()}
    assert texts(tmp_path, several=True) == {"a": ("two words", "more"), "b": ("",), "c": ()}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32-be"])
def test_a_caption_in_another_encoding_is_refused_even_if_its_bytes_are_valid_utf8(tmp_path, encoding):
    write(tmp_path, {"a.jpg": JPEG, "a.txt": "cat".encode(encoding)})
    with pytest.raises(BrokenMediaError, match="UTF-8"):
        texts(tmp_path)


def test_a_caption_file_that_is_a_pipe_is_refused(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(BrokenMediaError, match="its caption file: not a readable regular file"):
        texts(tmp_path)


@pytest.mark.parametrize("state", ["{}", "{", '{"_data_files": [{"filename": "gone.arrow"}], "_split": null}'])
def test_a_damaged_hugging_face_dataset_is_refused(tmp_path, state):
    pytest.importorskip("datasets")
    write(tmp_path, {"state.json": state, "dataset_info.json": "{}"})
    source = open_source(DatasetSettings(id="set", instance_data_dir=tmp_path))
    with pytest.raises(SourceError, match="cannot be loaded as a Hugging Face dataset"):
        source.list_items()


def test_caption_files_may_have_another_extension_or_keep_that_of_the_image(tmp_path):
    write(
        tmp_path,
        {"a.jpg": JPEG, "a.caption": "one", "b.jpg": JPEG, "b.jpg.caption": "two", "c.caption": "without image"},
    )
    assert texts(tmp_path, extension=".caption") == {"a": ("one",), "b": ("two",)}
    assert any(
        "1 caption file skipped" in n and "c.caption" in n for n in listing(tmp_path, extension=".caption").notes
    )


def test_captions_from_file_names_a_constant_or_none(tmp_path):
    write(tmp_path, {"sub/a red cat.jpg": JPEG, "sub/a red cat.txt": "other"})
    assert texts(tmp_path, source="filename") == {"sub/a red cat": ("a red cat",)}
    assert texts(tmp_path, source="constant", constant="sks") == {"sub/a red cat": ("sks",)}
    assert texts(tmp_path, constant="sks") == {"sub/a red cat": ("sks",)}
    assert texts(tmp_path, source="none") == {"sub/a red cat": ()}


ROWS = [{"file_name": "a.jpg", "text": "one"}, {"file_name": "./b/c.jpg", "text": ["two", "three"]}]


def metadata(root, kind, rows):
    path = root / f"metadata.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    elif kind == "csv":
        flat = [{**row, "text": row["text"] if isinstance(row["text"], str) else row["text"][0]} for row in rows]
        path.write_text("file_name,text\n" + "".join(f'{r["file_name"]},"{r["text"]}"\n' for r in flat))
    else:
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        lists = [{**row, "text": [row["text"]] if isinstance(row["text"], str) else row["text"]} for row in rows]
        pq.write_table(pa.Table.from_pylist(lists), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_captions_from_a_metadata_file(tmp_path, kind):
    write(tmp_path, {"a.jpg": JPEG, "b/c.jpg": JPEG, "d.jpg": JPEG})
    metadata(tmp_path, kind, ROWS)
    assert texts(tmp_path) == {"a": ("one",), "b/c": ("two",) if kind == "csv" else ("two", "three"), "d": ()}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_metadata_file_in_another_folder_or_with_other_columns(tmp_path, kind):
    root = write(tmp_path / "set", {"a.jpg": JPEG})
    path = metadata(tmp_path, kind, ROWS)
    assert texts(root, metadata_file=path)["a"] == ("one",)
    with pytest.raises(
        SourceError, match=r"needs the columns 'path'.*it has 'file_name', 'text'.*captions\.file_column"
    ):
        texts(root, metadata_file=path, file_column="path")


def test_rows_without_a_file_or_with_a_path_outside_the_folder_are_reported(tmp_path):
    root = write(tmp_path / "set", {"a.jpg": JPEG})
    write(tmp_path, {"secret.jpg": JPEG})
    rows = [*ROWS, {"file_name": "../secret.jpg", "text": "x"}, {"file_name": "/etc/passwd", "text": "x"}]
    metadata(root, "jsonl", rows)
    listed = listing(root)
    assert [item.name for item in listed.items] == ["a.jpg"]
    notes = "\n".join(listed.notes)
    assert "1 metadata row skipped: no such file ('b/c.jpg')" in notes
    assert "2 metadata rows skipped: its path is outside the dataset's folder" in notes


def test_several_rows_of_one_file_are_several_captions(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    metadata(tmp_path, "jsonl", [{"file_name": "a.jpg", "text": t} for t in ("x", "y")])
    assert texts(tmp_path) == {"a": ("x", "y")}


def test_an_invalid_caption_in_a_metadata_file_skips_only_its_sample(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "b.jpg": JPEG, "c.jpg": JPEG})
    (tmp_path / "metadata.jsonl").write_bytes(
        b'{"file_name": "a.jpg", "text": "\xff"}\n{"file_name": "b.jpg", "text": 3}\n'
        b'{"file_name": "c.jpg", "text": "c"}'
    )
    listed = listing(tmp_path)
    assert [item.key for item in listed.items] == ["c"]
    assert dict(listed.skipped) == {"a.jpg": "caption is not UTF-8", "b.jpg": "caption is not a text but int"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.jsonl", b'{"file_name": "a.jpg", "text": "x"}\n{oops\n', "line 2: not JSON"),
        ("metadata.jsonl", b"[1]\n", "line 1: must be an object"),
        (
            "metadata.jsonl",
            b'{"file_name": null, "text": "x"}\n',
            "line 1: 'file_name' must be a file name, but is None",
        ),
        ("metadata.csv", b"file_name,text\na.jpg,one, two\n", "line 2: more cells than columns; quote"),
        ("metadata.csv", b'file_name,text\na.jpg,"one\n', "not CSV"),
        ("metadata.parquet", b"PAR1 not really", "not a readable parquet file"),
    ],
)
def test_a_malformed_metadata_file_is_refused_with_its_line(tmp_path, name, content, message):
    write(tmp_path, {"a.jpg": JPEG, name: content})
    with pytest.raises(SourceError, match=message):
        listing(tmp_path)


def test_a_missing_metadata_file_is_refused(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    with pytest.raises(SourceError, match=r"set captions\.metadata_file"):
        listing(tmp_path, source="metadata")


def test_a_limit_uses_the_first_keys(tmp_path):
    write(tmp_path, {f"{i}.jpg": JPEG for i in range(9)})
    assert [item.key for item in listing(tmp_path, limit=3).items] == ["0", "1", "2"]


def test_the_fingerprint_depends_on_files_captions_and_metadata_only(tmp_path):
    root = write(tmp_path / "set", {"a.jpg": JPEG, "a.txt": "one", "notes.md": "x"})
    seen = [fingerprint(root)]
    (root / "notes.md").write_text("changed")
    assert fingerprint(root) == seen[0]
    (root / "a.txt").write_text("longer")
    seen.append(fingerprint(root))
    os.utime(root / "a.jpg", (1, 1))
    seen.append(fingerprint(root))
    write(root, {"b.jpg": JPEG})
    seen.append(fingerprint(root))
    write(root, {"metadata.jsonl": '{"file_name": "a.jpg", "text": "x"}'})
    seen.append(fingerprint(root))
    os.utime(root / "metadata.jsonl", (1, 1))
    assert fingerprint(root) == seen[-1]
    write(root, {"metadata.jsonl": '{"file_name": "a.jpg", "text": "y"}'})
    seen.append(fingerprint(root))
    assert len(set(seen)) == len(seen)


def test_listing_ten_thousand_files_takes_less_than_two_seconds(tmp_path):
    for i in range(10_000):
        os.close(os.open(tmp_path / f"{i}.jpg", os.O_CREAT | os.O_WRONLY))
        os.truncate(tmp_path / f"{i}.jpg", 1)
    began = time.process_time()
    assert len(listing(tmp_path).items) == 10_000
    assert time.process_time() - began < 2


def test_the_format_of_a_folder_is_detected(tmp_path):
    write(tmp_path, {"pics/a.jpg": JPEG, "shards/0.tar": b"x", "hf/state.json": "{}", "hf/dataset_info.json": "{}"})
    formats = [detect_source_format(tmp_path / name) for name in ("pics", "shards", "shards/0.tar", "hf")]
    assert formats == ["folder", "webdataset", "webdataset", "huggingface"]


def test_a_missing_folder_is_refused_with_the_setting(tmp_path):
    with pytest.raises(SourceError, match=r"datasets\[cats\]\.instance_data_dir: .* does not exist"):
        open_source(DatasetSettings(id="cats", instance_data_dir=tmp_path / "no"))


def test_the_unused_one_of_two_caption_files_causes_a_note(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "a.txt": "short", "a.jpg.txt": "long", "b.jpg": JPEG, "b.jpg.txt": "fine"})
    assert texts(tmp_path) == {"a": ("short",), "b": ("fine",)}
    (note,) = listing(tmp_path).notes
    assert note.startswith("1 caption file skipped") and "'a.jpg.txt'" in note


def test_the_unused_one_of_two_metadata_files_causes_a_note(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    metadata(tmp_path, "csv", [{"file_name": "a.jpg", "text": "from csv"}])
    metadata(tmp_path, "jsonl", [{"file_name": "a.jpg", "text": "from jsonl"}])
    assert texts(tmp_path) == {"a": ("from jsonl",)}
    assert listing(tmp_path).notes == ("metadata.csv is not read: captions come from metadata.jsonl",)
