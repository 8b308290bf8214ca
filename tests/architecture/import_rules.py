"""Who may import whom, read off the syntax tree: functions over source text, so that each rule can be shown to fail."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.code_rules import tree_of

LEVELS = {
    "core": 1,
    "config": 2,
    "sinks": 2,
    "memory": 3,
    "arena": 4,
    "data": 5,
    "cache": 5,
    "models": 5,
    "optim": 5,
    "step": 6,
    "plan": 7,
    "bridges": 8,
    "train": 8,
    "tools": 9,
    "cli": 10,
    "gh200": 10,
}

# A package or module → the only places that may import it, at any depth. A place ending in "/" is a room.
RESERVED = {
    "cuda": ("memory/cuda.py",),
    "torch.distributed": ("train/many/",),
    "accelerate": ("train/many/",),
    "diffusers": ("models/",),
    "transformers": ("models/",),
    "simpletuner": ("bridges/",),
    "toolkit": ("bridges/",),
}

# Rooms below which torch is the subject; everywhere else it is imported inside the function that needs it.
TORCH_ROOMS = ("memory", "cache", "models", "optim", "step", "plan", "train", "bridges")
# Rooms that know nothing of torch, not even inside a function.
NO_TORCH_ROOMS = ("core", "config", "sinks")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, by its full name, and whether importing the file imports it too."""

    module: str
    line: int
    at_import: bool


def imports(path: str, source: str) -> list[Import]:
    """Every import of a file of the package; `path` is relative to `supertuner/`. Relative ones are resolved."""
    package = ["supertuner", *path.split("/")[:-1]]
    return list(_walk(tree_of(source), package, at_import=True))


def layer_violations(path: str, source: str) -> list[str]:
    """Imports of a room above, or beside, the file's own."""
    room = room_of(path)
    if room is None:
        return []
    found = []
    for item in imports(path, source):
        parts = item.module.split(".")
        if parts[0] != "supertuner" or len(parts) < 2 or parts[1] not in LEVELS:
            continue
        other = parts[1]
        if other != room and LEVELS[other] >= LEVELS[room]:
            kind = "beside" if LEVELS[other] == LEVELS[room] else "above"
            found.append(f"{path}:{item.line}: {room} imports {item.module}, a room {kind} its own")
    return found


def unknown_rooms(path: str) -> list[str]:
    """A folder that DESIGN does not name has no level, so nothing would be checked in it."""
    top = path.split("/")[0].removesuffix(".py")
    return [] if top in LEVELS or top in ("__init__", "__main__") else [f"{path}: {top} is not a room with a level"]


def core_violations(path: str, source: str) -> list[str]:
    """Imports of core that are neither the standard library nor core itself."""
    if room_of(path) != "core":
        return []
    return [
        f"{path}:{item.line}: core imports {item.module}; it keeps to the standard library"
        for item in imports(path, source)
        if item.module.split(".")[0] not in sys.stdlib_module_names and not _within(item.module, "supertuner.core")
    ]


def reserved_violations(path: str, source: str) -> list[str]:
    """Imports of a package outside the one place that is meant to touch it."""
    found = []
    for item in imports(path, source):
        for package, places in RESERVED.items():
            allowed = any(path.startswith(place) if place.endswith("/") else path == place for place in places)
            if _within(item.module, package) and not allowed:
                found.append(f"{path}:{item.line}: imports {item.module}, which only {' and '.join(places)} may")
    return found


def torch_violations(path: str, source: str) -> list[str]:
    """torch where it must not be known, or imported before anybody needs it."""
    room = room_of(path)
    found = []
    for item in imports(path, source):
        if not _within(item.module, "torch"):
            continue
        if room in NO_TORCH_ROOMS:
            found.append(f"{path}:{item.line}: {room} knows no torch")
        elif item.at_import and room not in TORCH_ROOMS:
            found.append(f"{path}:{item.line}: torch comes with the file; import it in the function that needs it")
    return found


def room_of(path: str) -> str | None:
    top = path.split("/")[0].removesuffix(".py")
    return top if top in LEVELS else None


def _walk(node: ast.AST, package: list[str], at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        yield from _named(child, package, at_import)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for branch, runs in ((child.body, False), (child.orelse, at_import)):
                for statement in branch:
                    yield from _named(statement, package, runs)
                    yield from _walk(statement, package, runs)
            continue
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, package, at_import and not inside)


def _named(node: ast.AST, package: list[str], at_import: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, at_import)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, package)
        yield Import(base, node.lineno, at_import)
        # `from supertuner import data` names a room, `from torch import distributed` a module.
        for alias in node.names:
            yield Import(f"{base}.{alias.name}", node.lineno, at_import)
    elif isinstance(node, ast.Call) and _is_dynamic_import(node):
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield Import(name.value, node.lineno, at_import)


def _absolute(node: ast.ImportFrom, package: list[str]) -> str:
    if node.level == 0:
        return node.module or ""
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_dynamic_import(node: ast.Call) -> bool:
    return bool(node.args) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
