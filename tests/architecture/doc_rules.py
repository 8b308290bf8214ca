"""Whether the links of Markdown text lead somewhere: files, folders, headings. Addresses on the net are not tried."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)


def broken_links(file: Path, root: Path) -> list[str]:
    """Relative links of one Markdown file that do not resolve, or that leave the repository."""
    found = []
    for target in links(file.read_text()):
        if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.startswith("//"):
            continue
        name, _, anchor = target.partition("#")
        place = (file.parent / unquote(name)).resolve() if name else file
        if not place.is_relative_to(root.resolve()):
            found.append(f"{target} leads out of the repository")
        elif not place.exists():
            found.append(f"{target} leads nowhere")
        elif anchor and place.suffix == ".md" and unquote(anchor) not in anchors(place.read_text()):
            found.append(f"{target}: there is no such heading in {place.name}")
    return found


def links(text: str) -> list[str]:
    """Where the text points to; examples in fenced blocks and in `code` point nowhere."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return LINK.findall(prose) + REFERENCE.findall(prose)


def anchors(text: str) -> set[str]:
    """The names of the headings, made as GitHub makes them; a repeated heading gets a number."""
    names: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number, unique = 0, name
        while unique in names:
            number += 1
            unique = f"{name}-{number}"
        names.add(unique)
    return names
