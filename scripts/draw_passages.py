"""Draw docstrings, messages and paragraphs of the docs at random, for a reader who is new to the project.

    python scripts/draw_passages.py 4711          # 60 passages, numbered, with the file that each is from

The reader restates each passage in other words at first reading; somebody who knows the code judges the answers. The
seed and the result go into docs/log. The same seed on the same commit draws the same passages.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNT = 60
MIN_WORDS = 5


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that stand alone: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Other texts of a sentence's length: errors, notes, help texts. A value in an f-string is shown by its source."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(_shown, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone | inside:
            yield node.lineno, node.value


def _shown(part: ast.expr) -> str:
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else str(ast.literal_eval(part))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and list items of a page, without tables and code."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    for match in re.finditer(r"(?m)^(?![|#\s])(.+(?:\n(?![\n|#]).+)*)", text):
        yield text[: match.start()].count("\n") + 1, match[1]


def passages() -> list[tuple[str, str]]:
    """(file:line, text) of every passage with enough words."""
    found = []
    for file in sorted((ROOT / "supertuner").rglob("*.py")):
        tree = ast.parse(file.read_text())
        found += [(file, line, text) for part in (docstrings, messages) for line, text in part(tree)]
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found += [(file, line, text) for line, text in paragraphs(file.read_text())]
    return [(f"{file.relative_to(ROOT)}:{line}", text) for file, line, text in found if len(text.split()) >= MIN_WORDS]


def main() -> None:
    drawn = random.Random(int(sys.argv[1])).sample(passages(), COUNT)
    for number, (place, text) in enumerate(drawn, 1):
        print(f"[{number}] {place}\n{text.strip()}\n")


if __name__ == "__main__":
    main()
