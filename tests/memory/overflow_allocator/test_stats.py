"""`memory.stats()`: importable without torch, with the key names of the GH200 forks, and mirrored from the plugin field
by field.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from supertuner import memory
from supertuner.memory.overflow_allocator import plugin as overflow
from supertuner.memory.overflow_allocator.plugin import OverflowStats, find_plugin
from supertuner.memory.overflow_allocator.stats import STAT_KEYS

ROOT = Path(__file__).parents[3]
NO_PLUGIN = not isinstance(find_plugin(), Path)


def test_the_package_is_imported_without_torch_and_without_the_configuration():
    code = (
        "import sys; from supertuner import memory; assert not {'torch', 'pydantic'} & sys.modules.keys(); memory.stats"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_stats_remains_a_function_after_its_module_is_imported():

    assert callable(memory.stats)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_a_device_is_accepted_in_the_forms_that_torch_accepts(device):
    assert memory.stats(device).keys() == memory.stats(0).keys()


@pytest.mark.skipif(NO_PLUGIN, reason="the plugin was not built")
def test_without_overflow_the_stage_and_all_counts_are_zero():
    figures = memory.stats()
    numbers = {key: value for key, value in figures.items() if key.startswith("uvm.") and key != "uvm.last_error.call"}
    assert figures["uvm.stage"] == 0 and len(numbers) == len(STAT_KEYS) - 1
    assert set(numbers.values()) == {0}


def test_without_the_plugin_its_keys_are_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(overflow, "__file__", str(tmp_path / "overflow.py"))
    assert not [key for key in memory.stats() if key.startswith("uvm.")]


def test_every_key_is_a_field_of_overflow_stats():
    assert STAT_KEYS.keys() <= set(OverflowStats.__slots__)


def test_the_documentation_names_every_key():
    page = (ROOT / "docs/overflow.md").read_text()
    assert [f"uvm.{key}" for key in STAT_KEYS.values() if f"`uvm.{key}`" not in page] == []


def test_the_ctypes_structure_has_the_fields_of_the_c_struct_in_order():
    source = (ROOT / "supertuner/memory/overflow_allocator/_overflow.c").read_text()
    body = re.search(r"struct statistics \{(.*?)\n\};", source, re.DOTALL)
    assert body is not None
    text = re.sub(r"/\*.*?\*/", "", body[1])
    names: list[str] = []
    for field in re.findall(r"\w+(?:\[\d+\])?(?=[,;])", text):
        base, _, count = field.partition("[")
        names += [f"{kind}_{base}" for kind in ("device", "managed")] if count == "2]" else [base]
    assert names == [name for name, _ in overflow._CStatistics._fields_]
