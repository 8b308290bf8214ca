"""Checkpoints are read back bit for bit, the last ones are kept, and only intact ones are used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from supertuner.core.errors import CheckpointError
from supertuner.core.host import HostFacts
from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.load import find_checkpoints, load_checkpoint, verify_checkpoint
from supertuner.train.checkpoint.resume import load_latest, set_aside_later_checkpoints
from tests.train.checkpoints import RecordingSink, bytes_of, parts_at, save_parts, state_at, tree


class FullDiskHost(HostFacts):
    """A host whose disk has this much free space."""

    def __init__(self, free: int) -> None:
        super().__init__()
        object.__setattr__(self, "free", free)

    __slots__ = ("free",)

    def free_bytes(self, folder: Path) -> int:
        free: int = self.free
        return free


def put(folder: Path, step: int, seed: int = 0, keep: int = 9) -> Path:
    return save_parts(folder, step, parts_at(step, seed), state_at(step), keep=keep, host=HostFacts())


def steps(folder: Path) -> list[int]:
    return [found.step for found in find_checkpoints(folder)]


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    put(tmp_path / "c", 40)
    found = load_latest(tmp_path / "c")
    assert found is not None and found.step == 40 and found.path == tmp_path / "c" / "step-00000040"
    assert found.state == state_at(40)
    expected = parts_at(40)
    assert set(found.parts) == set(expected) and len(found.parts) == 7
    for name, tensors in expected.items():
        got = found.read_part(name)
        assert set(got) == set(tensors)
        for key, tensor in tensors.items():
            assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor)


def test_loaded_tensors_have_torchs_alignment(tmp_path: Path) -> None:
    odd = {f"{i}": torch.randn(i + 1) for i in range(9)}
    made = save_parts(tmp_path, 1, {"odd": odd}, {}, keep=1, host=HostFacts())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in load_checkpoint(made).read_part("odd").values())
    assert any(tensor.data_ptr() % 64 for tensor in load_file(made / "odd.safetensors").values()), "or why we bother"


@pytest.mark.parametrize("code", tensor_file.DTYPE_BY_CODE)
def test_every_dtype_survives_with_every_odd_shape(code: str, tmp_path: Path) -> None:
    dtype = getattr(torch, tensor_file.DTYPE_BY_CODE[code][0])
    raw = torch.randint(0, 256 if code != "BOOL" else 2, (6 * 8,), dtype=torch.uint8)
    full = raw.view(dtype) if code != "BOOL" else raw.bool()
    tensors = {"full": full, "scalar": full[0].clone(), "empty": full[:0].reshape(0, 3), "strided": full[::2]}
    made = save_parts(tmp_path, 1, {"p": tensors}, {}, keep=1, host=HostFacts())
    got, by_library = load_checkpoint(made).read_part("p"), load_file(made / "p.safetensors")
    for name, tensor in tensors.items():
        for other in (got[name], by_library[name]):
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            same = [t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor)]
            assert torch.equal(*same)


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.randn(2).bfloat16()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"who": "somebody", "format": "pt"})
    fd = os.open(tmp_path / "x.safetensors", os.O_RDONLY)
    seen: list[bytes] = []
    got = tensor_file.read_tensors(fd, os.fstat(fd).st_size, lambda chunk: seen.append(bytes(chunk)))
    os.close(fd)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert b"".join(seen) == (tmp_path / "x.safetensors").read_bytes()


def test_equal_contents_in_any_order_give_equal_bytes(tmp_path: Path) -> None:
    parts = parts_at(40)
    turned = {name: dict(reversed(tensors.items())) for name, tensors in reversed(parts.items())}
    first = save_parts(tmp_path / "a", 40, parts, {"x": 1, "y": 0.1}, keep=1, host=HostFacts())
    os.utime(first / "state.json", (0, 0))
    second = save_parts(tmp_path / "b", 40, turned, {"y": 0.1, "x": 1}, keep=1, host=HostFacts())
    assert bytes_of(first) == bytes_of(second)


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        put(tmp_path, step, keep=3)
    assert steps(tmp_path) == [30, 40, 50]
    put(tmp_path, 60, keep=1)
    assert steps(tmp_path) == [60]
    assert sorted(os.listdir(tmp_path)) == ["step-00000060"]


def test_saving_the_same_again_changes_nothing(tmp_path: Path) -> None:
    made = put(tmp_path, 40)
    inode, before = made.stat().st_ino, tree(tmp_path)
    assert put(tmp_path, 40) == made
    assert made.stat().st_ino == inode and tree(tmp_path) == before


def test_another_content_of_the_same_step_replaces_the_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, 40, seed=1)
    put(tmp_path, 40)
    assert bytes_of(tmp_path / "step-00000040") == bytes_of(put(tmp_path / "other", 40))
    assert sorted(os.listdir(tmp_path)) == ["other", "step-00000040"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    made = put(tmp_path, 40)
    before = bytes_of(made)
    flip(made / "ema.low_noise.safetensors")
    assert verify_checkpoint(put(tmp_path, 40)) == [] and bytes_of(made) == before


def test_a_damaged_newer_checkpoint_is_skipped_with_a_warning_and_stays(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        put(tmp_path, step)
    flip(tmp_path / "step-00000060" / "optimizer.low_noise.safetensors")
    (tmp_path / "step-00000040" / "state.json").unlink()
    before, heard = tree(tmp_path), RecordingSink()
    found = load_latest(tmp_path, heard)
    assert found is not None and found.step == 20
    assert "checkpoint of step 60: skipped" in heard.text() and "optimizer.low_noise.safetensors" in heard.text()
    assert "checkpoint of step 40: skipped" in heard.text() and "state.json" in heard.text()
    assert tree(tmp_path) == before


def test_saving_before_a_damaged_newer_checkpoint_keeps_the_new_one(tmp_path: Path) -> None:
    put(tmp_path, 60)
    flip(tmp_path / "step-00000060" / "manifest.json")
    put(tmp_path, 40, keep=1)
    put(tmp_path, 50, keep=1)
    assert steps(tmp_path) == [50, 60]
    found = load_latest(tmp_path)
    assert found is not None and found.step == 50


def test_resuming_from_an_older_checkpoint_renames_the_later_ones(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        put(tmp_path, step)
    before, heard = bytes_of(tmp_path / "step-00000060"), RecordingSink()
    set_aside_later_checkpoints(tmp_path, 20, heard)
    assert steps(tmp_path) == [20] and "step 40" in heard.text() and "unused-step-00000060" in heard.text()
    found = load_latest(tmp_path)
    assert found is not None and found.step == 20
    assert (
        bytes_of(tmp_path / "unused-step-00000060") == before
        and verify_checkpoint(tmp_path / "unused-step-00000060") == []
    )
    put(tmp_path, 60, seed=1)
    set_aside_later_checkpoints(tmp_path, 20, heard)
    assert bytes_of(tmp_path / "unused-step-00000060") == before, "an earlier future is not written over"


def test_without_checkpoints_there_is_no_latest(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "nothing") is None
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    (tmp_path / "c" / "step-7").mkdir()
    (tmp_path / "c" / "step-000000070").mkdir()
    (tmp_path / "c" / ".saving-notes").mkdir()
    before = tree(tmp_path)
    assert load_latest(tmp_path / "c") is None
    put(tmp_path / "c", 1, keep=1)
    assert set(before) <= set(tree(tmp_path)), "what is not ours is left alone"


def test_too_little_disk_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    put(tmp_path, 10)
    before = tree(tmp_path)
    message = (
        r"step 20 needs \d+\.\d KiB, 4\.0 KiB are free below .*: \d+\.\d KiB are missing; .*intact: .*step-00000010"
    )
    with pytest.raises(CheckpointError, match=message):
        save_parts(tmp_path, 20, parts_at(20), state_at(20), keep=1, host=FullDiskHost(4096))
    assert tree(tmp_path) == before
    with pytest.raises(CheckpointError, match="there is none yet"):
        save_parts(tmp_path / "other", 20, parts_at(20), state_at(20), keep=1, host=FullDiskHost(4096))


def test_the_required_disk_space_is_what_the_files_take(tmp_path: Path) -> None:
    made = save_parts(tmp_path, 20, {"p": {"x": torch.zeros(100_000)}}, state_at(20), keep=1, host=HostFacts())
    taken = sum(-(-file.stat().st_size // 4096) * 4096 for file in made.iterdir()) + 4096
    for room, enough in ((taken - 1, False), (taken, True)):
        try:
            save_parts(
                tmp_path / f"{room}",
                20,
                {"p": {"x": torch.zeros(100_000)}},
                state_at(20),
                keep=1,
                host=FullDiskHost(room),
            )
        except CheckpointError as error:
            assert not enough, error
        else:
            assert enough


def test_a_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for bad in (float("nan"), float("inf"), object(), {1, 2}):
        with pytest.raises(CheckpointError, match="nothing was saved"):
            save_parts(tmp_path / "c", 1, {}, {"x": bad}, keep=1, host=HostFacts())  # type: ignore[dict-item]
    assert not (tmp_path / "c").exists()


def test_a_missing_part_is_reported_with_the_existing_ones(tmp_path: Path) -> None:
    made = save_parts(tmp_path, 1, {"adapter.model": {}}, {}, keep=1, host=HostFacts())
    with pytest.raises(CheckpointError, match=r"has no part ema\.model, it has adapter\.model"):
        load_checkpoint(made).read_part("ema.model")
    assert "ema.model" not in load_checkpoint(made).parts and load_checkpoint(made).parts.get("ema.model") is None


def test_ctrl_c_in_the_middle_of_a_save_leaves_nothing_behind(tmp_path: Path) -> None:
    put(tmp_path, 10)
    before = tree(tmp_path)

    class Interrupted(torch.Tensor):
        __name__ = "Tensor"

        def detach(self) -> torch.Tensor:
            raise KeyboardInterrupt

    Interrupted.__name__ = "Tensor"
    tensor = torch.zeros(3).as_subclass(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_parts(tmp_path, 20, {"a": {"x": torch.zeros(5)}, "b": {"x": tensor}}, {}, keep=1, host=HostFacts())
    assert tree(tmp_path) == before


def test_a_checkpoint_can_be_copied_and_renamed(tmp_path: Path) -> None:
    made = put(tmp_path / "c", 40)
    os.rename(made, tmp_path / "the best one")
    assert load_checkpoint(tmp_path / "the best one").step == 40
    os.symlink(tmp_path / "the best one", tmp_path / "link")
    assert load_checkpoint(tmp_path / "link").step == 40


def test_a_folder_with_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    os.rename(put(tmp_path, 40), tmp_path / "step-00000050")
    with pytest.raises(CheckpointError, match="name means step 50, its manifest has step 40"):
        load_checkpoint(tmp_path / "step-00000050")


def test_the_manifest_is_plain_json_for_other_programs(tmp_path: Path) -> None:
    made = put(tmp_path, 40)
    manifest = json.loads((made / "manifest.json").read_bytes())
    assert manifest["format"] == 1 and manifest["step"] == 40
    assert {name: facts["bytes"] for name, facts in manifest["files"].items()} == {
        file.name: file.stat().st_size for file in made.iterdir() if file.name != "manifest.json"
    }
