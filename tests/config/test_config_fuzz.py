"""Any content of a file, --set, variable or call yields a configuration or a ConfigError, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supertuner.config.dialects.key_tables import DATASET_KEYS, RUN_KEYS, inherited_keys
from supertuner.config.settings import key_paths
from supertuner.config.sources.environment import SETTING_BY_VARIABLE, settings_with_variables, variable_name
from supertuner.config.sources.load import load_config
from supertuner.core.errors import ConfigError

ROOT = [
    *key_paths.names_in_block(""),
    *(row.key for row in RUN_KEYS),
    *inherited_keys(),
    "dataset",
    "data_backend",
    "config",
    "--seed",
    "data_backend_config",
    "job",
    "$schema",
]
ENTRY = [*key_paths.names_in_block("datasets[]"), *(row.key for row in DATASET_KEYS)]
TRICKY = ["run.json", "~nobody/x", "a" * 300, "", ".", "no", "local", "text_embeds", "textfile", "area", "512"]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(TRICKY))
GARBAGE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
LAST_NAMES = st.sampled_from(sorted({key.split(".")[-1] for key in (*ROOT, *ENTRY, *key_paths.settings())}))
KEYED = st.recursive(
    GARBAGE,
    lambda inner: st.dictionaries(LAST_NAMES, inner, max_size=5) | st.lists(inner, max_size=3),
    max_leaves=8,
)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` → `{"a": {"b": 1}}`; of two conflicting entries, one is kept."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node: Any = tree
        *steps, last = path.split(".")
        for step in steps:
            node = node.setdefault(step, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[last] = value
    return tree


ENTRIES = st.dictionaries(st.sampled_from(ENTRY), KEYED, max_size=6).map(nested)
TREES = st.dictionaries(st.sampled_from(ROOT), KEYED | ENTRIES | st.lists(ENTRIES, max_size=3), max_size=6).map(nested)
JOBS = TREES.map(lambda tree: {"job": "x", "config": {"name": "y", "process": [tree]}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def load_or_config_error(path: Path | None, content: bytes = b"", **options: Any) -> None:
    if path is not None:
        path.write_bytes(content)
    try:
        loaded = load_config(path, **{"environ": {}, **options})
    except ConfigError as error:
        assert error.problems
        str(error).encode()
    else:
        json.dumps(loaded.to_dict(), allow_nan=False)


@settings(max_examples=400, deadline=None)
@given(tree=TREES | JOBS | KEYED)
def test_any_tree_of_known_and_unknown_keys(folder, tree):
    load_or_config_error(folder / "run.json", json.dumps(tree).encode())


@settings(max_examples=150, deadline=None)
@given(tree=st.lists(ENTRIES | GARBAGE, max_size=3) | GARBAGE)
def test_any_dataset_file(folder, tree):
    (folder / "multi.json").write_text(json.dumps(tree))
    load_or_config_error(folder / "run.json", b'{"data_backend_config": "multi.json"}')


YAMLISH = st.text(st.sampled_from(list("ab:-[]{}&*!|>'\"#%@`?,. \n\t\r012exX~<=")), max_size=40)


@settings(max_examples=400, deadline=None)
@given(text=st.text(max_size=40) | YAMLISH, ending=st.sampled_from(["json", "yaml", "toml"]))
def test_any_text(folder, text, ending):
    load_or_config_error(folder / f"run.{ending}", text.encode(errors="surrogatepass"))


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=40), ending=st.sampled_from(["json", "yaml", "toml", "txt"]))
def test_any_bytes(folder, content, ending):
    load_or_config_error(folder / f"run.{ending}", content)


PATHS = st.sampled_from(sorted(key_paths.settings())).map(lambda p: p.replace("[]", "[0]")) | st.text(max_size=12)
TEXTS = st.text(max_size=12) | GARBAGE.map(json.dumps)


@settings(max_examples=300, deadline=None)
@given(sets=st.lists(st.tuples(PATHS | st.sampled_from(ROOT), TEXTS).map("=".join) | st.text(max_size=9), max_size=4))
def test_any_set(sets):
    load_or_config_error(None, sets=sets)


@settings(max_examples=150, deadline=None)
@given(overrides=st.dictionaries(PATHS | st.sampled_from(ROOT), KEYED, max_size=4))
def test_any_call_from_code(overrides):
    load_or_config_error(None, overrides=overrides)


VARIABLE = st.sampled_from([*SETTING_BY_VARIABLE, *map(variable_name, settings_with_variables())]) | st.text(
    max_size=9
).map("SUPERTUNER_".__add__)


@settings(max_examples=150, deadline=None)
@given(environ=st.dictionaries(VARIABLE, TEXTS, max_size=4))
def test_any_environment(environ):
    load_or_config_error(None, environ=environ)
