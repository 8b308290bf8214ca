"""`st.hints` reports outcomes on every machine; `st.adapters` reads, converts and merges files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import supertuner as st
from supertuner.core.errors import ModelError
from supertuner.memory.hints.api import reset_hints
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from tests.train.export.test_adapter_files import wan_lora

HINTS = ("prefetch", "prefer_cpu", "prefer_gpu", "accessed_by", "read_mostly")


@pytest.fixture
def clean_hints() -> Iterator[None]:
    reset_hints()
    yield
    reset_hints()


@pytest.mark.requires(not torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("name", HINTS)
def test_without_a_gpu_each_hint_is_unsupported_with_the_reason(name: str, clean_hints: None) -> None:
    outcome = getattr(st.hints, name)(torch.ones(1 << 20))
    assert outcome.status is st.hints.HintStatus.UNSUPPORTED and "driver" in outcome.reason
    assert json.loads(json.dumps(outcome.to_dict()))["status"] == "unsupported"


@pytest.mark.parametrize("name", HINTS)
def test_hints_that_are_turned_off_have_no_effect(name: str, clean_hints: None) -> None:
    st.hints.enable(False)
    outcome = getattr(st.hints, name)(torch.ones(1 << 20))
    assert outcome.status is st.hints.HintStatus.NO_EFFECT and outcome.reason.startswith("hints are off")


def test_the_outcomes_of_a_batch_are_counted(clean_hints: None) -> None:
    st.hints.enable(False)
    summary = st.hints.place_batch({"latents": torch.ones(4), "text": [torch.ones(2), torch.ones(3)]})
    assert [row["count"] for row in summary.to_dict()["rows"]] == [3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(wan_lora(KEY_SCHEMES["kohya"], 2.0, torch.float32), tmp_path / "cat_low_noise.safetensors")
    return tmp_path / "cat_low_noise.safetensors"


def test_an_adapter_is_loaded_with_the_keys_of_a_scheme(file: Path) -> None:
    adapter = st.adapters.load(file)
    assert (adapter.scheme, adapter.experts) == ("kohya", ("low_noise",)) and "wan2.2" in adapter.families
    assert all(key.endswith(("lora_A.weight", "lora_B.weight")) for key in adapter.tensors)
    shown = json.loads(json.dumps(adapter.to_dict()))
    assert shown["tensors"].keys() == adapter.tensors.keys()


def test_a_converted_file_holds_what_load_returns(file: Path, tmp_path: Path) -> None:
    done = st.adapters.convert(str(file), "diffusers")
    assert done.path == tmp_path / "cat_low_noise.diffusers.safetensors"
    assert (done.from_scheme, done.to_scheme) == ("kohya", "diffusers")
    expected, written = st.adapters.load(file).tensors, load_file(done.path)
    assert written.keys() == expected.keys() and len(written) == done.tensors
    assert all(torch.equal(written[key], tensor) for key, tensor in expected.items())
    with pytest.raises(ModelError, match="exists"):
        st.adapters.convert(file, "diffusers")
    assert st.adapters.convert(file, "diffusers", overwrite=True) == done


def test_an_adapter_is_inspected(file: Path) -> None:
    found = st.adapters.inspect(str(file))
    assert (found.scheme, found.experts, found.unknown) == ("kohya", ("low_noise",), {})
    assert sum(found.kinds.values()) == len(found.norms) and found.norm is not None and found.norm > 0
    assert json.loads(json.dumps(found.to_dict()))["matched"] == found.keys


def test_an_adapter_is_exported_for_a_program(file: Path, tmp_path: Path) -> None:
    [done] = st.adapters.export(str(file), "comfyui")
    assert done.path == tmp_path / "cat_low_noise.comfyui.safetensors" and done.from_scheme == "kohya"
    assert len(load_file(done.path)) == done.tensors
    with pytest.raises(ModelError, match="exists"):
        st.adapters.export(file, "comfyui")
    assert st.adapters.export(file, "comfyui", overwrite=True) == [done]


def test_every_key_scheme_has_an_example() -> None:
    examples = st.adapters.schemes()
    assert examples.keys() == KEY_SCHEMES.keys() and all("to_q" in key or "q" in key for key in examples.values())


def test_a_merge_counts_the_changed_layers(file: Path, tmp_path: Path) -> None:
    build_pipeline(tiny_wan_pipeline, seed=3).save_pretrained(tmp_path / "base")
    merged = st.adapters.merge(file, tmp_path / "base", tmp_path / "out", strength=0.5)
    assert merged.to_dict() == {
        "path": str(tmp_path / "out"),
        "changed_layers": {"transformer": 0, "transformer_2": 3},
    }
    with pytest.raises(ModelError, match="exists; name a new folder"):
        st.adapters.merge([file], tmp_path / "base", tmp_path / "out")


def test_wrong_names_are_refused_with_the_known_ones(file: Path) -> None:
    for call in (lambda: st.adapters.load(file, scheme="x"), lambda: st.adapters.convert(file, "x")):
        with pytest.raises(ModelError, match="'x' is not a key scheme; known schemes: diffusers,"):
            call()
    with pytest.raises(ModelError, match="known experts: high_noise, low_noise"):
        st.adapters.load(file, expert="x")
