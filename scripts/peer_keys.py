"""Lists the configuration keys of a checkout of SimpleTuner or ai-toolkit, and those that no table here answers.

The host is read as text (Python syntax trees, TypeScript object literals and interfaces), never imported. Keys that a
host computes at run time are not found. The exit code is 1 if a key has no answer.

    python scripts/peer_keys.py simpletuner ~/SimpleTuner
    python scripts/peer_keys.py ai-toolkit ~/ai-toolkit --revision 27a03a91 --all
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

RUN, DATASET = "run", "dataset"
KeySet = set[tuple[str, str]]
"""(`run` or `dataset`, path of the key)."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """The files of a repository: those of its folder, or those of a revision (also of a bare repository)."""

    folder: Path
    revision: str = ""

    def read(self, path: str) -> str:
        if not self.revision:
            return (self.folder / path).read_text(encoding="utf-8")
        return self._git("show", f"{self.revision}:{path}")

    def python_files(self, folder: str) -> list[str]:
        if not self.revision:
            return [str(path.relative_to(self.folder)) for path in sorted((self.folder / folder).rglob("*.py"))]
        names = self._git("ls-tree", "-r", "--name-only", self.revision, folder).splitlines()
        return [name for name in names if name.endswith(".py")]

    def trees(self, folder: str) -> Iterator[ast.Module]:
        return (ast.parse(self.read(path)) for path in self.python_files(folder))

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout


# --- SimpleTuner -----------------------------------------------------------------------------------------------------

FIELD_FOLDERS = (
    "simpletuner/simpletuner_sdk/server/services/field_registry/sections",
    "simpletuner/helpers/models/field_registry",
)
COMMAND_LINE_FILES = (
    "simpletuner/helpers/configuration/cmd_args.py",
    "simpletuner/helpers/configuration/cli_utils.py",
)
DATA_FOLDER = "simpletuner/helpers/data_backend"
BLUEPRINT_FILE = "simpletuner/simpletuner_sdk/server/data/dataset_blueprints.py"
DATASET_VARIABLES = {
    **dict.fromkeys(("backend", "backend_dict", "backend_config", "config.config"), ""),
    **dict.fromkeys(("video_config", "video_block"), "video."),
    **dict.fromkeys(("audio_config", "audio_block", "audio_settings"), "audio."),
    "parquet_config": "parquet.",
    "caption_shuffle": "caption_shuffle.",
    "hf_block": "huggingface.",
    "webshart_block": "webshart.",
    "grounding_config": "grounding.",
}
"""Variables of its data backends that hold a block of a dataset → the prefix of the block's keys."""
DATASET_BLOCKS = ("video", "audio")
"""Blocks whose keys its web form joins to their names by `_`."""
INTERNAL_DATASET_KEYS = frozenset(
    [
        "auto_generated",
        "config",
        "text_embed_cache",
        "distillation_cache",
        "image_processing_batch_size",
        "instance_data_root",
        "conditioning_config",
        "csv",
        "filter_func",
        "s2v_datasets",
        "datasets",
        "audio.cache_dir",
        "disable_after_epoch_step",
    ]
)
"""Keys that its code sets or derives itself."""


def simpletuner_keys(checkout: Checkout) -> KeySet:
    names: set[str] = set()
    for folder in FIELD_FOLDERS:
        for tree in checkout.trees(folder):
            names |= set(field_names(tree))
    for path in COMMAND_LINE_FILES:
        names |= set(command_line_names(ast.parse(checkout.read(path))))
    return {(RUN, name) for name in names} | {(DATASET, key) for key in simpletuner_dataset_keys(checkout)}


def field_names(tree: ast.Module) -> Iterator[str]:
    """The names, arguments and aliases of `ConfigField(…)` calls, also of those in a loop over literals."""
    for loops, call in calls_with_loops(tree, ()):
        if name_of(call.func) != "ConfigField":
            continue
        bindings = [binding for loop in loops for binding in loop_bindings(loop)] or [{}]
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        for binding in bindings:
            for argument in ("name", "arg_name", "aliases"):
                for text in literal_texts(arguments.get(argument), binding):
                    yield text.removeprefix("--")


