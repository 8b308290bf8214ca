"""The GH200 forks' keys in torch's allocator variables become settings, are checked, and are removed for torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.sources.alloc_conf import (
    ALLOC_CONF_VARIABLES,
    SETTING_BY_KEY,
    memory_fraction,
    parse_entries,
    strip_uvm_keys,
)
from supertuner.config.sources.environment import environment_layers, strip_uvm_keys_for_torch
from supertuner.core.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs/configuration.md"
FORK_KEYS = "use_uvm:True,uvm_oversubscription_ratio:3.0,uvm_access_pattern:cpu_first"
TORCH = "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8"


@pytest.mark.parametrize("variable", ALLOC_CONF_VARIABLES)
def test_the_forks_keys_become_settings(load_text, variable):
    loaded = load_text({}, environ={variable: f"max_split_size_mb:64,{FORK_KEYS}"})
    overflow = loaded.config.memory.overflow
    assert (overflow.enabled, overflow.oversubscription_ratio, overflow.access_pattern) == (True, 3.0, "cpu_first")
    assert loaded.origins["memory.overflow.enabled"] == f"environment: {variable} use_uvm"


def test_the_forks_variables_ours_and_the_file_override_torchs_variables(load_text):
    environ = {"PYTORCH_CUDA_ALLOC_CONF": FORK_KEYS, "PYTORCH_ALLOC_CONF": "uvm_oversubscription_ratio:4"}

    def ratio(tree=None, **more: str) -> float:
        return load_text(tree or {}, environ={**environ, **more}).config.memory.overflow.oversubscription_ratio

    assert ratio() == 4.0
    assert ratio(GH200_UVM_OVERSUBSCRIPTION_RATIO="6") == 6.0
    assert ratio(GH200_UVM_OVERSUBSCRIPTION_RATIO="6", SUPERTUNER_MEMORY__OVERFLOW__OVERSUBSCRIPTION_RATIO="7") == 7.0
    assert ratio({"memory": {"overflow": {"oversubscription_ratio": 8.0}}}) == 8.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("uvm_oversubscription_ratio:lots", ("PYTORCH_CUDA_ALLOC_CONF uvm_oversubscription_ratio", '"lots"')),
        ("uvm_oversubscription_ratio:0.5", ("PYTORCH_CUDA_ALLOC_CONF uvm_oversubscription_ratio", "from 1 to 100")),
        ("uvm_access_pattern:gpu_frist", ("PYTORCH_CUDA_ALLOC_CONF uvm_access_pattern", 'did you mean "gpu_first"?')),
        ("use_uvm:maybe", ("PYTORCH_CUDA_ALLOC_CONF use_uvm", "true or false")),
        ("use_uvm", ("PYTORCH_CUDA_ALLOC_CONF: use_uvm: has no value",)),
        (
            "uvm_oversubscription:2",
            ("PYTORCH_CUDA_ALLOC_CONF: uvm_oversubscription: not a setting", "did you mean uvm_"),
        ),
        ("uvm_x:2", ("uvm_x: not a setting; known here: use_uvm, uvm_oversubscription_ratio, uvm_access_pattern",)),
        ("use_uvm:True,per_process_memory_fraction:0.5", ("per_process_memory_fraction: 0.5", "counts spilled memory")),
    ],
)
def test_problems_name_the_variable_and_the_key(load_text, text, parts):
    with pytest.raises(ConfigError) as caught:
        load_text({}, environ={"PYTORCH_CUDA_ALLOC_CONF": text})
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_torchs_own_keys_are_left_alone(load_text, tmp_path):
    assert (
        list(
            environment_layers(
                {"PYTORCH_CUDA_ALLOC_CONF": f"{TORCH},no_such_key:1,[", "PYTORCH_ALLOC_CONF": ","}, tmp_path
            )
        )
        == []
    )
    assert strip_uvm_keys(f"{TORCH}, backend:native") == f"{TORCH}, backend:native"
    assert strip_uvm_keys(f"{FORK_KEYS},{TORCH},uvm_other:1") == TORCH
    assert strip_uvm_keys(FORK_KEYS) == ""


@given(st.text("uvm_se:,[]>T 1", max_size=40))
def test_any_text_is_parsed_and_no_key_of_torch_is_lost(text):
    rest = strip_uvm_keys(text)
    assert [entry.source_text for entry in parse_entries(rest)] == [
        entry.source_text for entry in parse_entries(text) if not entry.is_uvm_key
    ]
    assert not any(entry.is_uvm_key for entry in parse_entries(rest))


def test_the_memory_fraction_is_returned_as_text():
    assert memory_fraction(f"{TORCH},per_process_memory_fraction:0.25") == "0.25"
    assert memory_fraction(FORK_KEYS) is None


def test_torch_does_not_see_the_forks_keys_and_later_loads_still_do(load_text, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"{FORK_KEYS},{TORCH}")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "use_uvm:True,uvm_access_pattern:balanced")
    monkeypatch.setenv("GH200_UVM_OVERSUBSCRIPTION_RATIO", "6")
    for setting in SETTING_BY_KEY.values():  # so that monkeypatch restores the variables set below
        monkeypatch.delenv(f"SUPERTUNER_{setting.replace('.', '__').upper()}", raising=False)
        monkeypatch.setenv(f"SUPERTUNER_{setting.replace('.', '__').upper()}", "")
    before = load_text({}, environ=dict(os.environ)).config.memory.overflow
    assert strip_uvm_keys_for_torch() == ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == TORCH
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    after = load_text({}, environ=dict(os.environ)).config.memory.overflow
    assert after == before and (after.enabled, after.oversubscription_ratio) == (True, 6.0)
    assert strip_uvm_keys_for_torch() == ()


def test_the_docs_list_every_key_with_its_setting():
    for key, setting in SETTING_BY_KEY.items():
        assert re.search(rf"`{key}` \| `{re.escape(setting)}` \|", DOCS.read_text()), key
