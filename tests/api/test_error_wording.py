"""Errors are true for callers of the API and of the command line: none names an option of a command."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import supertuner as st
from supertuner import cli
from supertuner.core.errors import ConfigError, ModelError, OptionError, SuperTunerError
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES
from tests.train.export.test_adapter_files import wan_lora

PACKAGE = Path(st.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z]")


def raised_texts(source: str) -> list[str]:
    """The texts of the errors that a file raises, without commands, which are in backquotes."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            texts.append(re.sub("`[^`]*`", "", " ".join(part for part in parts if isinstance(part, str))))
    return texts


def test_no_error_below_the_command_line_names_an_option() -> None:
    assert OPTION.search(raised_texts("raise ModelError(f'{path}: give --out')")[0])
    files = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in ("cli", "tools")]
    wrong = [(file.name, text) for file in files for text in raised_texts(file.read_text()) if OPTION.search(text)]
    assert not wrong


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_file(wan_lora(KEY_SCHEMES["kohya"], 2.0, torch.float32), tmp_path / "cat_low_noise.safetensors")
    return tmp_path / "cat_low_noise.safetensors"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda file: st.estimate(st.load_config({}), machine="gh300"), "'gh300' is not a known machine"),
        (lambda file: st.adapters.load(file, expert="x"), "'x' is not an expert"),
        (lambda file: st.adapters.export(file, "gimp"), "'gimp' is not a program to export for"),
        (
            lambda file: st.adapters.convert(file, "kohya", file),
            "another file with `out`, or replace it with `overwrite`",
        ),
        (lambda file: st.adapters.export(file, "diffusers", file), "exists; choose another path with `out`"),
    ],
)
def test_a_wrong_argument_is_named_without_an_option(
    call: Callable[[Path], object], message: str, adapter: Path
) -> None:
    with pytest.raises((OptionError, ModelError), match=message) as caught:
        call(adapter)
    assert not OPTION.search(str(caught.value))


def test_settings_given_as_a_mapping_are_not_called_a_file() -> None:
    with pytest.raises(ConfigError) as caught:
        st.load_config({"train": {"bach_size": 2}, "train_batch_size": "many"})
    text = str(caught.value)
    assert "the settings given" in text and "settings.json" not in text
    with pytest.raises(SuperTunerError, match="the settings given: there is no dataset"):
        st.train(st.load_config({}))


def test_the_command_line_names_its_own_options(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["adapter", "convert", str(adapter), "--to", "kohya", "--out", str(adapter)])
    assert "name another file with --out, or replace it with --force" in capsys.readouterr().err
