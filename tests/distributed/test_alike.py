"""Processes with other settings or versions than the first do not begin, and what differs is named."""

from __future__ import annotations

import pytest

from supertuner.config.sources.load import load_config
from supertuner.core.errors import ConfigError
from supertuner.distributed.process_group import SingleProcess
from supertuner.distributed.same_start import require_same_config, settings_to_compare
from supertuner.distributed.torch_process_group import TorchProcessGroup
from tests.distributed.ranks import run_ranks


def _compared(group: TorchProcessGroup, own: dict[int, dict[str, str]]) -> str:
    words = {"supertuner": "1.0", "train.batch_size": "1", "run.seed": "7"}
    try:
        require_same_config(group, words | own.get(group.rank, {}))
    except ConfigError as error:
        return str(error)
    return ""


def test_processes_that_are_alike_begin():
    assert run_ranks(3, _compared, {}) == ["", "", ""]


def test_one_that_differs_is_named_by_all_with_what_differs():
    said = run_ranks(3, _compared, {2: {"train.batch_size": "4", "torch": "9"}})
    assert len(set(said)) == 1
    assert "train.batch_size: 1 for rank 0, 4 for rank 2" in said[0]
    assert "torch: not set for rank 0, 9 for rank 2" in said[0]
    assert "run.seed" not in said[0]


@pytest.mark.parametrize(("setting", "counts"), [("train.batch_size=3", True), ("arena.home=/elsewhere", False)])
def test_settings_of_a_node_may_be_its_own(setting, counts):
    plain = load_config(None, environ={}, check_paths=False).config
    other = load_config(None, environ={}, check_paths=False, sets=[setting]).config
    assert (settings_to_compare(plain) != settings_to_compare(other)) is counts


def test_one_process_is_like_itself():
    require_same_config(SingleProcess(), {})
