"""Lists every candidate file below a folder with one stat each; follows links, and enters no folder twice."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from supertuner.core.errors import SourceError
from supertuner.core.types import MediaKind
from supertuner.data.probe.sniff import KIND_BY_EXTENSION, UNSUPPORTED_EXTENSIONS
from supertuner.data.sources.listing import SkippedFile, skipped_note

WalkedFile: TypeAlias = tuple[str, str, int, int]
"""Key, name, bytes, modification time in nanoseconds. A plain tuple, because datasets have millions of them."""


@dataclass(slots=True)
class FolderTree:
    """The result of `walk_folder`."""

    media: list[WalkedFile] = field(default_factory=list)
    sidecars: dict[str, os.DirEntry[str]] = field(default_factory=dict)
    """Caption files by the key or the full name of their sample."""
    skipped: list[SkippedFile] = field(default_factory=list)
    hidden_count: int = 0
    other_kinds: Counter[MediaKind] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    already_listed: list[str] = field(default_factory=list)
    unreadable_notes: list[str] = field(default_factory=list)
    """Notes about names that might be folders and could not be examined."""

    def notes(self, kind: MediaKind) -> list[str]:
        lines: list[str] = []
        for other, count in sorted(self.other_kinds.items()):
            lines += skipped_note(count, f"{other} file", f"dataset_type is {kind}")
        for ending, count in sorted(self.unsupported.items()):
            lines += skipped_note(count, f"{ending} file", "this format is not supported; convert it")
        lines += skipped_note(self.hidden_count, "hidden file", "its name begins with a dot")
        lines += [f"folder {name} skipped: a link to a folder that is already listed" for name in self.already_listed]
        return lines + self.unreadable_notes


_SPECIAL_FILE_TYPES = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))


def walk_folder(root: str, kind: MediaKind, caption_extension: str) -> FolderTree:
    """List `root` recursively. Real folders are entered before folders that are reached by links."""
    tree = FolderTree()
    seen: set[tuple[int, int]] = set()
    pending_folders: list[str] = [""]
    pending_links: list[str] = []
    while pending_folders or pending_links:
        prefix = pending_folders.pop() if pending_folders else pending_links.pop(0)
        try:
            status = os.stat(f"{root}/{prefix}")
            identity = (status.st_dev, status.st_ino)
            if identity in seen:  # ends loops of links
                tree.already_listed.append(printable_name(prefix.rstrip("/")))
                continue
            seen.add(identity)
            entries = os.scandir(f"{root}/{prefix}")
        except OSError as error:
            if not prefix:
                raise SourceError(f"{root}: cannot be listed: {error.strerror}") from error
            tree.skipped.append(SkippedFile(printable_name(prefix), f"folder cannot be listed: {error.strerror}"))
            continue
        with entries:
            folders, links = _scan_folder(tree, entries, prefix, kind, caption_extension)
        pending_folders += [f"{name}/" for name in sorted(folders, reverse=True)]
        pending_links += [f"{name}/" for name in sorted(links)]
    return tree


def _scan_folder(
    tree: FolderTree, entries: Iterable[os.DirEntry[str]], prefix: str, kind: MediaKind, caption_extension: str
) -> tuple[list[str], list[str]]:
    """Add one folder's entries to `tree`; returns its real and its linked subfolders. The hot loop of listing."""
    folders: list[str] = []
    links: list[str] = []
    for entry in entries:
        name = entry.name
        dot = name.rfind(".")
        is_media = dot > 0 and KIND_BY_EXTENSION.get(name[dot:].lower()) is kind and name[0] != "."
        try:
            if is_media and entry.is_file():
                _add_media(tree, entry, prefix + name, dot - len(name))
            elif name[0] == ".":
                tree.hidden_count += 1
            elif entry.is_dir(follow_symlinks=False):
                folders.append(prefix + name)
            elif entry.is_dir():
                links.append(prefix + name)
            else:
                _add_other_file(tree, entry, prefix, is_media=is_media, caption_extension=caption_extension)
        except OSError as error:  # a circular link, or a link to a folder without permission: its type is unknown
            if is_media:
                tree.skipped.append(SkippedFile(printable_name(prefix + name), f"unreadable: {error.strerror}"))
            elif name.endswith(caption_extension):
                tree.sidecars[prefix + name[: -len(caption_extension)]] = entry
            else:
                tree.unreadable_notes.append(f"{printable_name(prefix + name)} skipped: {error.strerror}")
    return folders, links


def _add_media(tree: FolderTree, entry: os.DirEntry[str], name: str, dot: int) -> None:
    """Add a regular file whose extension, which begins at `dot`, is of the dataset's kind."""
    try:
        status = entry.stat()
    except OSError as error:
        tree.skipped.append(SkippedFile(printable_name(name), f"unreadable: {error.strerror}"))
        return
    if not name.isprintable() and printable_name(name) != name:
        tree.skipped.append(SkippedFile(printable_name(name), "its name is not UTF-8; rename it"))
    elif status.st_size:
        tree.media.append((name[:dot], name, status.st_size, status.st_mtime_ns))
    else:
        tree.skipped.append(SkippedFile(name, "zero bytes"))


def _add_other_file(
    tree: FolderTree, entry: os.DirEntry[str], prefix: str, *, is_media: bool, caption_extension: str
) -> None:
    """Add a caption file, count a file of another kind, or skip a special file with a media extension."""
    name = entry.name
    suffix = name[name.rfind(".") :].lower()
    if is_media:
        tree.skipped.append(SkippedFile(printable_name(prefix + name), _describe_special_file(entry)))
    elif name.endswith(caption_extension):
        tree.sidecars[prefix + name[: -len(caption_extension)]] = entry
    elif suffix in KIND_BY_EXTENSION:
        tree.other_kinds[KIND_BY_EXTENSION[suffix]] += 1
    elif suffix in UNSUPPORTED_EXTENSIONS:
        tree.unsupported[suffix] += 1


def _describe_special_file(entry: os.DirEntry[str]) -> str:
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        return "a link that leads nowhere" if entry.is_symlink() else f"unreadable: {error.strerror}"
    return "not a file but " + next((text for test, text in _SPECIAL_FILE_TYPES if test(mode)), "a device")


def printable_name(name: str) -> str:
    """`name` with escapes in place of bytes that are not UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()
