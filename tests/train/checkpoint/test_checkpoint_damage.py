"""Damaged and hostile checkpoints: every change is found, and hostile files are only refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from supertuner.core.errors import CheckpointError
from supertuner.core.host import HostFacts
from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.load import find_checkpoints, load_checkpoint, verify_checkpoint
from supertuner.train.checkpoint.manifest import json_bytes
from supertuner.train.checkpoint.resume import load_latest
from tests.arena import faults
from tests.train.checkpoints import parts_at, save_parts, state_at, tree


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return save_parts(tmp_path / "c", 40, parts_at(40), state_at(40), keep=9, host=HostFacts())


def seal(checkpoint: Path, **changes: Any) -> None:
    """Make the manifest match the folder, as an attacker would; `changes` replace its fields."""
    files = {
        f.name: {"bytes": f.stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest(f.read_bytes())}
        for f in checkpoint.iterdir()
        if f.name != "manifest.json" and f.is_file() and not f.is_symlink()
    }
    body = {"format": 1, "step": 40, "files": files, **changes}
    body["checksum"] = xxhash.xxh3_128_hexdigest(json_bytes(body))
    (checkpoint / "manifest.json").write_bytes(json_bytes(body))


def refused(checkpoint: Path, *words: str) -> None:
    """Loading it or reading its parts raises one clear error, `verify` reports it, and nothing is changed."""
    before = tree(checkpoint.parent)
    with pytest.raises(CheckpointError) as raised:
        loaded = load_checkpoint(checkpoint)
        for name in loaded.parts:
            loaded.read_part(name)
    problems = verify_checkpoint(checkpoint)
    assert problems and str(checkpoint) in problems[0] and str(checkpoint) in str(raised.value)
    for word in words:
        assert word in problems[0] and word in str(raised.value), problems
    assert tree(checkpoint.parent) == before


DAMAGES: dict[str, Callable[..., tuple[Callable[[], None], str]]] = {
    "flip": faults._flip,
    "truncate": faults._truncate,
    "swap bytes": faults._swap_bytes,
    "swap files": faults._swap_files,
}


def test_every_flipped_bit_truncation_and_swap_is_found(tmp_path: Path, made: Path) -> None:
    older = save_parts(tmp_path / "c", 20, parts_at(20), state_at(20), keep=9, host=HostFacts())
    rng = random.Random(7)
    tried = dict.fromkeys(DAMAGES, 0)
    for _ in range(600):
        kind = rng.choice(("flip", "flip", "flip", *DAMAGES))
        undo, what = DAMAGES[kind](rng, made, older)
        problems = verify_checkpoint(made)
        assert problems and str(made) in problems[0], f"{what} was not found"
        with pytest.raises(CheckpointError):
            load_checkpoint(made)
        found = load_latest(tmp_path / "c")
        assert found is not None and found.step == 20, what
        undo()
        tried[kind] += 1
    assert verify_checkpoint(made) == [] and min(tried.values()) > 50


def test_every_bit_of_the_manifest_counts(made: Path) -> None:
    content = (made / "manifest.json").read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        (made / "manifest.json").write_bytes(changed)
        assert verify_checkpoint(made), f"bit {at % 8} of byte {at}"
    (made / "manifest.json").write_bytes(content)
    assert verify_checkpoint(made) == []


def test_a_file_that_changes_after_verification_is_still_found(made: Path) -> None:
    loaded = load_checkpoint(made)
    file = made / "adapter.high_noise.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        loaded.read_part("adapter.high_noise")


def test_a_missing_file_or_folder_is_named(made: Path) -> None:
    (made / "random.safetensors").unlink()
    refused(made, "random.safetensors", "No such file")
    (made / "manifest.json").unlink()
    refused(made, "manifest.json")
    shutil.rmtree(made)
    with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
        load_checkpoint(made)


def test_an_extra_file_is_ignored(made: Path) -> None:
    (made / "notes.txt").write_text("my best one")
    assert verify_checkpoint(made) == [] and load_checkpoint(made).step == 40


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..safetensors",
        ".hidden.safetensors",
        "a\u0000.safetensors",
        "manifest.json",
        "code.py",
        "x" * 200 + ".safetensors",
        "a..b.safetensors",
        "é.safetensors",
    ],
)
def test_invalid_file_names_are_refused(made: Path, name: str) -> None:
    (made.parent / "outside.safetensors").write_bytes(b"secret")
    files = json.loads((made / "manifest.json").read_bytes())["files"]
    seal(made, files={**files, name: {"bytes": 6, "xxh3_128": xxhash.xxh3_128_hexdigest(b"secret")}})
    refused(made, "manifest.json", "not a valid file name in a checkpoint")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 3}, ("format 3", "update SuperTuner")),
        ({"format": 3, "files": "another shape altogether"}, ("format 3", "update SuperTuner")),
        ({"format": 0}, ("format is 0",)),
        ({"format": True}, ("format is True",)),
        ({"format": "1"}, ("format is '1'",)),
        ({"format": None}, ("format is None",)),
        ({"step": -1}, ("step is -1",)),
        ({"step": 10**30}, ("step is 1000",)),
        ({"step": 40.0}, ("step is 40.0",)),
        ({"step": True}, ("step is True",)),
        ({"files": []}, ("files",)),
        ({"files": {}}, ("state.json",)),
        ({"files": {"state.json": 7}}, ("state.json", "lacks bytes or xxh3_128")),
        ({"files": {"state.json": {"bytes": "7", "xxh3_128": "0" * 32}}}, ("'7'", "not a valid size")),
        ({"files": {"state.json": {"bytes": -7, "xxh3_128": "0" * 32}}}, ("-7", "not a valid size")),
        ({"files": {"state.json": {"bytes": 1 << 70, "xxh3_128": "0" * 32}}}, ("not a valid size",)),
        ({"files": {"state.json": {"bytes": 1 << 60, "xxh3_128": "0" * 32}}}, ("were written",)),
        ({"files": {"state.json": {"bytes": 1, "xxh3_128": 5}}}, ("hexadecimal",)),
        ({"files": {"state.json": {"bytes": 1, "xxh3_128": "G" * 32}}}, ("hexadecimal",)),
        ({"files": {"state.json": {"bytes": 1, "xxh3_128": "0" * 32, "x": 1}}}, ("lacks bytes or xxh3_128",)),
        ({"extra": 1}, ("extra",)),
        ({"files": {f"{i}.safetensors": {} for i in range(5000)}}, ("at most",)),
    ],
)
def test_a_manifest_with_wrong_values_is_refused_with_the_value(
    made: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    seal(made, **changes)
    refused(made, *words)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b'{"format": NaN}',
        b'{"format": 1e999}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format":' * 5_000,
        b'{"format": 1, "format": 1}',
        b'{"format": ' + b"1" * 5000 + b"}",
    ],
)
def test_a_manifest_that_is_not_a_json_object_is_refused(made: Path, content: bytes) -> None:
    (made / "manifest.json").write_bytes(content)
    refused(made, "manifest.json")


@pytest.mark.parametrize(
    "content", [b'{"x": NaN}', b'{"x": -Infinity}', b'{"x": 1e400}', b"[1]", b"{", b"[" * 90_000, b'"text"']
)
def test_an_invalid_state_with_a_valid_checksum_is_refused(made: Path, content: bytes) -> None:
    (made / "state.json").write_bytes(content)
    seal(made)
    refused(made, "state.json")


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


HEADERS = {
    "nothing": b"",
    "a length only": (1 << 62).to_bytes(8, "little"),
    "a length beyond the end": (1000).to_bytes(8, "little") + b"{}",
    "no JSON": (4).to_bytes(8, "little") + b"nope",
    "nested deeply": (90_000).to_bytes(8, "little") + b"[" * 90_000,
    "a list": (2).to_bytes(8, "little") + b"[]",
    "an unknown dtype": header(a={"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}) + bytes(4),
    "a dtype that is a list": header(a={"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}) + bytes(4),
    "a huge shape": header(a={"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}) + bytes(4),
    "a shape that cannot be counted": header(
        a={"dtype": "F32", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]}
    ),
    "a huge shape times nothing": header(a={"dtype": "F32", "shape": [1 << 63, 0], "data_offsets": [0, 0]}),
    "a negative shape": header(a={"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}) + bytes(4),
    "a shape of words": header(a={"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}) + bytes(4),
    "a shape of booleans": header(a={"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}) + bytes(4),
    "offsets beyond the end": header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}) + bytes(4),
    "offsets before the begin": header(a={"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}) + bytes(4),
    "three offsets": header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}) + bytes(4),
    "a gap": header(a={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}) + bytes(8),
    "a rest": header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}) + bytes(8),
    "an overlap": header(
        a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        b={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    )
    + bytes(12),
    "a field too many": header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1}) + bytes(4),
}


@pytest.mark.parametrize("what", HEADERS)
def test_an_inconsistent_tensor_file_with_a_valid_checksum_is_refused(made: Path, what: str) -> None:
    (made / "random.safetensors").write_bytes(HEADERS[what])
    seal(made)
    refused(made, "random.safetensors")


def test_links_devices_and_pipes_are_not_followed(made: Path, tmp_path: Path) -> None:
    file = made / "random.safetensors"
    os.rename(file, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", file)
    refused(made, "random.safetensors", "link")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a file"):
        load_checkpoint(made)
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match="not a file"):
        load_checkpoint(made)


def test_a_linked_checkpoint_is_used_and_only_the_link_is_removed(made: Path, tmp_path: Path) -> None:
    os.rename(made, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", made)
    assert load_latest(made.parent) is not None, "a link that somebody made on purpose, to another disk, works"
    save_parts(made.parent, 40, parts_at(40, seed=1), state_at(40), keep=1, host=HostFacts())
    save_parts(made.parent, 50, parts_at(50), state_at(50), keep=1, host=HostFacts())
    assert [found.step for found in find_checkpoints(made.parent)] == [50]
    assert verify_checkpoint(tmp_path / "elsewhere") == [], "and what it leads to is never removed"


def test_a_hidden_link_is_removed_and_not_its_target(made: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    os.symlink(tmp_path / "precious", made.parent / ".removing-step-00000010")
    os.symlink(tmp_path / "precious", made.parent / ".saving-step-00000050")
    load_latest(made.parent)
    assert sorted(os.listdir(made.parent)) == ["step-00000040"]
    assert (tmp_path / "precious" / "file").read_text() == "mine"


def test_a_file_of_a_terabyte_of_holes_is_refused_without_a_terabyte_of_memory(made: Path) -> None:
    file = made / "random.safetensors"
    file.write_bytes((1 << 39).to_bytes(8, "little") + b"{")
    os.truncate(file, 1 << 40)
    fd = os.open(file, os.O_RDONLY)
    try:
        with pytest.raises(tensor_file.MalformedTensorFileError, match="claims 549755813888 bytes"):
            tensor_file.read_tensors(fd, 1 << 40, len)
    finally:
        os.close(fd)
    assert "it has 1099511627776 bytes" in verify_checkpoint(made)[0]


def test_saving_a_tensor_subclass_is_a_programming_error(tmp_path: Path) -> None:
    class Quantised(torch.Tensor):
        pass

    with pytest.raises(AssertionError, match="Quantised"):
        save_parts(tmp_path, 1, {"p": {"x": torch.zeros(3).as_subclass(Quantised)}}, {}, keep=1, host=HostFacts())
    with pytest.raises(AssertionError):
        save_parts(tmp_path, 1, {"../p": {}}, {}, keep=1, host=HostFacts())
