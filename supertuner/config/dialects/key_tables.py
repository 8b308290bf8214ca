"""Lookups in the tables of dialect keys: keys of a run and of a dataset, the dialect of a dataset, the answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from supertuner.config.dialects.ai_toolkit_keys import AI_TOOLKIT_CONVERTED_KEYS
from supertuner.config.dialects.ai_toolkit_other_keys import AI_TOOLKIT_OTHER_KEYS
from supertuner.config.dialects.dataset_keys import DATASET_KEYS, INHERITED_ROOT_KEYS
from supertuner.config.dialects.dialect_keys import AI_TOOLKIT, SIMPLETUNER, DialectKey, KeyAnswer
from supertuner.config.dialects.simpletuner_keys import SIMPLETUNER_CONVERTED_KEYS
from supertuner.config.dialects.simpletuner_other_keys import SIMPLETUNER_OTHER_KEYS
from supertuner.config.settings import key_paths

RUN_KEYS = (
    *SIMPLETUNER_CONVERTED_KEYS,
    *SIMPLETUNER_OTHER_KEYS,
    *AI_TOOLKIT_CONVERTED_KEYS,
    *AI_TOOLKIT_OTHER_KEYS,
)
DATASET_LIST_KEYS = ("datasets", "dataset", "data_backend", "data_backend_config", "--data_backend_config")
"""Keys of the root that hold or name datasets."""
JOB_ENVELOPE = ("config", "config.name", "config.process")
"""Keys of an ai-toolkit job that are unwrapped before its blocks are translated."""
JOB_ADAPTER = "adapter"
"""ai-toolkit's block of IP adapters and ControlNets; ours of the same name is another thing."""


@cache
def run_keys() -> Mapping[str, DialectKey]:
    """The rows for keys outside datasets, by path."""
    return {row.key: row for row in RUN_KEYS}


@cache
def dataset_keys(dialect: str) -> Mapping[str, DialectKey]:
    """The rows for a dataset of `dialect` ("" if the dialect is unknown), by path."""
    table = {row.key: row for row in DATASET_KEYS if not row.in_dialect_only}
    own = {row.key: row for row in DATASET_KEYS if row.dialect == dialect}
    return table | own


def inherited_keys() -> Mapping[str, tuple[str, str]]:
    """Root keys that datasets inherit → (dialect, key in the dataset)."""
    return {name: (dialect, inner) for dialect, table in INHERITED_ROOT_KEYS.items() for name, inner in table.items()}


def detect_dialect(entry: Mapping[str, object]) -> str:
    """The dialect of a dataset entry, by its first key that only one dialect has; "" if there is none."""
    names = [name for name in entry if name not in ("type", "crop", "audio")]
    rows = (row for name in names for key, row in dataset_keys("").items() if key == name or key.startswith(f"{name}."))
    return next((row.dialect for row in rows), "")


def answer_to(dialect: str, place: str, key: str) -> KeyAnswer | None:
    """The answer to a key of SimpleTuner or ai-toolkit (`dialect`, in any case) in a "run" or a "dataset"; None if
    there is none.

    A key inside a block that is answered as a whole has the answer of the block.
    """
    name = {SIMPLETUNER.lower(): SIMPLETUNER, AI_TOOLKIT: AI_TOOLKIT}[dialect.lower()]
    table = dataset_keys(name) if place == "dataset" else run_keys()
    rows = {path: row for path, row in table.items() if row.dialect == name}
    steps = key.split(".")
    for end in range(len(steps), 0, -1):
        path = ".".join(steps[:end]).removesuffix("[]")
        if path in rows:
            return rows[path].answer
    if name == AI_TOOLKIT and key == JOB_ADAPTER:
        return KeyAnswer.REASON
    own_path = f"datasets[].{key}" if place == "dataset" else key
    is_block = any(path.startswith(f"{key}.") for path in rows)
    is_shared = own_path in key_paths.settings() or own_path in key_paths.blocks()
    if is_block or is_shared or (place == "run" and key in (*DATASET_LIST_KEYS, *JOB_ENVELOPE, *inherited_keys())):
        return KeyAnswer.ACTS
    return None
