"""Which files of a folder are samples, which captions are theirs, and what is left out and why."""

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
    """Captions by key, as staging will read them."""
    found = listing(root, several=several, **captions)
    return {item.key: read_captions(item, found.caption_syntax, "text", one_per_line=several) for item in found.items}


def identity(root, **captions):
    return b"\0".join(FolderSource(root, MediaKind.IMAGE, CaptionSettings(**captions), None).fingerprint_parts())


def test_keys_are_paths_without_endings_in_bytewise_order(tmp_path):
    write(tmp_path, {"b.jpg": JPEG, "a/z.png": JPEG, "a/é.webp": JPEG, "B.JPEG": JPEG, "a.jpg": JPEG})
    keys = [item.key for item in listing(tmp_path).items]
    assert keys == sorted(keys, key=str.encode) and set(keys) == {"b", "a/z", "a/é", "B", "a"}


def test_of_two_files_with_one_key_the_first_by_name_is_kept_and_the_other_is_named(tmp_path):
    write(tmp_path, {"a.png": JPEG, "a.jpg": JPEG})
    found = listing(tmp_path)
    assert [item.name for item in found.items] == ["a.jpg"]
    assert [(left.file, "a.jpg is kept" in left.reason) for left in found.skipped] == [("a.png", True)]


def test_other_kinds_formats_and_hidden_files_are_counted_not_lost_in_silence(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "v.mp4": b"x", "w.mkv": b"x", "t.gif": b"x", ".hidden.jpg": JPEG, "readme": b"x"})
    notes = "\n".join(listing(tmp_path).notes)
    assert "2 video files left out: dataset_type is image" in notes
    assert "1 .gif file left out" in notes and "1 hidden file left out" in notes


def test_links_to_files_folders_and_the_root_are_followed_even_outside(tmp_path):
    write(tmp_path / "else", {"deep/x.jpg": JPEG, "y.jpg": JPEG})
    root = write(tmp_path / "root", {"a.jpg": JPEG})
    (root / "linked").symlink_to(tmp_path / "else" / "deep")
    (root / "y.jpg").symlink_to(tmp_path / "else" / "y.jpg")
    (tmp_path / "link-to-root").symlink_to(root)
    assert [item.key for item in listing(tmp_path / "link-to-root").items] == ["a", "linked/x", "y"]


def test_loops_of_links_end_and_each_folder_is_listed_once_under_its_own_name(tmp_path):
    root = write(tmp_path / "root", {"sub/a.jpg": JPEG})
    (root / "sub" / "up").symlink_to(root)
    (root / "again").symlink_to(root / "sub")
    found = listing(root)
    assert [item.key for item in found.items] == ["sub/a"]
    assert sum("already listed" in note for note in found.notes) == 2


def test_what_is_not_a_file_with_bytes_is_left_out_with_its_reason(tmp_path):
    write(tmp_path, {"good.jpg": JPEG, "empty.jpg": b""})
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "nowhere.jpg").symlink_to(tmp_path / "gone")
    (tmp_path / os.fsdecode(b"b\xff.jpg")).write_bytes(JPEG)
    found = listing(tmp_path)
    assert [item.key for item in found.items] == ["good"]
    assert dict(found.skipped) == {
        "empty.jpg": "zero bytes",
        "pipe.jpg": "not a file but a named pipe",
        "nowhere.jpg": "a link that leads nowhere",
        "b\\udcff.jpg": "its name is not UTF-8; rename it",
    }


def test_links_in_a_circle_are_left_out_with_their_reason_whatever_their_name_promises(tmp_path):
    write(tmp_path, {"good.jpg": JPEG, "bad_caption.jpg": JPEG})
    for name in ("circle.jpg", "folder", "bad_caption.txt"):
        (tmp_path / name).symlink_to(name)
    found = listing(tmp_path)
    assert dict(found.skipped) == {"circle.jpg": "unreadable: Too many levels of symbolic links"}
    assert "folder left out: Too many levels of symbolic links" in found.notes
    assert [item.key for item in found.items] == ["bad_caption", "good"]
    with pytest.raises(BrokenMediaError, match="caption"):
        read_captions(found.items[0], found.caption_syntax, "text", one_per_line=False)


