"""Parses JSON, YAML and TOML files into plain JSON values. Unsafe or ambiguous content is an error with its line."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from supertuner.core.errors import ConfigError, ConfigProblem
from supertuner.core.types import JSON, MIB, bytes_text

MAX_BYTES = 4 * MIB
MAX_DEPTH = 32
MAX_VALUES = 100_000
"""A limit for YAML aliases, with which a few lines can stand for billions of values."""


_LINE_AND_COLUMN = re.compile(r"\d+:\d+: ")
_TOO_MANY_DIGITS = "a number has more digits than any setting can have"


class ConfigSyntaxError(Exception):
    """The text does not parse, or holds values that JSON cannot represent. Callers that know the file turn it into a
    ConfigError."""

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(message)


def read_bytes(path: Path) -> bytes:
    """The content of the file. Raises ConfigError if it cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # reading a pipe could block forever
                raise _error(path.name, f"cannot read {path}: it is not a regular file")
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _error(path.name, f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise _error(path.name or str(path), f"cannot read {path}: {reason}") from None
    if len(content) > MAX_BYTES:
        raise _error(path.name, f"larger than {bytes_text(MAX_BYTES)}; this is not a configuration")
    return content


def parse_bytes(content: bytes, name: str) -> JSON:
    """Parse the content of a file called `name`, whose extension determines the format. Raises ConfigError."""
    parser = _PARSER_BY_SUFFIX.get(Path(name).suffix.lower())
    if parser is None:
        suffixes = ", ".join(_PARSER_BY_SUFFIX)
        raise _error(name, f"the format follows from the extension, which must be one of {suffixes}")
    try:
        value: JSON = parser(content.decode("utf-8-sig"))
        check_plain_values(value)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _error(name, f"{name}:{line}: not UTF-8 (byte 0x{content[error.start]:02x})") from None
    except RecursionError:
        raise _error(name, f"nested deeper than {MAX_DEPTH} levels") from None
    except ConfigSyntaxError as error:
        text = f"{name}:{error}" if _LINE_AND_COLUMN.match(str(error)) else str(error)
        raise _error(name, text, error.path) from None
    return value


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except json.JSONDecodeError as error:
        raise ConfigSyntaxError(f"{error.lineno}:{error.colno}: {error.msg}") from None
    except ValueError:  # a number with thousands of digits
        raise ConfigSyntaxError(_TOO_MANY_DIGITS) from None


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ConfigSyntaxError(f'the key "{duplicate}" occurs twice in one block')
    return mapping


def _parse_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        position = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        location = f"{position[1]}:{position[2]}: " if position else ""
        raise ConfigSyntaxError(location + (message[: position.start()] if position else message)) from None
    except ValueError:
        raise ConfigSyntaxError(_TOO_MANY_DIGITS) from None


def _parse_yaml(text: str) -> Any:
    try:
        value = yaml.load(text, Loader=Yaml12Loader)  # noqa: S506 -- a subclass of the safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{mark.line + 1}:{mark.column + 1}: " if mark else ""
        raise ConfigSyntaxError(location + _yaml_message(error.problem or error.context or "not YAML")) from None
    except yaml.YAMLError as error:
        raise ConfigSyntaxError(str(error).splitlines()[0]) from None
    except ValueError:
        raise ConfigSyntaxError(_TOO_MANY_DIGITS) from None
    return {} if value is None else value


def _yaml_message(problem: str) -> str:
    """PyYAML's message, replaced where it does not say what to do."""
    if problem == "but found another document":
        return "a second document begins here (---); one file is one configuration"
    tag = re.fullmatch(r"could not determine a constructor for the tag '(.*)'", problem)
    return f"tags are not supported ({tag[1]}); write the plain value" if tag else problem


_PARSER_BY_SUFFIX: dict[str, Callable[[str], Any]] = {
    ".json": _parse_json,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": _parse_toml,
}


def _yaml_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(node.value)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)
"""Plain scalars of YAML 1.2 that are not text: their type, their pattern, their possible first letters."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, form, first in _SCALARS:
        for letter in first:
            table.setdefault(letter, []).append((f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{form})$")))
    return table


class Yaml12Loader(yaml.SafeLoader):
    """Reads scalars by the rules of YAML 1.2: `1e-6` is a number, `no` and dates are text. Refuses duplicate keys."""

    yaml_implicit_resolvers = _resolvers()
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:int": _yaml_int,
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            message = ""
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                message = "a key must be text"
            elif key.value == "<<":
                message = "merge keys (<<) are not supported; write the keys out"
            elif key.value in seen:
                message = f'the key "{key.value}" occurs twice in one block'
            if message:
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Does nothing: `construct_mapping` refuses merge keys."""


def check_plain_values(value: Any, path: str = "", depth: int = 0, value_count: list[int] | None = None) -> None:
    """Raise ConfigSyntaxError for types that JSON does not have, numbers that are not finite, and trees that are too
    deep or too large."""
    value_count = [0] if value_count is None else value_count
    value_count[0] += 1
    if depth > MAX_DEPTH:
        raise ConfigSyntaxError(f"nested deeper than {MAX_DEPTH} levels")
    if value_count[0] > MAX_VALUES:
        raise ConfigSyntaxError(f"more than {MAX_VALUES} values; a YAML alias counts each time it is used")
    if isinstance(value, dict):
        for name, inner in value.items():
            check_plain_values(name, path, depth + 1, value_count)
            check_plain_values(inner, f"{path}.{name}".lstrip("."), depth + 1, value_count)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_plain_values(inner, f"{path}[{index}]", depth + 1, value_count)
    elif refusal := _scalar_refusal(value):
        raise ConfigSyntaxError(refusal, path)


def _scalar_refusal(value: Any) -> str:
    """Why no setting can have this value; "" if it is allowed."""
    if isinstance(value, str):
        odd = any(0xD800 <= ord(c) <= 0xDFFF or c == "\0" for c in value)
        return f"{value!r} holds characters that no file name or caption can have" if odd else ""
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, int):
        return "" if -(1 << 63) <= value < 1 << 63 else "a whole number has more than 64 bits"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is not a finite number"
    return f"{str(value)[:60]} is a {type(value).__name__}; put it in quotes if it is meant as text"


def _error(source: str, message: str, path: str = "") -> ConfigError:
    return ConfigError(source, [ConfigProblem(path, message)])
