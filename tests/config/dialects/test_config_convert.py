"""`config convert` keeps the meaning in every format and from every dialect; converting twice changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.config.settings import key_paths
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.config.sources.parse import parse_bytes
from supertuner.config.sources.render import ConfigLanguage, canonical_tree, render_tree
from supertuner.core.errors import ConfigError

LANGUAGES: tuple[ConfigLanguage, ...] = ("json", "yaml", "toml")
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Values that a node of the JSON Schema allows."""
    if "anyOf" in schema:
        return st.one_of([values(node) for node in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 10_000)
    match schema.get("type"):
        case "integer":
            return st.integers(low, min(high, 1 << 62))
        case "number":
            return st.floats(low, high, exclude_min="exclusiveMinimum" in schema) | st.integers(
                max(1, int(low)), max(1, int(high))
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values(schema["items"]), min_size=1, max_size=3, unique=True)
    if "pattern" in schema:
        return (
            st.sampled_from([".txt", ".caption"])
            if "\\." in schema["pattern"][:3]
            else st.from_regex(r"\A[a-z0-9]{1,9}\Z")
        )
    return WORDS


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """A file under our own names with a few settings of the root and of two datasets."""
    tree: dict[str, Any] = {}
    names = draw(st.lists(st.sampled_from(sorted(key_paths.settings())), max_size=8, unique=True))
    for name in names:
        node = tree
        steps = name.split(".")
        for step in steps[:-1]:
            if step == "datasets[]":
                node = node.setdefault("datasets", [{}, {}])[draw(st.integers(0, 1))]
            else:
                node = node.setdefault(step, {})
        node[steps[-1]] = draw(values(key_paths.settings()[name].schema))
    return tree


def loaded_from(path: Path, text: str) -> LoadedConfig | None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    try:
        return load_config(path, environ={}, check_paths=False)
    except ConfigError:
        return None


@settings(max_examples=250, deadline=None)
@given(tree=trees(), language=st.sampled_from(LANGUAGES))
def test_a_converted_configuration_loads_equal_and_converts_to_itself(tmp_path_factory, tree, language):
    folder = tmp_path_factory.getbasetemp() / "convert"
    folder.mkdir(exist_ok=True)
    first = loaded_from(folder / "run.json", json.dumps(tree))
    if first is None:
        return  # the settings contradict each other
    out = folder / "out" / f"run.{language}"
    text = render_tree(canonical_tree(first.provenance, out.parent), language)
    second = loaded_from(out, text)
    assert second is not None, text
    assert second.config == first.config
    assert render_tree(canonical_tree(second.provenance, out.parent), language) == text


DIALECTS = [
    {
        "--train_batch_size": "4",
        "mixed_precision": "no",
        "optimizer": "adamw_bf16",
        "data_backend": {
            "id": "a b",
            "type": "local",
            "instance_data_dir": "../x",
            "repeats": 3,
            "crop": True,
            "crop_aspect": "square",
            "resolution": 0.5,
            "resolution_type": "area",
        },
        "use_gh200_trainer": True,
    },
    {
        "train": {"steps": 5, "lr": 1e-5, "dtype": "bf16", "batch_size": 2},
        "datasets": [{"folder_path": "/data/x", "resolution": [512, 768], "num_repeats": 2, "caption_ext": "caption"}],
        "trigger_word": "on",
    },
    {
        "--model_family": "wan",
        "--pretrained_model_name_or_path": "./tiny",
        "--resume_from_checkpoint": "../latest",
        "--lora_rank": "8",
        "--validation_resolution": "832x480",
        "--validation_seed": 3,
        "--report_to": "none",
    },
    {
        "model": {"name_or_path": "a/b", "arch": "flux", "quantize": True},
        "network": {"type": "lora", "linear": 8},
        "sample": {"sample_every": 10, "prompts": ["no", "a: b"], "seed": 1},
        "train": {"timestep_type": "sigmoid", "skip_first_sample": True},
    },
]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("tree", DIALECTS)
def test_a_dialect_converts_to_our_names_with_the_same_meaning(load_text, tmp_path, tree, language):
    first = load_text(tree)
    out = tmp_path / "sub" / f"out.{language}"
    text = render_tree(canonical_tree(first.provenance, out.parent), language)
    second = loaded_from(out, text)
    assert second is not None
    assert second.config == first.config
    assert not any("(" in origin for path, origin in second.origins.items() if "memory" not in path)
    assert set(parse_bytes(text.encode(), out.name)) <= set(RunConfig.model_fields)


def test_a_folder_named_like_a_reserved_word_stays_a_folder_after_conversion(load_text, tmp_path):
    first = load_text({"model": {"family": "flux", "path": "./tiny"}})
    assert canonical_tree(first.provenance, tmp_path)["model"]["path"] == "./tiny"
    assert canonical_tree(first.provenance, tmp_path / "sub")["model"]["path"] == "../tiny"


def test_the_environment_is_not_written_into_the_converted_file(load_text, tmp_path):
    loaded = load_text(
        {"run": {"seed": 1}}, environ={"SUPERTUNER_RUN__NAME": "x", "ACCELERATE_MIXED_PRECISION": "fp16"}
    )
    assert canonical_tree(loaded.provenance, tmp_path) == {"run": {"seed": 1}}


def test_every_setting_that_accepts_null_defaults_to_it_so_that_toml_can_leave_it_out():
    for name, key in key_paths.settings().items():
        if "null" in key.json_types:
            assert key.schema["default"] is None, name
