"""Staging: files are staged unchanged and once per node, broken ones are set aside, and decisions are reported."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from supertuner.arena.home import ArenaHome
from supertuner.core.errors import ArenaDamagedError, SourceError, StageError, TooManyBrokenFilesError
from supertuner.core.types import MediaKind
from supertuner.data.staging.staged_dataset import StagedDataset
from tests.data.media_files import picture, png_claiming, sound, tar, video, write
from tests.data.staging import RecordingSink, contents, dataset, names, stager


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def pictures(count, **extra):
    files = {f"{i:03d}.jpg": picture("jpeg", (20 + i, 16), seed=i) for i in range(count)}
    return files | {f"{i:03d}.txt": f"caption {i}" for i in range(count)} | extra


def test_the_arena_contains_all_files_and_captions_after_the_folder_is_moved(tmp_path, home):
    files = pictures(30)
    folder = write(tmp_path / "set", files)
    result = stager(home).stage(dataset(folder))
    os.rename(folder, tmp_path / "elsewhere")
    assert contents(home, result.arena) == {f"{i:03d}": (files[f"{i:03d}.jpg"], (f"caption {i}",)) for i in range(30)}
    with StagedDataset.open(ArenaHome(home), result.arena) as staged:
        assert staged.width.tolist() == [20 + i for i in range(30)] and set(staged.height.tolist()) == {16}
        assert (staged.id, staged.kind, len(staged)) == ("set", MediaKind.IMAGE, 30)


def test_video_and_audio_are_staged_with_their_metadata(tmp_path, home):
    write(tmp_path / "v", {"a.mp4": video(frames=10), "a.txt": "moves"})
    write(tmp_path / "s", {"a.wav": sound("wav", 0.5), "b.flac": sound("flac", 0.25)})
    video_result = stager(home).stage(dataset(tmp_path / "v", id="v", dataset_type="video"))
    audio_result = stager(home).stage(dataset(tmp_path / "s", id="s", dataset_type="audio"))
    with StagedDataset.open(ArenaHome(home), video_result.arena) as staged:
        assert (staged.frames[0], staged.fps[0], staged.width[0]) == (10, 24, 64)
    with StagedDataset.open(ArenaHome(home), audio_result.arena) as staged:
        assert staged.seconds.tolist() == [0.5, 0.25] and staged.channels.tolist() == [2, 2]
        assert staged.sample_rate.tolist() == [16_000, 16_000] and staged.width.tolist() == [0, 0]


def test_webdataset_shards_are_staged_without_being_unpacked(tmp_path, home):
    files = {f"{i}.jpg": picture(seed=i) for i in range(5)}
    for shard in "ab":
        tar(tmp_path / f"shards/{shard}.tar", {**files, "1.txt": "one"})
    before = sorted(p.name for p in tmp_path.rglob("*"))
    result = stager(home).stage(dataset(tmp_path / "shards"))
    staged = contents(home, result.arena)
    assert len(staged) == 10 and staged["b/1"] == (files["1.jpg"], ("one",))
    assert sorted(p.name for p in tmp_path.rglob("*") if home not in p.parents and p != home) == before


def saved(path, rows, *, forge=False):
    """A dataset saved by the datasets library. With `forge`, its rows contain paths instead of the files' bytes."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"image": plain if forge else datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(path)
    if forge:
        info = json.loads((path / "dataset_info.json").read_text())
        info["features"]["image"] = {"_type": "Image"}
        (path / "dataset_info.json").write_text(json.dumps(info))
    return path


def test_a_saved_hugging_face_dataset_is_staged_and_reused(tmp_path, home):
    files = [picture(seed=i) for i in range(12)]
    rows = {"image": [{"bytes": f, "path": None} for f in files], "text": [f"c{i}" for i in range(12)]}
    settings = dataset(saved(tmp_path / "hf", rows))
    result = stager(home).stage(settings)
    os.rename(tmp_path / "hf", tmp_path / "moved")
    assert contents(home, result.arena) == {f"{i:02d}": (files[i], (f"c{i}",)) for i in range(12)}
    os.rename(tmp_path / "moved", tmp_path / "hf")
    assert stager(home).stage(settings).reused


