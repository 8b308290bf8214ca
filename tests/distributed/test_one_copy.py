"""One copy of the data per node: one rank stages, all encode, and they read what a single process reads."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from benchmarks.bench_node import measured
from supertuner.arena.home import ArenaHome
from tests.data.media_files import write
from tests.distributed.one_copy import digests, encode, refuse, stage
from tests.distributed.ranks import launched_ranks, run_launched
from tests.train.encoding.encoding_helpers import (
    arenas,
    config_of,
    encoding_spec,
    open_run,
    pictures,
    read_all_positions,
    tiny,
    without_caches,
)

VARYING = {"augment": {"flip": 0.5, "brightness": 0.4}, "captions": {"shuffle_tags": True, "dropout": 0.2}}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory):
    return tiny("wan2.2", tmp_path_factory.mktemp("model") / "wan")


def test_one_rank_stages_and_reports_and_the_others_follow(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 9)})
    found = run_launched(3, stage, tmp_path, config)
    titles = [[title for title, _, _ in sink.phases] for sink, _, _ in found]
    assert titles[0] == ["listing set0", "staging set0"]
    assert titles[1] == titles[2] == ["following the process of this node that stages set0"]
    assert "datasets[set0].arena" in found[0][0].decisions() and found[1][0].events == found[2][0].events == []
    assert len(found[0][1]) == 9 and found[0][1] == found[1][1] == found[2][1]
    assert found[0][2] == found[1][2] == found[2][2], "and the order is the same"
    assert len(arenas(tmp_path / "ram")) == 1


def test_ranks_reuse_staged_data_even_if_the_source_is_gone(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 4)})
    first = run_launched(2, stage, tmp_path / "a", config)
    shutil.rmtree(tmp_path / "images")
    again = run_launched(2, stage, tmp_path / "b", config)
    assert again[0][1] == again[1][1] == first[0][1]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.jpg": b"no picture", "b.jpg": b"neither"}, "2 of 2 files are broken"),
        ({"a.txt": "no picture"}, "datasets[set0]: no image files in"),
    ],
)
def test_a_failing_stager_ends_every_rank_with_its_error(tmp_path: Path, files: dict, words: str) -> None:
    given = {"instance_data_dir": write(tmp_path / "images", files)}
    with launched_ranks(3, stage, tmp_path, config_of(tmp_path, given)) as ranks:
        for rank, outcome in enumerate(ranks.ended()):
            assert outcome.error is not None and words in outcome.error
            if rank:
                assert "PeerError: process 0 of the 3 of this node" in outcome.error
    assert ArenaHome(tmp_path / "ram").list_arenas() == [], "nothing half staged is left"


def test_a_killed_stager_ends_every_rank_and_the_next_start_stages(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 3)})
    with launched_ranks(3, stage, tmp_path, config, "staging") as ranks:
        ranks.wait_for(tmp_path / "waiting")
        pid = ranks.pids[0]
        ranks.signal(0, signal.SIGKILL)
        outcomes = ranks.ended()
    for outcome in outcomes[1:]:
        assert (
            outcome.error is not None
            and f"(pid {pid}) ended without recording a reason" in outcome.error.splitlines()[-1]
        )
    shutil.rmtree(tmp_path / "barrier")
    found = run_launched(2, stage, tmp_path, config)
    assert len(found[1][1]) == 3


@pytest.mark.parametrize(
    ("mode", "cache"),
    [
        (None, {}),
        (None, {"vae_cache_type": "disk", "text_cache_type": "disk"}),
        (None, {"persistent_cache": True}),
        ("refresh_each_epoch", {}),
        ("disable_cache", {}),
    ],
)
def test_ranks_get_the_bits_of_one_process_and_no_sample_is_encoded_twice(
    tmp_path: Path, wan, mode: str | None, cache: dict
) -> None:
    changing = {**VARYING, "augmentations_cache_mode": mode} if mode else {}
    sets = ({"instance_data_dir": pictures(tmp_path / "images", 14), **changing},)
    alone = config_of(tmp_path / "one", *sets, cache=cache)
    with open_run(without_caches(alone), encoding_spec(*wan)) as run:
        law = digests(read_all_positions(*run, epochs=2))
    together = config_of(tmp_path / "many", *sets, cache=cache)
    found = run_launched(2, encode, tmp_path, together, Path(wan[1].source.path), 2, False, 28)
    assert all(one[2] == law for one in found)
    if mode is None:
        assert sum(one[0] for one in found) == 14
        captions = [caption for one in found for caption in one[1]]
        assert len(captions) == len(set(captions)) == 14


def test_an_epoch_is_made_even_if_some_ranks_never_request_it(tmp_path: Path, wan) -> None:
    changing = {"instance_data_dir": pictures(tmp_path / "images", 6), **VARYING}
    config = config_of(tmp_path, {**changing, "augmentations_cache_mode": "refresh_each_epoch"})
    with open_run(without_caches(config), encoding_spec(*wan)) as run:
        law = digests(read_all_positions(*run, epochs=5))
    found = run_launched(3, encode, tmp_path, config, Path(wan[1].source.path), 5, True, 30)
    assert found[0][2] == law


def test_a_further_rank_takes_hardly_any_private_memory(tmp_path: Path) -> None:
    """With a private plan and private tables, 20,000 samples would take 9 MB, and a million half a gigabyte."""
    _, further = measured(tmp_path, 20_000, ranks=2)
    assert further["own_mb"] < 5


@pytest.mark.parametrize("mode", ["static", "refresh_each_epoch"])
@pytest.mark.parametrize("then", ["fail", "wait"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_or_killed_encoder_ends_every_rank(tmp_path: Path, wan, mode: str, then: str, rank: int) -> None:
    changing = {"instance_data_dir": pictures(tmp_path / "images", 14), **VARYING, "augmentations_cache_mode": mode}
    config = config_of(tmp_path, changing)
    with launched_ranks(2, refuse, tmp_path, config, Path(wan[1].source.path), rank, then) as ranks:
        if then == "wait":
            ranks.wait_for(tmp_path / "waiting")
            ranks.signal(rank, signal.SIGKILL)
        outcomes = ranks.ended()
    other = outcomes[1 - rank].error or ""
    words = "the encoder broke; mend it" if then == "fail" else f"process {rank} of the 2 of this node"
    assert words in other.splitlines()[-1]
