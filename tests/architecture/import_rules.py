"""Who may import whom, read off the syntax tree: functions over source text, so that each rule can be shown to fail."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from tests.architecture.code_rules import tree_of

LEVELS = {
    "core": 1,
    "config": 2,
    "sinks": 2,
    "memory": 3,
    "runs": 3,
    "arena": 4,
    "data": 5,
    "cache": 5,
    "models": 5,
    "optim": 5,
    "step": 6,
    "plan": 7,
    "distributed": 8,
    "train": 9,
    "api": 10,
    "bridges": 11,
    "web": 11,
    "tools": 11,
    "cli": 12,
    "gh200": 12,
}

# A package or module → the only places that may import it, at any depth. A place that ends in "/" is a folder.
RESERVED = {
    "cuda": ("memory/cuda.py",),
    "torch.distributed": ("distributed/", "train/checkpoint/"),
    "accelerate": ("distributed/",),
    "diffusers": ("models/",),
    "transformers": ("models/",),
    "simpletuner": ("bridges/",),
    "toolkit": ("bridges/",),
    "starlette": ("web/",),
    "uvicorn": ("web/",),
}

# Packages whose subject is torch; everywhere else it is imported inside the function that needs it.
TORCH_PACKAGES = ("memory", "cache", "models", "optim", "step", "plan", "distributed", "train", "bridges")
# Files of other packages whose subject is torch: a torch Dataset.
TORCH_FILES = ("data/torch_dataset.py",)
# Packages that do not know torch, not even inside a function.
NO_TORCH_PACKAGES = ("core", "config", "sinks", "runs")
# The command line is a client of the API: it does not know the packages that compute.
CLI_PACKAGES = ("api", "cli", "config", "core", "runs", "sinks", "tools")


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
    """Imports of a package above, or beside, the file's own."""
    package = package_of(path)
    if package is None:
        return []
    found = []
    for item in imports(path, source):
        parts = item.module.split(".")
        if parts[0] != "supertuner" or len(parts) < 2 or parts[1] not in LEVELS:
            continue
        other = parts[1]
        if other != package and LEVELS[other] >= LEVELS[package]:
            kind = "beside" if LEVELS[other] == LEVELS[package] else "above"
            found.append(f"{path}:{item.line}: {package} imports {item.module}, a package {kind} its own")
    return found


def unknown_packages(path: str) -> list[str]:
    """A folder that DESIGN does not name has no level, so nothing would be checked in it."""
    top = path.split("/")[0].removesuffix(".py")
    return [] if top in LEVELS or top in ("__init__", "__main__") else [f"{path}: {top} is not a package with a level"]


def core_violations(path: str, source: str) -> list[str]:
    """Imports of core that are neither the standard library nor core itself."""
    if package_of(path) != "core":
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
    package = package_of(path)
    found = []
    for item in imports(path, source):
        if not _within(item.module, "torch"):
            continue
        if package in NO_TORCH_PACKAGES:
            found.append(f"{path}:{item.line}: {package} knows no torch")
        elif item.at_import and package not in TORCH_PACKAGES and path not in TORCH_FILES:
            found.append(f"{path}:{item.line}: torch comes with the file; import it in the function that needs it")
    return found


def cli_violations(path: str, source: str) -> list[str]:
    """Imports of the command line that go around the API into the packages below it."""
    if package_of(path) != "cli":
        return []
    return [
        f"{path}:{item.line}: cli imports {item.module}; it is a client of api and tools"
        for item in imports(path, source)
        if item.module.startswith("supertuner.") and item.module.split(".")[1] in set(LEVELS) - set(CLI_PACKAGES)
    ]


def folder_cycles(imported: dict[str, set[str]]) -> list[str]:
    """Folders that import each other, directly or through others. `imported`: file → files that it imports, all as
    paths relative to `supertuner/`.

    A package is looked at from the inside: each of its sub-packages is one node, and its own files together are one
    more, so `train/*.py` may import `train/offload/`, or the other way round, but not both.
    """
    found = []
    for package in sorted({str(folder) for path in imported for folder in PurePosixPath(path).parents} - {"."}):
        graph: dict[str, set[str]] = {}
        for path, targets in imported.items():
            for target in targets:
                pair = _part(path, package), _part(target, package)
                if None not in pair and pair[0] != pair[1]:
                    graph.setdefault(str(pair[0]), set()).add(str(pair[1]))
        found += [f"{package}: {' → '.join(cycle)}" for cycle in _cycles(graph)]
    return found


def _part(path: str, package: str) -> str | None:
    """The node of `package` that a file belongs to: a sub-package, or "own files"; None: the file is elsewhere."""
    if not path.startswith(f"{package}/") or path == f"{package}/__init__.py":
        return None
    below = path.removeprefix(f"{package}/").split("/")
    return below[0] if len(below) > 1 else "own files"


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One cycle for each node that can reach itself, each shown once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        ways = [[start]]
        seen: set[str] = set()
        while ways:
            way = ways.pop(0)
            for node in sorted(graph.get(way[-1], set())):
                if node == start:
                    found.setdefault(frozenset(way), [*way, start])
                elif node not in seen:
                    seen.add(node)
                    ways.append([*way, node])
    return list(found.values())


def package_of(path: str) -> str | None:
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
        # `from supertuner import data` names a package, `from torch import distributed` a module.
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