def test_a_relative_folder_is_the_same_dataset_as_its_absolute_path(tmp_path, monkeypatch):
    write(tmp_path / "set", {"a.jpg": JPEG, "a.txt": "cat"})
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    assert identity(Path("set")) == identity(tmp_path / "set")
    assert texts(Path("set")) == {"a": ("cat",)}


def test_sidecars_give_one_caption_or_one_per_line(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "a.txt": "\ufefftwo words\n\nmore \n", "b.jpg": JPEG, "b.txt": "", "c.jpg": JPEG})
    assert texts(tmp_path) == {"a": ("two words\n\nmore",), "b": ("",), "c": ()}
    assert texts(tmp_path, several=True) == {"a": ("two words", "more"), "b": ("",), "c": ()}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32-be"])
def test_a_caption_in_another_encoding_is_refused_also_where_its_bytes_happen_to_be_utf8(tmp_path, encoding):
    write(tmp_path, {"a.jpg": JPEG, "a.txt": "cat".encode(encoding)})
    with pytest.raises(BrokenMediaError, match="UTF-8"):
        texts(tmp_path)


def test_a_caption_that_is_a_pipe_is_said_to_be_no_file(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(BrokenMediaError, match="its caption file: not a file that can be read"):
        texts(tmp_path)


@pytest.mark.parametrize("state", ["{}", "{", '{"_data_files": [{"filename": "gone.arrow"}], "_split": null}'])
def test_a_damaged_hugging_face_dataset_is_an_error_that_names_it(tmp_path, state):
    pytest.importorskip("datasets")
    write(tmp_path, {"state.json": state, "dataset_info.json": "{}"})
    source = open_source(DatasetSettings(id="set", instance_data_dir=tmp_path))
    with pytest.raises(SourceError, match="cannot be loaded as a Hugging Face dataset"):
        source.list_items()


def test_sidecars_may_have_another_ending_or_keep_the_pictures(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "a.caption": "one", "b.jpg": JPEG, "b.jpg.caption": "two", "c.caption": "nobody's"})
    assert texts(tmp_path, extension=".caption") == {"a": ("one",), "b": ("two",)}
    assert any(
        "1 caption file left out" in n and "c.caption" in n for n in listing(tmp_path, extension=".caption").notes
    )


def test_filename_constant_and_none(tmp_path):
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
def test_a_metadata_file_elsewhere_with_other_columns(tmp_path, kind):
    root = write(tmp_path / "set", {"a.jpg": JPEG})
    path = metadata(tmp_path, kind, ROWS)
    assert texts(root, metadata_file=path)["a"] == ("one",)
    with pytest.raises(
        SourceError, match=r"needs the columns 'path'.*it has 'file_name', 'text'.*captions\.file_column"
    ):
        texts(root, metadata_file=path, file_column="path")


def test_rows_without_a_file_and_rows_that_lead_outside_are_reported_and_open_nothing(tmp_path):
    root = write(tmp_path / "set", {"a.jpg": JPEG})
    write(tmp_path, {"secret.jpg": JPEG})
    rows = [*ROWS, {"file_name": "../secret.jpg", "text": "x"}, {"file_name": "/etc/passwd", "text": "x"}]
    metadata(root, "jsonl", rows)
    found = listing(root)
    assert [item.name for item in found.items] == ["a.jpg"]
    notes = "\n".join(found.notes)
    assert "1 metadata row left out: no such file ('b/c.jpg')" in notes
    assert "2 metadata rows left out: its path leads out of the dataset's folder" in notes


def test_several_rows_of_one_file_are_several_captions(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    metadata(tmp_path, "jsonl", [{"file_name": "a.jpg", "text": t} for t in ("x", "y")])
    assert texts(tmp_path) == {"a": ("x", "y")}


def test_a_caption_in_a_table_that_is_not_utf8_or_not_text_sets_only_its_own_sample_aside(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "b.jpg": JPEG, "c.jpg": JPEG})
    (tmp_path / "metadata.jsonl").write_bytes(
        b'{"file_name": "a.jpg", "text": "\xff"}\n{"file_name": "b.jpg", "text": 3}\n'
        b'{"file_name": "c.jpg", "text": "c"}'
    )
    found = listing(tmp_path)
    assert [item.key for item in found.items] == ["c"]
    assert dict(found.skipped) == {"a.jpg": "caption is not UTF-8", "b.jpg": "caption is not text but int"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("metadata.jsonl", b'{"file_name": "a.jpg", "text": "x"}\n{oops\n', "line 2: not JSON"),
        ("metadata.jsonl", b"[1]\n", "line 1: must be an object"),
        (
            "metadata.jsonl",
            b'{"file_name": null, "text": "x"}\n',
            "line 1: 'file_name' must be a file's name and is None",
        ),
        ("metadata.csv", b"file_name,text\na.jpg,one, two\n", "line 2: more cells than columns; quote"),
        ("metadata.csv", b'file_name,text\na.jpg,"one\n', "not CSV"),
        ("metadata.parquet", b"PAR1 not really", "not a parquet file"),
    ],
)
def test_a_malformed_metadata_file_is_refused_with_its_place(tmp_path, name, content, says):
    write(tmp_path, {"a.jpg": JPEG, name: content})
    with pytest.raises(SourceError, match=says):
        listing(tmp_path)


