"""Ranks whose settings or versions differ from those of rank 0 do not start, and the error names the difference."""

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


def test_ranks_with_equal_settings_start():
    assert run_ranks(3, _compared, {}) == ["", "", ""]


def test_all_ranks_name_the_rank_that_differs_and_the_difference():
    messages = run_ranks(3, _compared, {2: {"train.batch_size": "4", "torch": "9"}})
    assert len(set(messages)) == 1
    assert "train.batch_size: 1 for rank 0, 4 for rank 2" in messages[0]
    assert "torch: not set for rank 0, 9 for rank 2" in messages[0]
    assert "run.seed" not in messages[0]


@pytest.mark.parametrize(("setting", "counts"), [("train.batch_size=3", True), ("arena.home=/elsewhere", False)])
def test_node_specific_settings_may_differ(setting, counts):
    plain = load_config(None, environ={}, check_paths=False).config
    other = load_config(None, environ={}, check_paths=False, sets=[setting]).config
    assert (settings_to_compare(plain) != settings_to_compare(other)) is counts


def test_a_single_process_has_nothing_to_compare():
    require_same_config(SingleProcess(), {})
