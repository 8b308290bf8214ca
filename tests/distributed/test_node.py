"""Which ranks share a node and meet there, and that every node has the same data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from supertuner.arena.home import ArenaHome
from supertuner.arena.node_peers import NO_PEERS, join_node_peers
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ArenaError, PeerError, TrainError
from supertuner.core.events import NullSink
from supertuner.data.corpus_loader import open_corpus
from supertuner.distributed.node import RankLocation, open_node_peers, ranks_on_same_node
from supertuner.distributed.same_start import require_same_data
from tests.distributed.ranks import run_ranks
from tests.train.encoding.encoding_helpers import config_of, pictures


def seats(*of: tuple[str, int]) -> list[RankLocation]:
    return [RankLocation(machine, local) for machine, local in of]


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        (seats(("a", 0), ("a", 1), ("b", 0), ("b", 1)), [[0, 1], [2, 3]]),
        (seats(("a", 0), ("b", 0), ("a", 1), ("b", 1)), [[0, 2], [1, 3]]),  # distributed round-robin
        (seats(("a", 0), ("a", 1), ("a", 0), ("a", 1)), [[0, 1], [2, 3]]),  # two launchers on one machine
        (seats(("a", 0), ("a", 1), ("a", 2), ("b", 0)), [[0, 1, 2], [3]]),  # nodes of different sizes
        (seats(("a", 0)), [[0]]),
    ],
)
def test_ranks_of_one_launcher_on_one_machine_share_a_node(given: list[RankLocation], nodes: list[list[int]]) -> None:
    for node in nodes:
        for rank in node:
            assert ranks_on_same_node(given, rank) == node


def peers_of(group, config: RunConfig) -> tuple[int, int, bytes]:
    with open_node_peers(config, group) as peers:
        if peers.is_first:
            peers.publish("a word", b"of the first")
        heard = (
            peers.read_published("a word") if peers.is_first else peers.wait_with_progress("a word", "it", NullSink())
        )
        group.all_reduce_max([0])
    return peers.local_rank, peers.local_world_size, heard or b""


def test_ranks_meet_on_their_node_and_leave_no_files(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 1)})
    found = run_ranks(3, peers_of, config)
    assert found == [(number, 3, b"of the first") for number in range(3)]
    assert [path.name for path in (tmp_path / "ram").iterdir()] == [".supertuner-arenas"]


def apart(group, configs: list[RunConfig]) -> str:
    """Each rank is a separate node with its own arena folder."""
    group = dataclasses.replace(group, local_rank=0, local_world_size=1)
    config = configs[group.rank]
    with open_node_peers(config, group) as peers:
        assert peers == NO_PEERS
        with open_corpus(config, RunContext.silent(config.run.output_dir).with_peers(peers)) as corpus:
            try:
                require_same_data(group, peers, [corpus])
            except TrainError as error:
                return str(error)
    return "the same"


@pytest.mark.parametrize(
    ("counts", "message"),
    [((4, 4), "the same"), ((4, 3), "datasets[set0] has 4 samples on"), ((3, 4), "datasets[set0] has 3 samples on")],
)
def test_all_ranks_refuse_nodes_with_different_files_and_name_the_dataset(
    tmp_path: Path, counts: tuple[int, int], message: str
) -> None:
    configs = [
        config_of(tmp_path / str(node), {"instance_data_dir": pictures(tmp_path / str(node) / "images", count)})
        for node, count in enumerate(counts)
    ]
    assert all(one.startswith(message) for one in run_ranks(2, apart, configs))


def test_a_different_caption_is_found(tmp_path: Path) -> None:
    configs = [
        config_of(tmp_path / str(node), {"instance_data_dir": pictures(tmp_path / str(node) / "images", 2)})
        for node in range(2)
    ]
    (tmp_path / "1" / "images" / "p1.txt").write_text("another caption")
    assert all("as many, but different ones" in one for one in run_ranks(2, apart, configs))


def test_a_local_rank_is_taken_once(tmp_path: Path) -> None:
    home = ArenaHome(tmp_path / "home")
    with (
        join_node_peers(home, "job", 0, 2, lambda: None),
        pytest.raises(ArenaError, match="another process has local rank 0"),
        join_node_peers(home, "job", 0, 2, lambda: None),
    ):
        pass


def test_a_failed_rank_leaves_its_error_and_a_finished_one_does_not(tmp_path: Path) -> None:
    home = ArenaHome(tmp_path / "home")
    with join_node_peers(home, "job", 0, 3, lambda: None) as first:
        with join_node_peers(home, "job", 1, 3, lambda: None), join_node_peers(home, "job", 2, 3, lambda: None):
            first.check_peers()
        first.check_peers()
        with pytest.raises(TrainError), join_node_peers(home, "job", 1, 3, lambda: None):
            raise TrainError("the disk is on fire; put it out")
        with pytest.raises(PeerError, match=r"process 1 of the 3 of this node .* failed: the disk is on fire"):
            first.check_peers()
    assert not (tmp_path / "home" / ".peers-job").exists()
