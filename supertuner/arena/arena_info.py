"""Describes the state of an arena folder and whether it has expired, from its files and locks; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from supertuner.arena import locks
from supertuner.arena.folder import BUILDER_FILE, HEAD_FILE, INDEX_FILE, ArenaFolder
from supertuner.arena.format import ArenaHead, ArenaLifetime
from supertuner.arena.index import open_sealed, read_head
from supertuner.core.errors import ArenaDamagedError
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    name: str
    state: Literal["sealed", "building", "remains", "damaged"]
    nbytes: int
    """Bytes that the files occupy."""
    units: int | None = None
    """None unless the arena is sealed."""
    created: float | None = None
    life: ArenaLifetime | None = None
    users: bool = False
    """Whether any process uses it: builds it or is attached to it."""
    meta: Mapping[str, JSON] | None = None
    problem: str = ""


def describe_arena(folder: ArenaFolder) -> ArenaInfo:
    name, nbytes, users = folder.path.name, folder.stored_bytes(), locks.is_held(folder.fd)
    foreign_name = folder.find_foreign_name()
    if foreign_name is not None:
        problem = f"{folder.path}: is not an arena: it contains {foreign_name!r}"
        return ArenaInfo(name, "damaged", nbytes, problem=problem)
    try:
        if folder.has(INDEX_FILE):
            head, catalog = open_sealed(folder)
            return ArenaInfo(name, "sealed", nbytes, len(catalog.keys), head.created, head.life, users, catalog.meta)
        state: Literal["building", "remains"] = "building" if is_building(folder) else "remains"
        if not folder.has(HEAD_FILE):
            return ArenaInfo(name, state, nbytes, users=users)
        head = read_head(folder)
        return ArenaInfo(name, state, nbytes, None, head.created, head.life, users)
    except ArenaDamagedError as error:
        return ArenaInfo(name, "damaged", nbytes, users=users, problem=str(error))


def has_expired(folder: ArenaFolder, now: float) -> bool:
    """Whether an arena that no process uses should be deleted: a dead builder left it, or its lifetime is over."""
    if not folder.names():  # No builder's lock file: nothing shows that the folder is ours, and it takes no space.
        return False
    head = try_read_head(folder)
    if head is None:  # A sealed arena with a damaged head is for the user to remove; an unsealed one cannot be used.
        return not folder.has(INDEX_FILE)
    if not isinstance(head.life, str) and now > head.created + head.life * 3600:
        return True
    return head.life == "run" if folder.has(INDEX_FILE) else not head.resumable


def try_read_head(folder: ArenaFolder) -> ArenaHead | None:
    """The head, or None if the build had not written it yet or it is damaged."""
    try:
        return read_head(folder)
    except ArenaDamagedError:
        return None


def is_building(folder: ArenaFolder) -> bool:
    if not folder.has(BUILDER_FILE):
        return False
    with folder.opened(BUILDER_FILE) as fd:
        return locks.is_held(fd)
