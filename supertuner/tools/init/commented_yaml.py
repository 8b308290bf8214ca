"""Puts comments into the text of a YAML configuration: each above the setting that it explains. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from supertuner.config.settings.key_paths import format_path
from supertuner.core.types import escape_for_terminal

WIDTH = 110
_KEY = re.compile(r"(?P<indent> *)(?P<dash>- )?(?P<key>[A-Za-z_0-9]+):( |$)")


def add_comments(text: str, comments: Mapping[str, str], header: Sequence[str]) -> str:
    """`text` with a comment above each setting in `comments` (by its path), a blank line between blocks, and a header.

    `text` is what `render_tree` writes: block style, lists as deep as their key.
    """
    lines = [line for entry in header for line in _comment_lines(entry, "")]
    parents: list[tuple[int, str | int]] = []  # (indentation, key or list position)
    for line in text.splitlines():
        if (match := _KEY.match(line)) is None:
            lines.append(line)
            continue
        depth = len(match["indent"])
        if match["dash"]:
            number = _leave(parents, depth + 1)
            parents.append((depth + 1, number))
            depth += 2
        _leave(parents, depth)
        parents.append((depth, match["key"]))
        if len(parents) == 1:
            lines.append("")
        if comment := comments.get(format_path(tuple(key for _, key in parents))):
            lines += _comment_lines(comment, match["indent"])
        lines.append(line)
    return "\n".join(lines) + "\n"


def _leave(parents: list[tuple[int, str | int]], depth: int) -> int:
    """Remove the parents that are not above `depth`; returns the position of the next entry if they were a list."""
    number = 0
    while parents and parents[-1][0] >= depth:
        last = parents.pop()[1]
        number = last + 1 if isinstance(last, int) else 0
    return number


def _comment_lines(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    paragraphs = [escape_for_terminal(line) for line in text.split("\n")]
    return [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(paragraph, WIDTH, initial_indent=start, subsequent_indent=start) or [start.rstrip()]
    ]
