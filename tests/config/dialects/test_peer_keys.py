"""Every key of SimpleTuner and ai-toolkit has an answer, the docs count the answers, and a script finds new keys.

`known_keys` holds the keys of a version of each program, as `scripts/peer_keys.py --all` lists them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from supertuner.config.dialects.dialect_keys import KeyAnswer
from supertuner.config.dialects.key_tables import answer_to
from supertuner.config.sources.provenance import ConfigLayer, ConfigSource
from supertuner.config.sources.translate import SourceTranslator
from supertuner.core.types import JSON

ROOT = Path(__file__).parents[3]
KNOWN_KEYS = Path(__file__).parent / "known_keys"
KNOWN_WORDS = ("huber", "norm", "textfile", "eval", "lokr", "/a")
ENVELOPE = ("config", "config.process", "meta.name", "meta.version", "datasets", "data_backend_config", "model")
"""Keys that only hold others."""
CONTEXT: dict[str, JSON] = {"mask_path": "m", "caption_strategy": "textfile", "instance_prompt": "a", "num_frames": 5}
CONTEXT_OF_RUN: dict[str, dict[str, JSON]] = {"": {"model_family": "flux", "loss_type": "huber", "use_ema": True}}
CONTEXT_OF_BLOCK: dict[str, dict[str, JSON]] = {"network": {"type": "lokr"}, "model": {"arch": "flux"}}
"""Keys without which some others do not count."""
VERSIONS = {"SimpleTuner": "4.8.0", "ai-toolkit": "27a03a91"}


def known_keys(program: str) -> list[tuple[str, str]]:
    """(`run` or `dataset`, key) of each key of the program."""
    file = KNOWN_KEYS / f"{program.lower()}-{VERSIONS[program]}.txt"
    return [(place, key) for place, key in (line.split() for line in file.read_text().splitlines())]


@pytest.mark.parametrize("program", VERSIONS)
def test_every_known_key_has_one_of_three_answers_and_the_docs_count_them(program: str) -> None:
    keys = known_keys(program)
    answers = {key: answer_to(program, *key) for key in keys}
    assert [key for key in keys if answers[key] is None] == []
    counts = Counter(answers.values())
    assert sum(counts.values()) == len(keys) == len(set(keys))
    figures = " | ".join(str(counts[answer]) for answer in KeyAnswer)
    row = f"| {program} {VERSIONS[program]} | {len(keys)} | {figures} |"
    assert row in (ROOT / "docs/configuration.md").read_text(), f"docs/configuration.md needs the row {row}"


TRIED: tuple[JSON, ...] = (True, False, 3, 0.5, "nonsense", "0.5", ["a", "b"], {"a": 1}, *KNOWN_WORDS)
"""Values of all kinds, of which at least one must show what a key does."""


def findings(program: str, place: str, key: str, value: JSON) -> ConfigLayer:
    """What a file says that has this key, with keys on which some conversions depend."""
    steps = key.removeprefix("config.").replace("[]", "").split(".")
    block: JSON = value
    for step in reversed(steps):
        block = {step: [block] if step == "samples" and len(steps) == 3 else block}
    assert isinstance(block, dict)
    if place == "dataset":
        marker = {"id": "a"} if program == "SimpleTuner" else {"folder_path": "a"}
        block = {"data_backend" if program == "SimpleTuner" else "dataset": {**marker, **CONTEXT, **block}}
    else:
        block = {**CONTEXT_OF_RUN.get(steps[0] if len(steps) > 1 else "", {}), **block}
        for name, inner in CONTEXT_OF_BLOCK.items():
            if name in block and isinstance(block[name], dict):
                block[name] = {**inner, **block[name]}
    return SourceTranslator(ConfigSource("run.json", Path("."))).translate_file(block)


@pytest.mark.parametrize("program", VERSIONS)
def test_no_known_key_is_dropped_silently(program: str) -> None:
    """Each key sets something, or gets a note, or is refused, with at least one value."""
    silent = []
    for place, key in known_keys(program):
        if key in ENVELOPE:
            continue
        steps = key.removeprefix("config.").split("[]")[0].split(".")
        names = {".".join(steps[: end + 1]) for end in range(len(steps))}  # or a block that is answered as a whole
        for value in TRIED:
            layer = findings(program, place, key, value)
            named = [finding.path for finding in layer.problems] + [warning.what for warning in layer.warnings]
            named += [provenance.source_key for provenance in layer.values.values()]
            if any(path.removeprefix("data_backend.").removeprefix("dataset.") in names for path in named):
                break
        else:
            silent.append(f"{place} {key}")
    assert silent == []


def test_no_key_outside_the_programs_is_answered() -> None:
    for place in ("run", "dataset"):
        assert answer_to("SimpleTuner", place, "lerning_rate") is None
        assert answer_to("ai-toolkit", place, "train.lerning_rate") is None
    assert answer_to("ai-toolkit", "run", "learning_rate") is None  # SimpleTuner's


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_keys", ROOT / "scripts/peer_keys.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_keys"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SIMPLETUNER_FILES = {
    "simpletuner/simpletuner_sdk/server/services/field_registry/sections/a.py": """
