"""MkDocs hooks: links from the docs to repository files become plain text in the site, which does not contain them.

In a checkout and on a forge such a link opens the file. A link to a file that does not exist stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link that leaves `docs/` by its text."""
    here = Path(page.file.abs_src_path).parent

    def plain_text(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            raise SystemExit(f"{page.file.src_path}: {link[2]} does not exist")
        return link[1]

    return LINK.sub(plain_text, markdown)
