"""JSON, YAML and TOML are equivalent; unsafe or ambiguous content is refused with its position."""

from __future__ import annotations

import os
import time

import pytest

from supertuner.config.sources.load import load_config
from supertuner.core.errors import ConfigError

SMALL_RATE = {
    "run.json": '{"optimizer": {"learning_rate": 1e-6}}',
    "run.yaml": "optimizer:\n  learning_rate: 1e-6\n",
    "run.yml": "optimizer: {learning_rate: 1E-6}\n",
    "run.toml": "[optimizer]\nlearning_rate = 1e-6\n",
}


@pytest.mark.parametrize("name", SMALL_RATE)
def test_1e_6_is_a_number_in_every_format(load_text, name):
    assert load_text(SMALL_RATE[name], name).config.optimizer.learning_rate == 1e-6


def test_the_same_settings_in_three_formats_are_equal(load_text):
    as_json = load_text('{"datasets": [{"id": "a", "resolution": [512, 768]}], "train": {"batch_size": 2}}')
    as_yaml = load_text("datasets:\n- {id: a, resolution: [512, 768]}\ntrain:\n  batch_size: 2\n", "r.yaml")
    as_toml = load_text('[[datasets]]\nid = "a"\nresolution = [512, 768]\n[train]\nbatch_size = 2\n', "r.toml")
    assert as_json.config == as_yaml.config == as_toml.config


def test_yaml_1_1_booleans_and_dates_are_text(load_text):
    for word in ("no", "on", "2024-01-31", "12:30", "1_000"):
        loaded = load_text(f"datasets: [{{captions: {{constant: {word}}}}}]", "run.yaml")
        assert loaded.config.datasets[0].captions.constant == word


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", '{\n  "train": {"batch_size": 1,}\n}', "run.json:2:2"),
        ("run.yaml", "train:\n  batch_size: [1\n", "run.yaml:3:1"),
        ("run.toml", "[train]\nbatch_size = \n", "run.toml:2:14"),
    ],
)
def test_a_syntax_error_names_file_line_and_column(refuse, name, text, says):
    (problem,) = refuse(text, name)
    assert problem.startswith(says)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"train": {"batch_size": 1, "batch_size": 2}}'),
        ("run.yaml", "train:\n  batch_size: 1\n  batch_size: 2\n"),
        ("run.toml", "[train]\nbatch_size = 1\nbatch_size = 2\n"),
    ],
)
def test_a_duplicate_key_is_refused(refuse, name, text):
    (problem,) = refuse(text, name)
    assert "batch_size" in problem or "run.toml:3" in problem


def test_a_byte_order_mark_is_accepted(load_text):
    assert load_text(b'\xef\xbb\xbf{"run": {"seed": 3}}').config.run.seed == 3


def test_a_file_that_is_not_utf8_is_refused_with_the_line(refuse):
    (problem,) = refuse(b'{\n"run": {"name": "caf\xe9"}}')
    assert problem == "run.json:2: not UTF-8 (byte 0xe9)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"optimizer": {"learning_rate": NaN}}'),
        ("run.json", '{"optimizer": {"learning_rate": 1e999}}'),
        ("run.yaml", "optimizer: {learning_rate: .inf}"),
        ("run.toml", "[optimizer]\nlearning_rate = nan"),
        ("run.json", '{"train": {"max_steps": ' + "9" * 5000 + "}}"),
        ("run.yaml", "train: {max_steps: 0x" + "f" * 5000 + "}"),
        ("run.json", '{"run": {"name": "\\ud800"}}'),
        ("run.toml", "[run]\nname = 2024-01-31"),
        ("run.yaml", "run: {name: !!binary aGVsbG8=}"),
        ("run.yaml", "run: {1: 2}"),
        ("run.yaml", "run: !!python/object:os.system {}"),
        ("run.yaml", "a: &a {b: 1}\nrun: {<<: *a}"),
        ("run.json", "[" * 100_000),
        ("run.json", '{"a":' * 50 + "1" + "}" * 50),
        ("run.yaml", "[" * 3000),
        ("run.toml", "a = " + "[" * 3000),
        ("run.yaml", "a: 1\n---\nb: 2\n"),
        ("run.json", ""),
        ("run.json", "[]"),
        ("run.yaml", "just text"),
        ("run.ini", "a = 1"),
    ],
)
def test_unsafe_or_invalid_content_is_refused_in_one_line(refuse, name, text):
    problems = refuse(text, name)
    assert len(problems) == 1
    assert len(problems[0].splitlines()) == 1


def test_a_yaml_alias_bomb_is_refused_quickly(refuse):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    begin = time.process_time()
    (problem,) = refuse(bomb, "run.yaml")
    assert "values" in problem
    assert time.process_time() - begin < 5


def test_a_yaml_list_that_contains_itself_is_refused(refuse):
    (problem,) = refuse("a: &a [*a]", "run.yaml")
    assert "nested deeper" in problem


def test_a_huge_file_is_refused_before_it_is_parsed(refuse):
    (problem,) = refuse(" " * (5 << 20) + "{}")
    assert "larger than 4.0 MiB" in problem


def test_a_missing_file_or_a_folder_is_a_config_error(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config(path, environ={})
        assert str(path) in str(caught.value)


def test_an_empty_yaml_or_toml_file_means_all_defaults(load_text):
    assert load_text("", "run.yaml").config == load_text("# nothing\n", "run.toml").config


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", '{"optimizer": {"learning_rate": NaN}}', "optimizer.learning_rate: nan is not a finite number"),
        ("run.json", '{"train": {"batch_size": 1e999}}', "train.batch_size: inf is not a finite number"),
        ("run.yaml", "datasets: [{}, {weight: .inf}]", "datasets[1].weight: inf is not a finite number"),
        ("run.toml", "[run]\nname = 2024-01-31", "run.name: 2024-01-31 is a date; put it in quotes"),
        ("run.yaml", "run: {name: !foo x}", "run.yaml:1:13: tags are not supported (!foo); write the plain value"),
        ("run.yaml", "a: 1\n---\nb: 2", "run.yaml:2:1: a second document begins here"),
        ("run.json", '{"run": {"seed": ' + "9" * 5000 + "}}", "a number has more digits than any setting can have"),
    ],
)
def test_values_that_no_setting_can_have_are_refused_with_their_path(refuse, name, text, says):
    (problem,) = refuse(text, name)
    assert problem.startswith(says)


def test_a_pipe_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        load_config(tmp_path / "run.json", environ={})