def register(registry):
    registry._add_field(ConfigField(name="learning_rate", arg_name="--learning_rate", aliases=["--brand_new_alias"]))
    for index in range(1, 3):
        registry._add_field(ConfigField(name=f"text_encoder_{index}_precision", arg_name=None))
    for name, label in [("sdnq_svd_rank", "a"), ("brand_new_loop", "b")]:
        registry._add_field(ConfigField(name=name, arg_name=f"--{name}", ui_label=label))
""",
    "simpletuner/helpers/models/field_registry/b.py": "ConfigField(name='brand_new_family')",
    "simpletuner/helpers/configuration/cmd_args.py": "if arg in ('--ignore_final_epochs', '--brand_new_option'): pass",
    "simpletuner/helpers/configuration/cli_utils.py": "@_legacy_handler('save_total_limit')\ndef f(): pass",
    "simpletuner/helpers/data_backend/local.py": "backend.get('repeats'); backend['new_data']; video_config.get('new')",
    "simpletuner/simpletuner_sdk/server/data/dataset_blueprints.py": "x = {'id': 'video_num_frames', 'label': 'a'}",
}
AI_TOOLKIT_FILES = {
    "toolkit/config_modules.py": """
class TrainConfig:
    def __init__(self, **kwargs):
        self.lr, self.new = kwargs.get('lr', 1e-6), kwargs.get('brand_new', 1)
class DatasetConfig:
    def __init__(self, **kwargs):
        self.a, self.b = kwargs.get('folder_path'), kwargs.get('new_data')
class SomethingElse:
    def __init__(self, **kwargs):
        self.a = kwargs.get('not_a_setting_of_a_run')
""",
    "jobs/process/BaseProcess.py": "self.get_conf('name')",
    "jobs/process/BaseTrainProcess.py": "self.get_conf('brand_new_process', 1)",
    "jobs/process/BaseSDTrainProcess.py": "",
    "ui/src/types.ts": "export interface ModelConfig {\n  arch: string;\n  brand_new_ui?: { [key: string]: any };\n}\n",
    "ui/src/app/jobs/new/jobConfig.ts": """
export const defaultJobConfig: JobConfig = {
  job: 'extension', // a comment: with a colon
  config: { name: 'a: b', process: [{ type: 'x', logging: { log_every: 1, brand_new_log: true } }] },
};
""",
}


@pytest.mark.parametrize(
    ("host", "files", "expected"),
    [
        (
            "simpletuner",
            SIMPLETUNER_FILES,
            {
                ("run", "brand_new_alias"),
                ("run", "brand_new_family"),
                ("run", "brand_new_loop"),
                ("run", "brand_new_option"),
                ("dataset", "new_data"),
                ("dataset", "video.new"),
            },
        ),
        (
            "ai-toolkit",
            AI_TOOLKIT_FILES,
            {
                ("run", "train.brand_new"),
                ("run", "brand_new_process"),
                ("run", "model.brand_new_ui"),
                ("run", "logging.brand_new_log"),
                ("dataset", "new_data"),
            },
        ),
    ],
)
def test_the_script_finds_the_keys_of_a_checkout_that_have_no_answer(
    script: ModuleType, tmp_path: Path, host: str, files: dict[str, str], expected: set[tuple[str, str]]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    keys = script.READERS[host](script.Checkout(tmp_path))
    assert set(script.unanswered(host, keys)) == expected
    answered = {("run", "text_encoder_2_precision"), ("dataset", "video.num_frames"), ("run", "save_total_limit")}
    assert answered <= keys if host == "simpletuner" else {("run", "train.lr"), ("run", "config.name")} <= keys
