"""Ranks are read from the launcher's variables; processes that would each train the whole run are refused."""

from __future__ import annotations

import pytest

from supertuner.config.sources.launcher import (
    SINGLE_PROCESS_ENVIRONMENT,
    LauncherEnvironment,
    read_launcher_environment,
    require_single_process,
)
from supertuner.core.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def _refusal(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_launcher_environment(environ)
    return str(caught.value)


def test_without_a_launcher_there_is_a_single_process():
    assert read_launcher_environment({}) == SINGLE_PROCESS_ENVIRONMENT
    assert read_launcher_environment({"MASTER_ADDR": "somewhere", "MASTER_PORT": "1"}) == SINGLE_PROCESS_ENVIRONMENT


def test_ranks_are_read_from_torchruns_variables():
    assert read_launcher_environment(TORCHRUN) == LauncherEnvironment(
        rank=5, world_size=8, local_rank=1, local_world_size=4
    )
    assert not read_launcher_environment(TORCHRUN).is_main_process


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_variables_are_refused(name):
    left = {other: value for other, value in TORCHRUN.items() if other != name}
    assert f"{name}: not set" in _refusal(left)
    assert "torchrun" in _refusal(left)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "8"), ("LOCAL_RANK", "4"), ("LOCAL_WORLD_SIZE", "9"), ("RANK", "0"), ("RANK", "-1")]
)
def test_inconsistent_ranks_are_refused(name, value):
    assert f"{name}" in _refusal({**TORCHRUN, name: value})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_several_processes_without_ranks_are_refused(name):
    assert read_launcher_environment({name: "1"}) == SINGLE_PROCESS_ENVIRONMENT
    assert read_launcher_environment({name: "8", **TORCHRUN}).world_size == 8, (
        "the launcher started torchrun once on each node"
    )
    message = _refusal({name: "8"})
    assert "started 8 processes without RANK and WORLD_SIZE" in message
    assert "torchrun" in message


def test_a_single_process_of_accelerate_configured_for_several_is_refused():
    """`accelerate launch --cpu --num_processes 2` silently starts one process."""
    alone = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no"}
    assert read_launcher_environment(alone) == SINGLE_PROCESS_ENVIRONMENT
    message = _refusal({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    assert "configured for several processes, but started only one" in message


def test_a_single_process_command_is_refused_if_a_launcher_started_several():
    with pytest.raises(ConfigError) as refused:
        require_single_process(TORCHRUN, "stage")
    assert "start `supertuner stage` without torchrun" in str(refused.value)
    assert "`supertuner train` stages and encodes too" in str(refused.value)
    for alone in ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"RANK": "1", "WORLD_SIZE": "2"}):
        require_single_process(alone, "stage")
