"""Whether hints are on: the complete table of requests and machine support, and the sources of the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from supertuner.config.sources.load import load_config
from supertuner.memory.driver import DeviceProperties, NotAvailable
from supertuner.memory.hints import api as hints
from supertuner.memory.hints.enabled import HintSupport, decide_hints, device_hint_support, hint_support

YES, NO = HintSupport(True, "the machine can"), HintSupport(False, "the machine cannot")
GH200 = DeviceProperties(0, "GH200", 96 << 30, (9, 0), True, True, True, True, True, False, 1, 0)
UNIFIED, DISK = ("unified_memory", "disk"), ("disk", "none")


@pytest.mark.parametrize(
    ("override", "setting", "cache_types", "asked", "by"),
    [
        (True, None, DISK, True, "set_uvm_hint_override(True)"),
        (True, False, DISK, True, "set_uvm_hint_override(True)"),
        (True, True, UNIFIED, True, "set_uvm_hint_override(True)"),
        (False, True, UNIFIED, False, "set_uvm_hint_override(False)"),
        (False, None, UNIFIED, False, "set_uvm_hint_override(False)"),
        (False, None, DISK, False, "set_uvm_hint_override(False)"),
        (None, True, DISK, True, "gh200_optimizations.enable_uvm_hints is true"),
        (None, True, UNIFIED, True, "gh200_optimizations.enable_uvm_hints is true"),
        (None, False, UNIFIED, False, "gh200_optimizations.enable_uvm_hints is false"),
        (None, False, DISK, False, "gh200_optimizations.enable_uvm_hints is false"),
        (None, None, UNIFIED, True, "a cache of type unified_memory requests them"),
        (None, None, DISK, None, "nothing requests them"),
        (None, None, (), None, "nothing requests them"),
    ],
)
def test_the_first_source_that_is_set_decides_and_the_machine_must_support_hints(
    override: bool | None, setting: bool | None, cache_types: tuple[str, ...], asked: bool | None, by: str
) -> None:
    here, elsewhere = (decide_hints(override, setting, cache_types, support) for support in (YES, NO))
    assert (here.asked, elsewhere.asked) == (asked, asked)
    assert here.reason.startswith(by)
    assert here.on is (asked is True)
    assert not elsewhere.on
    assert elsewhere.reason == (f"{by}, but the machine cannot" if asked else by)


def test_the_decision_is_printed_as_one_line() -> None:
    line = str(decide_hints(None, None, UNIFIED, device_hint_support(GH200)))
    assert line == (
        "residency hints on: a cache of type unified_memory requests them; GH200 accepts hints for managed memory and "
        "ordinary memory through the host's page tables"
    )


@pytest.mark.parametrize(
    ("device", "can", "why"),
    [
        (GH200, True, "managed memory and ordinary memory through the host's page tables"),
        (replace(GH200, host_page_tables=False), True, "managed memory and ordinary memory"),
        (replace(GH200, pageable=False), True, "managed memory"),
        (replace(GH200, managed=False), True, "ordinary memory"),
        (replace(GH200, integrated=True), False, "one pool"),
        (replace(GH200, pageable=False, concurrent_managed=False), False, "no managed memory that accepts hints"),
        (DeviceProperties(0, "a no_request GPU", 1 << 30), False, "no managed memory that accepts hints"),
    ],
)
def test_the_properties_of_a_gpu_decide_whether_it_supports_hints(
    device: DeviceProperties, can: bool, why: str
) -> None:
    found = device_hint_support(device)
    assert found.supported is can
    assert why in found.reason


def test_without_a_driver_the_reason_is_that_of_the_missing_driver() -> None:
    assert hint_support(NotAvailable("no NVIDIA driver (libcuda.so.1) on this machine")) == HintSupport(
        False, "no NVIDIA driver (libcuda.so.1) on this machine"
    )


ENVIRONMENT = {"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1"}
OURS = {"SUPERTUNER_GH200_OPTIMIZATIONS__ENABLE_UVM_HINTS": "false"}


@pytest.mark.parametrize(
    ("environ", "file", "sets", "expected"),
    [
        ({}, None, [], None),
        (ENVIRONMENT, None, [], True),
        (ENVIRONMENT | OURS, None, [], False),
        (ENVIRONMENT | OURS, True, [], True),
        (ENVIRONMENT, False, [], False),
        (ENVIRONMENT, False, ["gh200_optimizations.enable_uvm_hints=true"], True),
        ({"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": ""}, None, [], None),
    ],
)
def test_the_setting_comes_from_the_configuration_in_its_own_order(
    tmp_path: Path, environ: dict[str, str], file: bool | None, sets: list[str], expected: bool | None
) -> None:
    path = None
    if file is not None:
        path = tmp_path / "run.json"
        path.write_text(json.dumps({"gh200_optimizations": {"enable_uvm_hints": file}}))
    loaded = load_config(path, sets=sets, environ=environ, check_paths=False)
    assert loaded.config.gh200_optimizations.enable_uvm_hints is expected


@pytest.fixture
def fresh() -> Iterator[None]:
    hints.reset_hints()
    yield
    hints.reset_hints()


@pytest.fixture
def no_request(fresh: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without any request, whatever the environment of the test run."""
    for name in ("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "SUPERTUNER_GH200_OPTIMIZATIONS__ENABLE_UVM_HINTS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_without_a_request_has_no_hints(no_request: pytest.MonkeyPatch) -> None:
    assert not hints.gh200_uvm_enabled()
    assert hints.hints_enabled().reason == "nothing requests them"
    outcome = hints.prefer_cpu_residency(torch.zeros(4))
    assert (outcome.status, outcome.reason) == ("no-effect", "hints are off: nothing requests them")


def test_the_environment_variable_of_the_forks_requests_hints(no_request: pytest.MonkeyPatch) -> None:
    no_request.setenv("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "1")
    hints.use_hints(
        hints.ResidencyHints(NotAvailable("no GPU in this test")),
        True,
        (),
        hint_support(NotAvailable("no GPU in this test")),
    )
    assert not hints.gh200_uvm_enabled()
    outcome = hints.prefetch_to_device(torch.zeros(4))
    assert outcome.status == "unsupported"
    assert outcome.reason.endswith("no GPU in this test")


def test_the_override_takes_precedence_until_it_is_removed(fresh: None) -> None:
    hints.use_hints(hints.ResidencyHints(NotAvailable("none")), True, (), YES)
    assert hints.gh200_uvm_enabled()
    hints.set_uvm_hint_override(False)
    assert not hints.gh200_uvm_enabled()
    assert hints.optimize_batch_for_gh200([torch.zeros(4)] * 3).rows == (
        ("no-effect", "hints are off: set_uvm_hint_override(False)", 3),
    )
    hints.set_uvm_hint_override(None)
    assert hints.gh200_uvm_enabled()


@pytest.mark.parametrize("value", ["0", "no", 0, 1])
def test_an_override_that_is_not_a_bool_is_refused_without_a_change(fresh: None, value: object) -> None:
    with pytest.raises(TypeError, match=f"takes True, False or None, not {value!r}"):
        hints.set_uvm_hint_override(value)  # type: ignore[arg-type]
    assert hints.uvm_hint_override() is None


def test_a_run_without_hints_takes_precedence_over_the_environment_until_it_ends(
    no_request: pytest.MonkeyPatch,
) -> None:
    no_request.setenv("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "1")
    hints.use_hints(None, False, UNIFIED, YES)
    assert hints.hints_enabled().reason == "gh200_optimizations.enable_uvm_hints is false"
    hints.drop_hints()
    assert hints.hints_enabled().reason.startswith("gh200_optimizations.enable_uvm_hints is true")


def test_the_environment_of_a_script_is_read_through_the_configuration(no_request: pytest.MonkeyPatch) -> None:
    no_request.setenv("SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "1")
    no_request.setenv("SUPERTUNER_GH200_OPTIMIZATIONS__ENABLE_UVM_HINTS", "false")
    assert hints.hints_enabled().asked is False
