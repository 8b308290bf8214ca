"""The set-up pages of the docs name only existing commands, options, settings and requirements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from supertuner.cli import app
from supertuner.config.settings import key_paths as place
from supertuner.tools.doctor.requirements import REQUIREMENTS, parse_requirements

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = ("doctor.md", "troubleshooting.md", "deployment.md")
BLOCKS = ("arena", "cache_config", "checkpoints", "gh200_optimizations", "memory", "run", "train", "validation")


def options_of(words: list[str]) -> set[str] | None:
    """The options of the command that these words begin with; None if there is no such command."""
    command = get_command(app)
    for word in words:
        inner = getattr(command, "commands", None)
        if inner is None:
            break
        if word not in inner:
            return None
        command = inner[word]
    return {name for parameter in command.params for name in parameter.opts}


def commands(text: str) -> list[str]:
    """Every `supertuner …` in code blocks and in inline code."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL))
    code += [line for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    found = [
        re.split(r"\s[|#&]|\|\||\)|;", match)[0] for line in code for match in re.findall(r"supertuner [a-z].*", line)
    ]
    return [command for command in found if command.split()[1] not in ("&&", "…")]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_the_page_exists_with_its_options(page: str) -> None:
    found = commands((DOCS / page).read_text())
    assert len(found) >= 5
    for command in found:
        words = command.split()[1:]
        known = options_of(words)
        assert known is not None, command
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= known | {"--help"}, command


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_on_the_page_exists(page: str) -> None:
    known = set(place.settings())
    for name in re.findall(rf"\b((?:{'|'.join(BLOCKS)})\.[a-z_]+(?:\.[a-z_]+)*)\b(?!\()", (DOCS / page).read_text()):
        is_block = any(setting.startswith(f"{name}.") for setting in known)
        assert name in known or is_block or name.endswith((".md", ".py", ".sh", ".json")), name


def test_every_requirement_is_on_the_page_and_every_list_of_them_is_valid() -> None:
    text = (DOCS / "doctor.md").read_text()
    table = text.split("## Requirements")[1].split("\n## ")[0]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert re.findall(r"`([a-z0-9-]+)`", first_cells) == list(REQUIREMENTS)
    for page in PAGES:
        for names in re.findall(r"--require ([a-z0-9,-]+)", (DOCS / page).read_text()):
            assert parse_requirements(names)


def test_troubleshooting_has_a_cause_and_a_remedy_for_every_symptom() -> None:
    lines = (DOCS / "troubleshooting.md").read_text().splitlines()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|") and not line.startswith("|--")]
    rows = [row for row in rows if row[0].strip() != "symptom"]
    assert len(rows) >= 20
    for row in rows:
        assert len(row) == 3 and all(cell.strip() for cell in row), row
