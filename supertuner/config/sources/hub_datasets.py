"""Finds datasets of the Hugging Face hub in its cache on this machine: `hub:owner/name` stands for that copy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from supertuner.config.dialects.conversions import HUB_PREFIX

_NAME = re.compile(rf"{HUB_PREFIX}([^/@\s]+)/([^/@\s]+)(?:@([^/@\s]+))?")
MAIN_BRANCH = "main"


def hub_snapshot(text: str, environ: Mapping[str, str]) -> Path | None:
    """The folder that holds, or would hold, the dataset `hub:owner/name[@revision]`; None if `text` is not of this
    form. Makes no network requests."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    owner, name, revision = match[1], match[2], match[3] or MAIN_BRANCH
    repository = hub_cache_folder(environ) / f"datasets--{owner}--{name}"
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except OSError:  # not downloaded, or `revision` is a commit
        commit = revision
    return repository / "snapshots" / commit


def missing_snapshot_message(text: str) -> str:
    """The problem of a dataset that is not in the cache, with the command that downloads it."""
    match = _NAME.fullmatch(text)
    assert match is not None, text
    revision = "" if match[3] in (None, MAIN_BRANCH) else f" --revision {match[3]}"
    command = f"hf download {match[1]}/{match[2]} --repo-type dataset{revision}"
    return f"{match[1]}/{match[2]} is on the Hugging Face hub and not yet on this machine; download it: {command}"


def hub_cache_folder(environ: Mapping[str, str]) -> Path:
    """The cache of the hub's client, by its environment variables."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"