def test_parquet_files_as_the_hub_holds_them_are_staged_also_through_links(tmp_path, home, monkeypatch):
    """The hub's cache is a folder of links to files elsewhere."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files = [picture(seed=i) for i in range(3)]
    rows = {"image": [{"bytes": f, "path": None} for f in files], "text": [f"c{i}" for i in range(3)]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    (tmp_path / "hf/data").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(b"")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "blob")
    (tmp_path / "hf/data/train-00000-of-00001.parquet").symlink_to(tmp_path / "blob")
    (tmp_path / "hf/data/test-00000-of-00001.parquet").write_bytes(b"not used")
    (tmp_path / "hf/README.md").write_text("a card")
    result = stager(home).stage(dataset(tmp_path / "hf"))
    assert contents(home, result.arena) == {f"{i}": (files[i], (f"c{i}",)) for i in range(3)}


def test_caption_settings_that_do_not_apply_to_a_hugging_face_dataset_are_refused(tmp_path, home):
    path = saved(tmp_path / "hf", {"image": [{"bytes": picture(), "path": None}], "text": ["x"]})
    with pytest.raises(SourceError, match=r"has its captions in a column.*captions\.caption_column"):
        stager(home).stage(dataset(path, captions={"source": "sidecar"}))


def test_rows_of_a_hugging_face_dataset_open_only_files_inside_its_folder(tmp_path, home):
    paths = ["in.jpg", "/etc/passwd", "../out.jpg", "gone.jpg"]
    rows = {"image": [{"bytes": None, "path": path} for path in paths], "text": list("abcd")}
    write(tmp_path, {"out.jpg": picture()})
    write(saved(tmp_path / "hf", rows, forge=True), {"in.jpg": picture(seed=1)})
    sink = RecordingSink()
    result = stager(home, sink).stage(dataset(tmp_path / "hf", max_broken_share=1))
    assert contents(home, result.arena) == {"0": (picture(seed=1), ("a",))}
    reasons = sink.set_aside()
    assert "outside its folder" in reasons["row 1"] and "outside its folder" in reasons["row 2"]
    assert "unreadable: No such file" in reasons["row 3"]


@pytest.mark.parametrize("how", ["table", "link", "split"])
def test_a_hugging_face_dataset_that_names_files_outside_its_folder_is_refused(tmp_path, home, how):
    rows = {"image": [{"bytes": picture(), "path": None}], "text": ["private"]}
    outside = saved(tmp_path / "outside", rows)
    path = saved(tmp_path / "hf", rows)
    if how == "split":
        (path / "dataset_dict.json").write_text(json.dumps({"splits": ["../outside"]}))
    elif how == "table":
        state = json.loads((path / "state.json").read_text())
        state["_data_files"] = [{"filename": f"../outside/{next(outside.glob('*.arrow')).name}"}]
        (path / "state.json").write_text(json.dumps(state))
    else:
        table = next(path.glob("*.arrow"))
        table.unlink()
        table.symlink_to(next(outside.glob("*.arrow")))
    with pytest.raises(SourceError, match=r"names '.*', which is outside this folder"):
        stager(home).stage(dataset(path))


def test_an_unchanged_dataset_is_reused_instantly(tmp_path, home):
    folder = write(tmp_path / "set", pictures(50, **{"bad.jpg": b"xx"}))
    first = stager(home).stage(dataset(folder))
    sink = RecordingSink()
    began = time.process_time()
    again = stager(home, sink).stage(dataset(folder, resolution=512, repeats=3))
    assert time.process_time() - began < 0.5
    assert again.reused and not first.reused and again.arena == first.arena
    assert again.set_aside == first.set_aside and list(sink.set_aside()) == ["bad.jpg"]
    assert sink.decisions()["datasets[set].arena"] == f"{first.arena} reused"


def test_one_warning_lists_all_older_versions_and_the_command_that_removes_them(tmp_path, home):
    folder = write(tmp_path / "set", pictures(3))
    old = [stager(home).stage(dataset(folder, limit=limit)).arena for limit in (1, 2)]
    sink = RecordingSink()
    stager(home, sink).stage(dataset(folder))
    assert "2 older versions are still kept" in sink.warnings()
    assert f"rm --home {home} {' '.join(sorted(old))}`" in sink.warnings()


def test_a_dataset_with_the_same_id_from_another_folder_is_not_an_older_version(tmp_path, home):
    stager(home).stage(dataset(write(tmp_path / "theirs", pictures(3))))
    sink = RecordingSink()
    assert stager(home, sink).stage(dataset(write(tmp_path / "ours", pictures(2)))).older_arenas == ()
    assert "arena rm" not in sink.warnings()


def test_a_reused_arena_above_the_memory_limit_causes_a_warning(tmp_path, home):
    folder = write(tmp_path / "set", pictures(3))
    stager(home).stage(dataset(folder))
    sink = RecordingSink()
    assert stager(home, sink).stage(dataset(folder, in_memory={"memory_limit_gb": 1e-6})).reused
    assert "memory_limit_gb allows 1.0 KiB, but the existing arena has" in sink.warnings()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (write(folder, {"new.jpg": picture(seed=99)}), {})[1],
        lambda folder: (os.utime(folder / "000.jpg", ns=(1, 1)), {})[1],
        lambda folder: (write(folder, {"000.txt": "another caption"}), {})[1],
        lambda folder: (os.unlink(folder / "001.jpg"), {})[1],
        lambda folder: {"limit": 3},
        lambda folder: {"in_memory": {"compression": "zstd"}},
        lambda folder: {"captions": {"source": "filename"}},
        lambda folder: {"check": "decode"},
    ],
)
def test_a_changed_dataset_gets_a_new_arena_and_the_old_one_is_kept(tmp_path, home, change):
    folder = write(tmp_path / "set", pictures(5))
    old = stager(home).stage(dataset(folder))
    settings = change(folder)
    sink = RecordingSink()
    new = stager(home, sink).stage(dataset(folder, **settings))
    assert new.arena != old.arena and not new.reused
    assert {info.name for info in ArenaHome(home).list_arenas()} == {old.arena, new.arena}
    assert f"supertuner arena rm --home {home} {old.arena}" in sink.warnings()
    assert sink.decisions()["datasets[set].arena"] == new.arena


def test_the_arena_does_not_depend_on_the_number_of_threads(tmp_path, home):
    folder = write(tmp_path / "set", pictures(200, **{"bad1.jpg": b"x", "bad2.jpg": b"", "z.png": picture("png")}))
    results = []
    for threads in (1, 7):
        sink = RecordingSink()
        result = stager(home, sink).stage(dataset(folder, id=f"t{threads}", in_memory={"num_workers": threads}))
        with StagedDataset.open(ArenaHome(home), result.arena) as staged:
            columns = [staged.key(i) for i in range(len(staged))], staged.width.tolist(), staged.set_aside()
        results.append((contents(home, result.arena), columns, sink.set_aside()))
    assert results[0] == results[1]


BROKEN = {
    "truncated.jpg": (picture()[:-400], "truncated"),
    "text.jpg": (b"not an image at all", "wrong type"),
    "bomb.png": (png_claiming(60_000, 60_000), "decompression bomb"),
    "empty.jpg": (b"", "zero bytes"),
    "clip.png": (video(), "really mp4"),
    "000.png": (picture("png"), "two files of one key: 000.jpg is kept"),
    "latin.jpg": (picture(), "caption is not UTF-8 (byte 1)"),
    "novel.jpg": (picture(), "caption of 70000 bytes; at most 65536"),
}


def broken_folder(folder):
    write(folder, pictures(10) | {name: content for name, (content, _) in BROKEN.items()})
    return write(folder, {"latin.txt": "né".encode("latin-1"), "novel.txt": "x" * 70_000})


def test_broken_files_are_set_aside_with_reasons_and_not_modified(tmp_path, home):
    folder = broken_folder(tmp_path / "set")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    sink = RecordingSink()
    result = stager(home, sink).stage(dataset(folder, max_broken_share=0.5))
    reasons = sink.set_aside()
    assert reasons.keys() == BROKEN.keys()
    assert all(reason in reasons[name] for name, (_, reason) in BROKEN.items()), reasons
    assert result.files == 10 and {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_too_many_broken_files_raise_an_error_with_the_list_and_the_setting(tmp_path, home):
    folder = broken_folder(tmp_path / "set")
    with pytest.raises(TooManyBrokenFilesError) as caught:
        stager(home).stage(dataset(folder), "datasets[0]")
    text = str(caught.value)
    assert "8 of 18 files are broken (44.4%, at most 5.0% are allowed)" in text and "text.jpg: wrong type" in text
    assert "datasets[0].max_broken_share=0.45" in text
    assert names(home) == []
    assert stager(home).stage(dataset(folder, max_broken_share=0.45)).files == 10


def test_strict_lists_every_broken_file_also_of_a_reused_arena(tmp_path, home):
    folder = broken_folder(tmp_path / "set")
    with pytest.raises(TooManyBrokenFilesError) as caught:
        stager(home).stage(dataset(folder, strict=True))
    assert all(name in str(caught.value) for name in BROKEN) and names(home) == []
    stager(home).stage(dataset(folder, max_broken_share=1))
    with pytest.raises(TooManyBrokenFilesError, match="is strict and 8 files are broken"):
        stager(home).stage(dataset(folder, strict=True))


def test_a_folder_without_usable_files_is_refused(tmp_path, home):
    with pytest.raises(SourceError, match=r"no image files in .*1 video file skipped: dataset_type is image"):
        stager(home).stage(dataset(write(tmp_path / "v", {"a.mp4": video()})))
    with pytest.raises(StageError, match="none of its 1 files is usable"):
        stager(home).stage(dataset(write(tmp_path / "b", {"a.jpg": b"x"}), max_broken_share=1))
    assert names(home) == []


def test_damaged_pixels_are_found_only_by_check_decode(tmp_path, home):
    content = bytearray(picture("png", (64, 64)))
    middle = len(content) // 2
    content[middle : middle + 40] = bytes(40)
    folder = write(tmp_path / "set", pictures(30, **{"damaged.png": bytes(content)}))
    assert stager(home).stage(dataset(folder)).files == 31
    sink = RecordingSink()
    assert stager(home, sink).stage(dataset(folder, check="decode")).files == 30
    assert "does not decode" in sink.set_aside()["damaged.png"]


def test_complete_files_of_every_kind_pass_check_decode(tmp_path, home):
    kinds = {
        "image": {"a.jpg": picture(orientation=6), "b.png": picture("png"), "c.webp": picture("webp")},
        "video": {"a.mp4": video(), "b.mkv": video("mkv"), "c.mp4": video(rotation=90)},
        "audio": {f"{format}.{format}": sound(format) for format in ("wav", "flac", "ogg", "mp3")},
    }
    for kind, files in kinds.items():
        folder = write(tmp_path / kind, files)
        result = stager(home).stage(dataset(folder, id=kind, dataset_type=kind, check="decode", strict=True))
        assert result.files == len(files)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.unlink(), "removed after it was listed"),
        (lambda path: path.write_bytes(picture(seed=77)), "changed after it was listed"),
        (lambda path: os.utime(path, ns=(5, 5)), "changed after it was listed"),
        (lambda path: path.write_bytes(b"short"), "became shorter"),
        (lambda path: (path.unlink(), os.mkfifo(path)), ""),
    ],
)
def test_a_file_that_changes_between_listing_and_reading_is_set_aside(tmp_path, home, change, reason):
    folder = write(tmp_path / "set", pictures(30))

    def when(title):
        if title.startswith("staging"):
            change(folder / "007.jpg")

    sink = RecordingSink(when)
    result = stager(home, sink).stage(dataset(folder))
    assert result.files == 29 and reason in sink.set_aside()["007.jpg"]


def test_progress_shows_the_total_files_and_bytes(tmp_path, home):
    files = pictures(12)
    sink = RecordingSink()
    stager(home, sink).stage(dataset(write(tmp_path / "set", files)))
    total = sum(len(content) for name, content in files.items() if name.endswith(".jpg"))
    assert ("staging set", 12, total) in sink.phases


def test_missing_captions_are_counted_but_not_empty_ones(tmp_path, home):
    files = pictures(6)
    del files["001.txt"], files["002.txt"]
    sink = RecordingSink()
    stager(home, sink).stage(dataset(write(tmp_path / "set", files | {"003.txt": ""})))
    assert "2 of 6 samples have no caption" in sink.warnings()
    sink = RecordingSink()
    stager(home, sink).stage(dataset(tmp_path / "set", captions={"source": "none"}))
    assert "no caption" not in sink.warnings()


def test_files_larger_than_the_buffer_are_staged(tmp_path, home):
    big = {f"{i}.png": picture("png", (1000, 900), seed=i) for i in range(3)}
    assert min(map(len, big.values())) > 2 << 20
    small = {f"s{i}.jpg": picture(seed=i) for i in range(3)}
    shard = tar(tmp_path / "x.tar", big)
    result = stager(home).stage(dataset(write(tmp_path / "set", big | small)))
    assert {key: stored[0] for key, stored in contents(home, result.arena).items()} == {
        name.rpartition(".")[0]: content for name, content in (big | small).items()
    }
    packed = stager(home).stage(dataset(shard, id="tar"))
    assert [stored[0] for stored in contents(home, packed.arena).values()] == list(big.values())


def test_one_of_two_processes_stages_and_the_other_waits_and_reuses_the_arena(tmp_path, home):
    folder = write(tmp_path / "set", pictures(300))
    started = threading.Event()
    release = threading.Event()
    results = {}

    def when(title):
        if title.startswith("staging"):
            started.set()
            release.wait(20)

    def first():
        results["first"] = stager(home, RecordingSink(when)).stage(dataset(folder))

    def waiting(title):
        if title.startswith("waiting"):
            release.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(20)
    sink = RecordingSink(waiting)
    results["second"] = stager(home, sink).stage(dataset(folder))
    thread.join()
    assert not results["first"].reused and results["second"].reused
    assert any(title.startswith("waiting for another process") for title, _, _ in sink.phases)


def run_cli(*arguments):
    command = [sys.executable, "-c", "from supertuner.cli import main; main()", "stage", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_stages_and_prints_figures_as_json_and_as_text(tmp_path, home):
    folder = write(tmp_path / "cats", pictures(8))
    config = {
        "run": {"output_dir": str(tmp_path / "runs")},
        "datasets": [{"instance_data_dir": "cats"}],
        "arena": {"home": str(home)},
    }
    write(tmp_path, {"run.json": json.dumps(config)})
    done = run_cli(tmp_path / "run.json", "--limit", "5", "--json")
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(done.stdout)
    assert (figures["dataset"], figures["files"], figures["reused"], figures["set_aside"]) == ("cats", 5, False, 0)
    assert figures["stored_bytes"] >= figures["bytes"] > 0 and figures["files_per_s"] > 0
    write(folder, {"bad.jpg": b"x"})
    done = run_cli(tmp_path / "run.json", "--set", "datasets[0].max_broken_share=0.5")
    assert done.returncode == 0 and "8 image files" in done.stdout and "set aside" in done.stdout
    done = run_cli(tmp_path / "run.json", "--strict")
    assert done.returncode == 1 and "bad.jpg: wrong type" in done.stderr and "Traceback" not in done.stderr


def test_columns_are_views_not_copies(tmp_path, home):
    result = stager(home).stage(dataset(write(tmp_path / "set", pictures(3))))
    with StagedDataset.open(ArenaHome(home), result.arena) as staged:
        assert not staged.width.flags.owndata and not staged.width.flags.writeable
        assert staged.media(0).readonly
        assert isinstance(staged.fps, np.ndarray) and staged.fps.dtype == np.float32


def test_an_expired_arena_is_not_reused(tmp_path, home):
    folder = write(tmp_path / "set", pictures(3))
    expiring = dataclasses.replace(stager(home), life=1e-9)
    first = expiring.stage(dataset(folder))
    assert not expiring.stage(dataset(folder)).reused
    kept = dataclasses.replace(stager(home), life=1.0)
    assert not kept.stage(dataset(folder)).reused and kept.stage(dataset(folder)).reused
    assert names(home) == [first.arena]


@pytest.mark.parametrize("verify", ["always", "background"])
def test_staging_verifies_every_byte_of_a_reused_arena(tmp_path, home, verify):
    folder = write(tmp_path / "set", pictures(3))
    result = stager(home).stage(dataset(folder))
    data = next(path for path in (home / result.arena).glob("*.data") if path.stat().st_size > 4096)
    with data.open("r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)[0]
        file.seek(4096 + 100)
        file.write(bytes([byte ^ 4]))
    assert stager(home).stage(dataset(folder)).reused
    with pytest.raises(ArenaDamagedError, match=result.arena):
        dataclasses.replace(stager(home), verify=verify).stage(dataset(folder))


def test_staging_without_the_c_library_gives_the_same_arena_and_a_warning(tmp_path, home):
    folder = write(tmp_path / "set", pictures(150, **{"empty.jpg": b"", "bad.jpg": b"not an image"}))
    sink, python_sink = RecordingSink(), RecordingSink()
    with_c = stager(home, sink).stage(dataset(folder))
    in_python = dataclasses.replace(stager(tmp_path / "other", python_sink), library=None).stage(dataset(folder))
    assert contents(home, with_c.arena) == contents(tmp_path / "other", in_python.arena)
    assert sink.set_aside() == python_sink.set_aside() and len(sink.set_aside()) == 2
    assert "without a C compiler" in python_sink.warnings()


def test_a_slow_rate_of_files_is_not_rounded_to_zero(tmp_path):
    write(tmp_path / "set", {"a.jpg": picture()})
    result = stager(tmp_path / "home").stage(dataset(tmp_path / "set"))
    assert dataclasses.replace(result, seconds=500.0).figures()["files_per_s"] == 0.002