def test_metadata_asked_for_and_not_there_is_an_error_with_the_setting_to_change(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    with pytest.raises(SourceError, match=r"set captions\.metadata_file"):
        listing(tmp_path, source="metadata")


def test_a_limit_takes_the_first_keys(tmp_path):
    write(tmp_path, {f"{i}.jpg": JPEG for i in range(9)})
    assert [item.key for item in listing(tmp_path, limit=3).items] == ["0", "1", "2"]


def test_identity_changes_with_files_captions_and_metadata_and_with_nothing_else(tmp_path):
    root = write(tmp_path / "set", {"a.jpg": JPEG, "a.txt": "one", "notes.md": "x"})
    seen = [identity(root)]
    (root / "notes.md").write_text("changed")
    assert identity(root) == seen[0]
    (root / "a.txt").write_text("longer")
    seen.append(identity(root))
    os.utime(root / "a.jpg", (1, 1))
    seen.append(identity(root))
    write(root, {"b.jpg": JPEG})
    seen.append(identity(root))
    write(root, {"metadata.jsonl": '{"file_name": "a.jpg", "text": "x"}'})
    seen.append(identity(root))
    os.utime(root / "metadata.jsonl", (1, 1))
    assert identity(root) == seen[-1]
    write(root, {"metadata.jsonl": '{"file_name": "a.jpg", "text": "y"}'})
    seen.append(identity(root))
    assert len(set(seen)) == len(seen)


def test_listing_ten_thousand_files_takes_no_time(tmp_path):
    for i in range(10_000):
        os.close(os.open(tmp_path / f"{i}.jpg", os.O_CREAT | os.O_WRONLY))
        os.truncate(tmp_path / f"{i}.jpg", 1)
    began = time.process_time()
    assert len(listing(tmp_path).items) == 10_000
    assert time.process_time() - began < 2


def test_what_a_folder_is_can_be_seen(tmp_path):
    write(tmp_path, {"pics/a.jpg": JPEG, "shards/0.tar": b"x", "hf/state.json": "{}", "hf/dataset_info.json": "{}"})
    found = [detect_source_format(tmp_path / name) for name in ("pics", "shards", "shards/0.tar", "hf")]
    assert found == ["folder", "webdataset", "webdataset", "huggingface"]


def test_a_folder_that_is_not_there_is_an_error_that_names_the_setting(tmp_path):
    with pytest.raises(SourceError, match=r"datasets\[cats\]\.instance_data_dir: .* does not exist"):
        open_source(DatasetSettings(id="cats", instance_data_dir=tmp_path / "no"))


def test_of_two_caption_files_for_one_picture_the_one_not_used_is_told(tmp_path):
    write(tmp_path, {"a.jpg": JPEG, "a.txt": "short", "a.jpg.txt": "long", "b.jpg": JPEG, "b.jpg.txt": "fine"})
    assert texts(tmp_path) == {"a": ("short",), "b": ("fine",)}
    (note,) = listing(tmp_path).notes
    assert note.startswith("1 caption file left out") and "'a.jpg.txt'" in note


def test_of_two_metadata_files_the_one_not_read_is_told(tmp_path):
    write(tmp_path, {"a.jpg": JPEG})
    metadata(tmp_path, "csv", [{"file_name": "a.jpg", "text": "from csv"}])
    metadata(tmp_path, "jsonl", [{"file_name": "a.jpg", "text": "from jsonl"}])
    assert texts(tmp_path) == {"a": ("from jsonl",)}
    assert listing(tmp_path).notes == ("metadata.csv is not read: captions come from metadata.jsonl",)