def calls_with_loops(node: ast.AST, loops: tuple[ast.For, ...]) -> Iterator[tuple[tuple[ast.For, ...], ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield loops, child
        yield from calls_with_loops(child, (*loops, child) if isinstance(child, ast.For) else loops)


def loop_bindings(loop: ast.For) -> list[dict[str, str]]:
    """The values of the loop's variables in each turn, as far as they are literal texts or numbers."""
    targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    names = [target.id if isinstance(target, ast.Name) else "" for target in targets]
    if isinstance(loop.iter, ast.Call) and name_of(loop.iter.func) == "range":
        bounds = [ast.literal_eval(argument) for argument in loop.iter.args]
        return [{names[0]: str(number)} for number in range(*bounds)]
    if not isinstance(loop.iter, ast.List | ast.Tuple):
        return []
    rows = [entry.elts if isinstance(entry, ast.Tuple) else [entry] for entry in loop.iter.elts]
    return [
        {name: str(part.value) for name, part in zip(names, row, strict=False) if isinstance(part, ast.Constant)}
        for row in rows
    ]


def literal_texts(node: ast.expr | None, binding: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name(id=name) if name in binding:
            yield binding[name]
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            for entry in entries:
                yield from literal_texts(entry, binding)
        case ast.JoinedStr(values=parts):
            texts = [next(literal_texts(joined_part(part), binding), None) for part in parts]
            if None not in texts:
                yield "".join(text for text in texts if text is not None)


def joined_part(part: ast.expr) -> ast.expr:
    return part.value if isinstance(part, ast.FormattedValue) else part


def command_line_names(tree: ast.Module) -> Iterator[str]:
    """Options that the parser adds by hand or treats specially, and keys of older versions that it rewrites."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in ("add_argument", "_legacy_handler"):
            for argument in node.args:
                yield from (text.removeprefix("--") for text in literal_texts(argument, {}))
        elif isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                for text in literal_texts(side, {}):
                    if re.fullmatch(r"--[a-z0-9_]+", text):
                        yield text.removeprefix("--")


def simpletuner_dataset_keys(checkout: Checkout) -> set[str]:
    keys: set[str] = set()
    for tree in checkout.trees(DATA_FOLDER):
        keys |= {prefix + key for prefix, key in keys_read_from(tree, DATASET_VARIABLES)}
    blueprints = ast.parse(checkout.read(BLUEPRINT_FILE))
    for node in ast.walk(blueprints):
        if isinstance(node, ast.Dict):
            entries = {text_of(key): text_of(value) for key, value in zip(node.keys, node.values, strict=True)}
            if "label" in entries and "backendType" not in entries and entries.get("id"):
                keys.add(unjoined(entries["id"]))
    return {key for key in keys if key not in INTERNAL_DATASET_KEYS and not key.startswith("_")}


def unjoined(form_name: str) -> str:
    """The key of a field of the web form, `video_num_frames` → `video.num_frames`."""
    block, _, rest = form_name.partition("_")
    return f"{block}.{rest}" if block in DATASET_BLOCKS and rest and rest != "column" else form_name


# --- ai-toolkit ------------------------------------------------------------------------------------------------------

CONFIG_FILE = "toolkit/config_modules.py"
PROCESS_FILES = (
    "jobs/process/BaseProcess.py",
    "jobs/process/BaseTrainProcess.py",
    "jobs/process/BaseSDTrainProcess.py",
)
UI_TYPES_FILE, UI_JOB_FILE = "ui/src/types.ts", "ui/src/app/jobs/new/jobConfig.ts"
CONFIG_CLASSES = {
    "SaveConfig": "save.",
    "LoggingConfig": "logging.",
    "SampleConfig": "sample.",
    "SampleItem": "sample.samples[].",
    "NetworkConfig": "network.",
    "LoRMConfig": "network.lorm.",
    "TrainConfig": "train.",
    "EMAConfig": "train.ema_config.",
    "ModelConfig": "model.",
    "QuantizeKwargsConfig": "model.quantize_kwargs.",
}
"""Its classes of a run's settings → the prefix of their keys in a process. The blocks of other kinds of training
(adapter, embedding, decorator, slider, guidance, validation_config) are answered as a whole."""
DATASET_CLASS = "DatasetConfig"
JOB_KEYS = ("job", "config", "meta", "config.name", "config.process")


def ai_toolkit_keys(checkout: Checkout) -> KeySet:
    keys: KeySet = {(RUN, key) for key in JOB_KEYS}
    for node in ast.walk(ast.parse(checkout.read(CONFIG_FILE))):
        if isinstance(node, ast.ClassDef):
            for _, key in keys_read_from(node, {"kwargs": ""}):
                keys |= class_key(node.name, key)
    for path in PROCESS_FILES:
        for node in ast.walk(ast.parse(checkout.read(path))):
            if isinstance(node, ast.Call) and name_of(node.func) == "get_conf" and node.args:
                keys.add((RUN, text_of(node.args[0])))
    for name, members in interfaces(checkout.read(UI_TYPES_FILE)):
        for key in members:
            keys |= {(RUN, key)} if name == "ProcessConfig" else class_key(name, key)
    return (keys - {(RUN, "")}) | default_job_keys(checkout.read(UI_JOB_FILE))


def class_key(class_name: str, key: str) -> KeySet:
    if class_name == DATASET_CLASS:
        return {(DATASET, key)}
    return {(RUN, CONFIG_CLASSES[class_name] + key)} if class_name in CONFIG_CLASSES else set()


def interfaces(text: str) -> Iterator[tuple[str, list[str]]]:
    """The interfaces of a TypeScript file, with the names of their members (not of nested objects)."""
    for match in re.finditer(r"export interface (\w+)[^{]*\{", text):
        yield match[1], [path for path in object_keys(text, match.end()) if "." not in path]


def default_job_keys(text: str) -> KeySet:
    """The keys of the web interface's default dataset and default job."""
    keys: KeySet = set()
    for match in re.finditer(r"export const (\w+)(?:: \w+)? = \{", text):
        paths = object_keys(text, match.end())
        if match[1] == "defaultDatasetConfig":
            keys |= {(DATASET, path) for path in paths}
        elif match[1] == "defaultJobConfig":
            inner = "config.process."
            keys |= {(RUN, path.removeprefix(inner)) for path in paths}
        elif match[1] == "defaultCompileOptions":
            keys |= {(RUN, f"model.{path}") for path in paths}
    return keys


def object_keys(text: str, start: int) -> list[str]:
    """The paths of the keys of the TypeScript object whose `{` ends at `start`. Lists count as their items."""
    paths: list[str] = []
    blocks: list[str] = []
    pending = ""
    token = re.compile(r"//[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|(\w+)\??:(?!:)|([{}])", re.DOTALL)
    for match in token.finditer(text, start):
        if match[1]:
            pending = ".".join(part for part in (*blocks, match[1]) if part)
            paths.append(pending)
        elif match[2] == "{":
            blocks.append(pending.removeprefix(".".join(filter(None, blocks))).lstrip("."))
        elif match[2] == "}":
            if not blocks:
                break
            blocks.pop()
    return paths


# --- both ------------------------------------------------------------------------------------------------------------


def keys_read_from(tree: ast.AST, variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(prefix, key) of every `variable.get("key")` and `variable["key"]`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(key)), *_]):
                variable = ast.unparse(owner)
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))):
                variable = ast.unparse(owner)
            case _:
                continue
        if variable in variables:
            yield variables[variable], key


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def text_of(node: ast.expr | None) -> str:
    """The text of a literal; "" if it is another expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


READERS: dict[str, Callable[[Checkout], KeySet]] = {"simpletuner": simpletuner_keys, "ai-toolkit": ai_toolkit_keys}


def unanswered(host: str, keys: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    from supertuner.config.dialects.key_tables import answer_to

    return [(place, key) for place, key in sorted(keys) if answer_to(host, place, key) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=sorted(READERS))
    parser.add_argument("checkout", type=Path, help="folder of the repository")
    parser.add_argument("--revision", default="", help="commit or tag to read instead of the files in the folder")
    parser.add_argument("--all", action="store_true", help="print every key, not only those without an answer")
    options = parser.parse_args()
    keys = READERS[options.host](Checkout(options.checkout, options.revision))
    missing = sorted(keys) if options.all else unanswered(options.host, keys)
    for place, key in missing:
        print(place, key)
    return 1 if missing and not options.all else 0


if __name__ == "__main__":
    sys.exit(main())
