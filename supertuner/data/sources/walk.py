"""Every candidate file below a folder, with one stat each; links are followed, and no folder is entered twice."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from supertuner.core.errors import SourceError
from supertuner.core.types import MediaKind
from supertuner.data.probe.sniff import EXTENSIONS, UNREAD
from supertuner.data.sources.listing import Left, some

Found: TypeAlias = tuple[str, str, int, int]
"""Key, name, bytes, time of change in nanoseconds: a bare tuple, because datasets have millions of them."""


@dataclass(slots=True)
class Tree:
    """What a walk saw."""

    media: list[Found] = field(default_factory=list)
    sidecars: dict[str, os.DirEntry[str]] = field(default_factory=dict)
    """Caption files by the key, or the full name, of the sample they belong to."""
    left: list[Left] = field(default_factory=list)
    hidden: int = 0
    other_kinds: Counter[MediaKind] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    again: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Names that might be folders, and why they could not be looked at."""

    def notes(self, kind: MediaKind) -> list[str]:
        lines = [
            line
            for other, count in sorted(self.other_kinds.items())
            for line in some(count, f"{other} file", f"{other} files", f"dataset_type is {kind}")
        ]
        for ending, count in sorted(self.unread.items()):
            lines += some(count, f"{ending} file", f"{ending} files", "not a format that is read here; convert it")
        lines += some(self.hidden, "hidden file", "hidden files", "its name begins with a dot")
        lines += [f"folder {name} left out: a link to a folder that is already listed" for name in self.again]
        return lines + self.unknown


_ODD = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))


def walk(root: str, kind: MediaKind, caption_ending: str) -> Tree:
    """List `root` and everything below it. Folders reached by their own name come before folders reached by a link."""
    tree = Tree()
    seen: set[tuple[int, int]] = set()
    own: list[str] = [""]
    linked: list[str] = []
    while own or linked:
        prefix = own.pop() if own else linked.pop(0)
        if not _is_new(tree, seen, root, prefix):
            continue
        folders, links = _one_folder(tree, root, prefix, kind, caption_ending)
        own += [f"{name}/" for name in sorted(folders, reverse=True)]
        linked += [f"{name}/" for name in sorted(links)]
    return tree


def _is_new(tree: Tree, seen: set[tuple[int, int]], root: str, prefix: str) -> bool:
    """Whether this folder was not listed before, under whatever name: loops of links end here."""
    try:
        status = os.stat(f"{root}/{prefix}")
    except OSError as error:
        if not prefix:
            raise SourceError(f"{root}: cannot be listed: {error.strerror}") from error
        tree.left.append(Left(printable(prefix), f"folder cannot be listed: {error.strerror}"))
        return False
    identity = (status.st_dev, status.st_ino)
    if identity in seen:
        tree.again.append(printable(prefix.rstrip("/")))
        return False
    seen.add(identity)
    return True


def _one_folder(tree: Tree, root: str, prefix: str, kind: MediaKind, ending: str) -> tuple[list[str], list[str]]:
    """Sort one folder's entries into `tree`; its real and its linked subfolders. The hot loop of listing."""
    folders: list[str] = []
    links: list[str] = []
    try:
        entries = os.scandir(f"{root}/{prefix}")
    except OSError as error:
        if not prefix:
            raise SourceError(f"{root}: cannot be listed: {error.strerror}") from error
        tree.left.append(Left(printable(prefix), f"folder cannot be listed: {error.strerror}"))
        return folders, links
    with entries:
        for entry in entries:
            name = entry.name
            dot = name.rfind(".")
            wanted = dot > 0 and EXTENSIONS.get(name[dot:].lower()) is kind and name[0] != "."
            try:
                if wanted and entry.is_file():
                    _candidate(tree, entry, prefix + name, dot - len(name))
                elif name[0] == ".":
                    tree.hidden += 1
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(prefix + name)
                elif entry.is_dir():
                    links.append(prefix + name)
                else:
                    _other_file(tree, entry, prefix, wanted=wanted, ending=ending)
            except OSError as error:  # a link in a circle, or to where we may not look: nobody knows what it is
                if wanted:
                    tree.left.append(Left(printable(prefix + name), f"unreadable: {error.strerror}"))
                elif name.endswith(ending):
                    tree.sidecars[prefix + name[: -len(ending)]] = entry
                else:
                    tree.unknown.append(f"{printable(prefix + name)} left out: {error.strerror}")
    return folders, links


def _candidate(tree: Tree, entry: os.DirEntry[str], name: str, dot: int) -> None:
    """Take a regular file whose name says that it is of the wanted kind; its ending begins at `dot`."""
    try:
        status = entry.stat()
    except OSError as error:
        tree.left.append(Left(printable(name), f"unreadable: {error.strerror}"))
        return
    if not name.isprintable() and printable(name) != name:
        tree.left.append(Left(printable(name), "its name is not UTF-8; rename it"))
    elif status.st_size:
        tree.media.append((name[:dot], name, status.st_size, status.st_mtime_ns))
    else:
        tree.left.append(Left(name, "zero bytes"))


def _other_file(tree: Tree, entry: os.DirEntry[str], prefix: str, *, wanted: bool, ending: str) -> None:
    """Captions, media of other kinds, and what only looks like a sample."""
    name = entry.name
    suffix = name[name.rfind(".") :].lower()
    if wanted:
        tree.left.append(Left(printable(prefix + name), _what_it_is(entry)))
    elif name.endswith(ending):
        tree.sidecars[prefix + name[: -len(ending)]] = entry
    elif suffix in EXTENSIONS:
        tree.other_kinds[EXTENSIONS[suffix]] += 1
    elif suffix in UNREAD:
        tree.unread[suffix] += 1


def _what_it_is(entry: os.DirEntry[str]) -> str:
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        return "a link that leads nowhere" if entry.is_symlink() else f"unreadable: {error.strerror}"
    return "not a file but " + next((text for test, text in _ODD if test(mode)), "a device")


def printable(name: str) -> str:
    """`name` with bytes that are not UTF-8 written as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()
