"""The samples in the GH200 forks' documents validate unchanged and mean what the documents say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from supertuner.config.sources.load import load_config

DOCUMENTS = Path(__file__).parent / "fork_documents"
SHIPPED = Path(__file__).parents[2] / "examples/gh200_in_memory_example.json"


def snippets(document: str) -> list[tuple[str, str]]:
    """The fenced samples of a document: (language, text)."""
    samples = re.findall(
        r"^ *```(json|yaml)\n(.*?)^ *```", (DOCUMENTS / f"{document}.md").read_text(), flags=re.S | re.M
    )
    return [(language, dedent(text)) for language, text in samples]


def as_file(text: str, language: str) -> str:
    """Complete a fragment to a file: add braces around members, and a list around a dataset."""
    if language == "json" and text.startswith('"'):
        return "{" + text + "}"
    if language == "json" and text.startswith('{\n  "id"'):
        return '{"datasets": [' + text + "]}"
    return text


ALL = [(document, i) for document in ("000", "001", "003") for i in range(len(snippets(document)))]


@pytest.mark.parametrize(("document", "index"), ALL)
def test_every_sample_validates_unchanged(load_text, document, index):
    language, text = snippets(document)[index]
    load_text(as_file(text, language), f"run.{language}")


def test_all_six_samples_were_found():
    assert len(ALL) == 6


def test_the_samples_of_document_001_mean_what_its_text_says(load_text):
    (_, blocks), (_, dataset) = snippets("001")
    config = load_text(as_file(blocks, "json")).config
    assert (config.cache_config.vae_cache_type, config.cache_config.persistent_cache) == ("unified_memory", True)
    assert config.gh200_optimizations.target_effective_batch_size == 32
    first = load_text(as_file(dataset, "json")).config.datasets[0]
    assert (first.id, first.type, first.in_memory.compression) == ("train_images", "in_memory", "lz4")


def test_the_steps_of_document_002_make_a_valid_file(load_text):
    text = (DOCUMENTS / "002.md").read_text()
    block, cache, trainer = (
        re.search(rf'`("{k}": .*?)`', text)[1] for k in ("data_backend", "cache_config", "use_gh200_trainer")
    )
    members = [m.replace(", ...", "") for m in (block, cache, trainer)]
    members += ['"train_batch_size": 32', '"initial_effective_batch_size": 4']
    loaded = load_text("{" + ", ".join(members) + "}")
    ramp = loaded.config.gh200_optimizations
    assert loaded.config.datasets[0].type == "in_memory"
    assert (ramp.enable_batch_size_rampup, ramp.initial_effective_batch_size, ramp.enable_uvm_hints) == (True, 4, True)


def test_the_yaml_of_document_003_has_numeric_rates_and_a_cache_on_disk(load_text):
    loaded = load_text(snippets("003")[0][1], "run.yaml")
    optimizer = loaded.config.optimizer
    assert (optimizer.name, optimizer.high_noise_lr_bump, optimizer.low_noise_max_lr) == ("automagic", 1e-6, 5e-4)
    assert loaded.config.datasets[0].augmentations_cache_mode == "static"
    cache = loaded.config.cache_config
    assert (cache.vae_cache_type, cache.persistent_cache) == ("disk", True)
    assert any("nothing to stage" in note.message for note in loaded.notes)


def test_the_shipped_example_is_that_of_the_forks_with_a_tiny_model_and_shipped_data():
    shipped = load_config(SHIPPED, environ={})
    dataset, config = shipped.config.datasets[0], shipped.config
    assert (dataset.id, dataset.type, dataset.dataset_type) == ("train_images", "in_memory", "image")
    assert (dataset.in_memory.compression, dataset.in_memory.num_workers) == ("lz4", 64)
    assert shipped.provenance["datasets", 0, "in_memory", "memory_limit_gb"].value == 360
    assert (config.model.family, config.model.path) == ("wan2.2", "tiny")
    assert config.run.output_dir == SHIPPED.parents[1] / "runs"
    blocks = load_members(snippets("001")[0][1])
    for name, block in blocks.items():
        shown = getattr(config, name).model_dump(mode="json")
        assert {key: shown[key] for key in block if key != "cache_dir"} == {
            k: v for k, v in block.items() if k != "cache_dir"
        }
    assert config.cache_config.cache_dir == SHIPPED.parent / blocks["cache_config"]["cache_dir"]


def test_its_pictures_are_small_and_each_has_a_caption():
    pictures = sorted((SHIPPED.parent / "example_images").glob("*.png"))
    assert len(pictures) == 16
    for picture in pictures:
        assert picture.stat().st_size < 1000
        colour, shape = picture.stem.split("_")
        assert picture.with_suffix(".txt").read_text() == f"a {colour} {shape} on a light ground\n"


def load_members(text: str) -> dict[str, dict[str, Any]]:
    """The members of an object that is written without braces."""
    members: dict[str, dict[str, Any]] = json.loads("{" + text + "}")
    return members
