"""What no file of the package may do, read off the syntax tree: functions over source text, returning what is wrong."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache

FILE_LINES = 500
FUNCTION_LINES = 80
PARAMETERS = 7
FOLDER_FILES = 20
BROAD = ("Exception", "BaseException")
MUTABLE_CALLS = (
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "WeakValueDictionary",
    "WeakKeyDictionary", "Lock", "RLock", "Event", "Condition", "Semaphore", "local", "ContextVar", "Queue",
    "SimpleQueue", "ThreadPoolExecutor", "count", "Random",
)  # fmt: skip
MUTATORS = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear")
# Names bound at module level by a call that is no state: declarations of types, and typer's table of commands.
DECLARATIONS = ("TypeVar", "ParamSpec", "NewType", "namedtuple", "typer.Typer", "Typer")
PICKLES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
UNSAFE_CALLS = ("torch.load", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all")
SAFE_LOADERS = ("yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader")


@cache  # many rules read the same files; cleared when they are done
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


def swallowed(source: str) -> list[str]:
    """Handlers that catch everything and do not raise, and those that do nothing and do not say why."""
    commented = _comment_lines(source)
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ExceptHandler):
            if _is_broad(node.type) and not _raises(node):
                found.append(f"line {node.lineno}: catches everything and does not raise")
            elif _does_nothing(node) and not commented.intersection(range(node.lineno, _end(node) + 1)):
                found.append(f"line {node.lineno}: ignores an error without a comment that says why")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            if any(_is_broad(argument) for argument in node.args):
                found.append(f"line {node.lineno}: suppresses everything")
            elif not commented.intersection(range(node.lineno - 1, _end(node) + 2)):
                found.append(f"line {node.lineno}: suppresses an error without a comment that says why")
    return found


def global_state(source: str) -> list[str]:
    """`global` statements, mutable values at module level, and constants that a function changes.

    A constant is UPPER_CASE and holds a literal table; an empty table is a store by another name.
    """
    tree = tree_of(source)
    found = [f"line {n.lineno}: global {', '.join(n.names)}" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    constants = set()
    for name, value, line in _module_level(tree):
        if name.startswith("__") and name.endswith("__"):
            continue
        if _is_empty_store(value) or _called(value).split(".")[-1] in MUTABLE_CALLS:
            found.append(f"line {line}: {name} is mutable state of the module")
        elif name.lstrip("_").isupper():
            constants.add(name)
        elif isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
            found.append(f"line {line}: {name} is a mutable value at module level; a constant is UPPER_CASE")
        elif isinstance(value, ast.Call) and _called(value) not in DECLARATIONS and not name[:1].isupper():
            found.append(f"line {line}: {name} is an object made at import")
    return found + [
        f"line {line}: {name} is a constant, and is changed here" for name, line in _changes(tree, constants)
    ]


def named_families(source: str, names: tuple[str, ...]) -> list[str]:
    """Texts (not docstrings) that are one of these names of families, and texts and identifiers with one of an expert
    (`high_noise`) in them."""
    tree = tree_of(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        identifier = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        has_expert = any("_" in name and name in f"{text} {identifier}" for name in names)
        if id(node) not in docstrings and (text in names or has_expert):
            found.append(f"line {node.lineno}: {text or identifier} is named outside its folder and config/families.py")
    return found


def environment_reads(source: str) -> list[str]:
    """Any touch of the process environment."""
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv",
        ):  # fmt: skip
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [a.name for a in node.names if "env" in a.name]
            found += [f"line {node.lineno}: from os import {name}" for name in names]
    return found


def unsafe_loads(source: str) -> list[str]:
    """Formats that run code when they are read."""
    tree = tree_of(source)
    safe = {*SAFE_LOADERS, *(c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and _is_safe_loader(c))}
    found = []
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            loader = [ast.unparse(k.value) for k in node.keywords if k.arg == "Loader"]
            if name in UNSAFE_CALLS or (name in ("yaml.load", "yaml.load_all") and not safe.issuperset(loader or [""])):
                found.append(f"line {node.lineno}: {name}")
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not allowed:
                    found.append(f"line {node.lineno}: {name} with allow_pickle")
        found += [f"line {node.lineno}: imports {m}" for m in modules if m.split(".")[0] in PICKLES]  # type: ignore[attr-defined]
    return found


def prints(source: str) -> list[str]:
    return [
        f"line {node.lineno}: print"
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]


def missing_docstring(source: str) -> list[str]:
    return [] if ast.get_docstring(tree_of(source)) else ["does not open with what it is for"]


def oversized(source: str) -> list[str]:
    lines = source.count("\n")
    found = [f"{lines} lines, more than {FILE_LINES}"] if lines > FILE_LINES else []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _end(node) - node.lineno >= FUNCTION_LINES:
            found.append(f"line {node.lineno}: {node.name} has more than {FUNCTION_LINES} lines")
    return found


def many_parameters(source: str) -> list[str]:
    """Functions with more than seven parameters. `# many parameters: <reason>` on the `def` line allows it."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(one.arg not in ("self", "cls") for one in every)
            if count > PARAMETERS and "# many parameters: " not in lines[node.lineno - 1]:
                found.append(f"line {node.lineno}: {node.name} has {count} parameters, more than {PARAMETERS}")
    return found


def public_classes(source: str) -> list[str]:
    """Names of the public classes that a file defines."""
    return [n.name for n in ast.walk(tree_of(source)) if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def attribute_names(source: str) -> set[str]:
    """Every attribute that the source reads: the settings it can possibly use."""
    tree = tree_of(source)
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def _is_safe_loader(node: ast.ClassDef) -> bool:
    """A loader that adds to the safe one; the safe loader makes no objects, and a subclass of it makes only its own."""
    return bool(node.bases) and all(ast.unparse(base) in SAFE_LOADERS for base in node.bases)


def _comment_lines(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(element) for element in kind.elts)
    return kind is None or ast.unparse(kind).split(".")[-1] in BROAD


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether the handler itself raises; a `raise` inside a function defined in it does not count."""
    pending: list[ast.AST] = list(handler.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return False


def _does_nothing(handler: ast.ExceptHandler) -> bool:
    def idle(statement: ast.stmt) -> bool:
        dots = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return dots or isinstance(statement, ast.Pass | ast.Continue)

    return all(idle(statement) for statement in handler.body)


def _module_level(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id, node.value, node.lineno


def _is_empty_store(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.List | ast.Set) and not value.elts


def _called(value: ast.expr) -> str:
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _changes(tree: ast.Module, constants: set[str]) -> Iterator[tuple[str, int]]:
    """Places where a module's constant is written to: item assignment, deletion, or a method that changes it."""
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        if isinstance(target, ast.Name) and target.id in constants:
            yield target.id, node.lineno  # type: ignore[attr-defined]


def _end(node: ast.AST) -> int:
    return int(getattr(node, "end_lineno", 0) or 0)
