"""Checkpoints that several ranks write together: one folder, complete or absent, for any number of readers."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.core.errors import CheckpointError
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON
from supertuner.train.checkpoint import tensor_file
from supertuner.train.checkpoint.load import (
    RowSelector,
    WantedRows,
    find_checkpoints,
    load_checkpoint,
    verify_checkpoint,
)
from supertuner.train.checkpoint.resume import load_latest
from supertuner.train.checkpoint.write_files import CheckpointSharding, SaveAbandonedError, discard_sharded_save
from tests.train.checkpoints import bytes_of, forge_shard, save_parts, state_at, tree

ROWS = {"a.weight": (7, 3), "b.weight": (2, 2, 5), "c.bias": (5,), "d.bias": (1,)}
"""Shapes that no number of processes divides."""


def whole_parts(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=drawn) for name, shape in ROWS.items()}
    moments = {f"{name}/exp_avg": torch.randn(shape, generator=drawn) for name, shape in ROWS.items()}
    steps = {f"{name}/step": torch.tensor(40.0) for name in ROWS}
    return {
        "adapter.default": {name: one.bfloat16() if name == "b.weight" else one for name, one in weights.items()},
        "optimizer.default": {**moments, **steps},
        "random": {"cpu": torch.arange(16, dtype=torch.uint8)},
    }


def rows_of(count: int, rank: int, ranks: int) -> range:
    each = -(-count // ranks)
    return range(min(count, rank * each), min(count, (rank + 1) * each))


def shared_out(
    parts: dict[str, dict[str, torch.Tensor]], rank: int, ranks: int
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, int]]]:
    """(tensors of a rank, their row offsets)."""
    begins: dict[str, dict[str, int]] = {}
    own: dict[str, dict[str, torch.Tensor]] = {}
    for part, tensors in parts.items():
        own[part] = dict(tensors)
        for name, tensor in tensors.items():
            if part != "random" and tensor.dim():
                rows = rows_of(len(tensor), rank, ranks)
                own[part][name] = tensor[rows.start : rows.stop]
                begins.setdefault(part, {})[name] = rows.start
    return own, begins


def save_one(
    folder: Path,
    rank: int,
    ranks: int,
    *,
    step: int = 40,
    attempt: str = "ab-1",
    seed: int = 0,
    go_on: Callable[[], None] = lambda: None,
    host: HostFacts | None = None,
) -> Path:
    parts, begins = shared_out(whole_parts(seed), rank, ranks)
    sharers = CheckpointSharding(rank, ranks, attempt, begins)
    state: dict[str, JSON] = state_at(step) if rank == 0 else {}
    return save_parts(
        folder, step, parts, state, keep=2, host=host or HostFacts(), raise_if_abandoned=go_on, sharding=sharers
    )


def save_all(folder: Path, ranks: int, order: Callable[[int], float] = lambda rank: 0.0, **more: object) -> Path:
    """All ranks at once, each as a thread that starts after its own delay."""

    def one(rank: int) -> Path:
        time.sleep(order(rank))
        return save_one(folder, rank, ranks, **more)  # type: ignore[arg-type]

    with ThreadPoolExecutor(ranks) as pool:
        made = list(pool.map(one, range(ranks)))
    assert set(made) == {made[0]}
    return made[0]


def wanted_by(rank: int, ranks: int) -> RowSelector:
    """The rows that a rank reads of the tensors of ROWS, and of the optimizer tensors that belong to them."""

    def rows(name: str) -> WantedRows | None:
        shape = ROWS[name.partition("/")[0]]
        return WantedRows(shape, rows_of(shape[0], rank, ranks))

    return rows


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items()
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_checkpoint_written_by_several_ranks_is_read_as_a_whole(tmp_path: Path, ranks: int) -> None:
    made = save_all(tmp_path / "c", ranks)
    assert verify_checkpoint(made) == []
    loaded = load_checkpoint(made)
    assert sorted(loaded.parts) == ["adapter.default", "optimizer.default", "random"]
    assert loaded.state == state_at(40)
    for part, expected in whole_parts().items():
        assert same(loaded.read_part(part), expected), part
    assert sorted(tree(tmp_path / "c")) == sorted({made.name, *(f"{made.name}/{file}" for file in bytes_of(made))})
    assert len(list(made.glob("adapter.default.shard-*"))) == ranks


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
@pytest.mark.parametrize("writers", [0, 2, 3])
def test_any_number_of_ranks_reads_the_rows_that_it_holds(tmp_path: Path, writers: int, readers: int) -> None:
    """0 writers: a run of one process, without shards."""
    if writers:
        made = save_all(tmp_path / "c", writers)
    else:
        made = save_parts(tmp_path / "c", 40, whole_parts(), state_at(40), keep=2, host=HostFacts())
    for rank in range(readers):
        loaded = load_checkpoint(made, verified=rank > 0)
        expected, _ = shared_out(whole_parts(), rank, readers)
        for part in ("adapter.default", "optimizer.default"):
            found = loaded.read_part(part, wanted_by(rank, readers))
            assert same(found, expected[part]), (rank, part)


def test_equal_contents_give_equal_bytes_in_any_order_of_ranks(tmp_path: Path) -> None:
    one = save_all(tmp_path / "one", 3)
    other = save_all(tmp_path / "other", 3, order=lambda rank: 0.1 * (2 - rank), attempt="cd-9")
    assert bytes_of(one) == bytes_of(other)


def test_torchs_own_tool_assembles_the_shards(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    made = save_all(tmp_path / "c", 3)
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    for file in made.glob("adapter.default.shard-*"):
        shutil.copy(file, tmp_path / "in")
    index = {name: 1 for name in ROWS}
    consolidate_safetensors_files(str(tmp_path / "in"), str(tmp_path / "out"), fqn_to_index_mapping=index)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 — not a mapping
    assert same(found, whole_parts()["adapter.default"])


def test_nothing_is_visible_until_the_last_rank_has_written(tmp_path: Path) -> None:
    folder, last = tmp_path / "c", threading.Event()
    save_parts(folder, 20, whole_parts(1), state_at(20), keep=2, host=HostFacts())
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(save_one, folder, 0, 3)
        pool.submit(save_one, folder, 1, 3).result()
        third = pool.submit(lambda: (last.wait(), save_one(folder, 2, 3)))
        assert [found.step for found in find_checkpoints(folder)] == [20] and not first.done()
        last.set()
        third.result(), first.result()
    assert [found.step for found in find_checkpoints(folder)] == [20, 40]
    assert all(found.problem is None for found in find_checkpoints(folder))


def test_remains_of_a_killed_save_are_never_taken_for_this_save(tmp_path: Path) -> None:
    """A rank that comes before rank 0 finds the folder of a killed save: it waits until rank 0 has made a new one."""
    folder = tmp_path / "c"
    remains = folder / ".saving-step-00000040"
    remains.mkdir(parents=True)
    for name in ("attempt-old-7", "adapter.default.shard-00001-of-00002.safetensors", "wrote-00001-old-7.json"):
        (remains / name).write_text("{}")
    made = save_all(folder, 2, order=lambda rank: 0.2 * (1 - rank))
    assert verify_checkpoint(made) == [] and os.listdir(folder) == ["step-00000040"]


def test_a_rank_of_an_earlier_job_cannot_write_into_a_later_save(tmp_path: Path) -> None:
    """Rank 0 was killed; another rank is in the middle of its files while the next job saves the same step."""
    folder, calls, inside, go = tmp_path / "c", iter(range(1000)), threading.Event(), threading.Event()
    begun = folder / ".saving-step-00000040"
    begun.mkdir(parents=True)
    (begun / "attempt-old-1").touch()

    def slow() -> None:
        if next(calls) == 1:  # the folder and its first file are open
            inside.set()
            assert go.wait(60)

    with ThreadPoolExecutor(1) as pool:
        stale = pool.submit(save_one, folder, 1, 2, attempt="old-1", seed=5, go_on=slow)
        assert inside.wait(60)
        made = save_all(folder, 2, attempt="new-1")
        go.set()
        with pytest.raises(SaveAbandonedError, match="rank 0 abandoned the checkpoint"):
            stale.result()
    assert verify_checkpoint(made) == [] and os.listdir(folder) == [made.name]
    for part, expected in whole_parts().items():
        assert same(load_checkpoint(made).read_part(part), expected), part


def test_an_abandoned_save_leaves_nothing_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_parts(folder, 20, whole_parts(1), state_at(20), keep=2, host=HostFacts())
    before = tree(folder)
    stop = threading.Event()

    def go_on() -> None:
        if stop.is_set():
            raise CheckpointError("given up")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(save_one, folder, 0, 3, go_on=go_on)
        pool.submit(save_one, folder, 1, 3, go_on=go_on).result()
        stop.set()  # rank 2 never comes
        with pytest.raises(CheckpointError, match="given up"):
            first.result()
    assert tree(folder) == before
    with pytest.raises(CheckpointError, match="given up"):
        save_one(folder, 1, 3, go_on=go_on)


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_rank_that_writes_for_an_abandoned_save_reports_only_that(tmp_path: Path, moment: int) -> None:
    """Inside a file or between two: the error is that rank 0 abandoned the save, not that the folder is missing."""
    begun, calls = tmp_path / "c" / ".saving-step-00000040", iter(range(1000))
    begun.mkdir(parents=True)
    (begun / "attempt-ab-1").touch()

    def go_on() -> None:
        if next(calls) == moment:
            discard_sharded_save(begun, CheckpointSharding(0, 2, "ab-1", {}))

    with pytest.raises(SaveAbandonedError):
        save_one(tmp_path / "c", 1, 2, go_on=go_on)
    assert not begun.exists()


def test_disk_space_is_required_for_all_ranks(tmp_path: Path) -> None:
    class Full(HostFacts):
        def free_bytes(self, folder: Path) -> int:
            return 20_000

    with pytest.raises(CheckpointError, match="are missing"):
        save_one(tmp_path / "c", 0, 4, host=Full())
    assert os.listdir(tmp_path / "c") == []


SECOND = "adapter.default.shard-00001-of-00002.safetensors"
BEGINS = {"a.weight": 4, "b.weight": 1, "c.bias": 3}


@pytest.mark.parametrize(
    ("tensors", "begins", "message"),
    [
        ({"a.weight": torch.zeros(3, 3)}, {"a.weight": 5}, "continues at row 5, expected row 4"),
        ({"a.weight": torch.zeros(3, 3)}, {"a.weight": 3}, "continues at row 3, expected row 4"),
        ({"a.weight": torch.zeros(3, 4)}, {"a.weight": 4}, "has another dtype or shape than in"),
        ({"a.weight": torch.zeros(3, 3).double()}, {"a.weight": 4}, "has another dtype or shape than in"),
    ],
)
def test_rows_that_do_not_fit_together_are_reported(
    tmp_path: Path, tensors: dict[str, torch.Tensor], begins: dict[str, int], message: str
) -> None:
    made = save_all(tmp_path / "c", 2)
    forge_shard(made, SECOND, tensors, begins)
    (problem,) = verify_checkpoint(made)
    assert message in problem and SECOND in problem
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(made).read_part("adapter.default")


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("left", [{"c.bias": torch.zeros(1)}, {}], ids=["a row is left", "none is left"])
def test_a_tensor_whose_last_rows_are_lost_is_refused_by_every_reader(
    tmp_path: Path, left: dict[str, torch.Tensor], readers: int
) -> None:
    """c.bias has 5 rows, 3 and 2: a reader knows that, the files do not."""
    made = save_all(tmp_path / "c", 2)
    forge_shard(
        made, SECOND, {"a.weight": torch.zeros(3, 3), "b.weight": torch.zeros(1, 2, 5).bfloat16(), **left}, BEGINS
    )
    file = SECOND if left else SECOND.replace("00001-of", "00000-of")
    for rank in range(readers):
        with pytest.raises(CheckpointError, match=rf"{file}: c.bias of adapter.default has the shape .*, not \[5\]"):
            load_checkpoint(made).read_part("adapter.default", wanted_by(rank, readers))


def test_half_a_tensor_in_one_file_is_not_taken_for_a_shard(tmp_path: Path) -> None:
    parts = whole_parts()
    parts["adapter.default"]["a.weight"] = parts["adapter.default"]["a.weight"][:4]
    made = save_parts(tmp_path / "c", 40, parts, state_at(40), keep=2, host=HostFacts())
    with pytest.raises(CheckpointError, match=r"a\.weight of adapter\.default has the shape"):
        load_checkpoint(made).read_part("adapter.default", wanted_by(0, 2))


def test_a_part_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    made = save_all(tmp_path / "c", 3)
    shutil.copytree(made, tmp_path / "kept")
    (made / "adapter.default.shard-00001-of-00003.safetensors").unlink()
    assert "No such file" in verify_checkpoint(made)[0]
    assert load_latest(tmp_path / "c") is None
    shutil.rmtree(made)
    shutil.copytree(tmp_path / "kept", made)
    content = bytearray((made / "adapter.default.shard-00002-of-00003.safetensors").read_bytes())
    content[-1] ^= 1
    (made / "adapter.default.shard-00002-of-00003.safetensors").write_bytes(content)
    assert "has changed since it was written" in verify_checkpoint(made)[0]


def test_invalid_sharding_metadata_is_reported(tmp_path: Path) -> None:
    for number, text in enumerate(('{"a.weight":{"saved_offsets":[1,1]}}', "[1]", "{", '{"a.weight":7}')):
        file = tmp_path / f"{number}"
        tensors = {"a.weight": torch.zeros(2, 2)}
        layout = tensor_file.plan_tensor_file(tensors, {tensor_file.SHARDING_KEY: text})
        file.write_bytes(b"".join(layout.chunks()))
        with file.open("rb") as opened:
            header, entries = tensor_file.read_header(opened.fileno(), layout.nbytes)
        with pytest.raises(tensor_file.MalformedTensorFileError):
            tensor_file.parse_row_offsets(header, entries)


def test_commands_count_a_sharded_part_once(tmp_path: Path) -> None:
    made = save_all(tmp_path / "checkpoints", 2)
    (found,) = find_checkpoints(tmp_path / "checkpoints")
    assert found.parts == ("adapter.default", "optimizer.default", "random") and found.problem is None
    assert found.nbytes == sum(len(content) for name, content in bytes_of(made).items() if name != "manifest.json")
    checked = CliRunner().invoke(app, ["checkpoint", "verify", str(made)])
    assert checked.exit_code == 0 and ": intact, step 40" in checked.stdout
