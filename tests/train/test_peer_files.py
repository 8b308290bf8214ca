"""Configuration files of SimpleTuner and ai-toolkit run as they are: they are valid, convert, and train a tiny model.

`peer_files` holds files of our own with the keys of those programs' example files. The example files themselves are
tried where `../shared/peers` exists beside this repository.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from supertuner.config.families import FAMILIES
from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.config.sources.render import canonical_tree, render_tree
from supertuner.core.errors import ConfigError
from supertuner.runs.loss_files import read_losses
from tests.data.media_files import video, write
from tests.train.runs import TrainingForkServer, pictures

OWN = Path(__file__).resolve().parent / "peer_files"
PEERS = Path(__file__).parents[3] / "shared" / "peers"
HAS_PEERS = pytest.mark.requires(PEERS.is_dir(), reason="../shared/peers is not here")
SAME_FAMILY = (
    "ai-toolkit/flux_schnell.yaml",
    "ai-toolkit/wan21_1b.yaml",
    "simpletuner/flux.json",
    "simpletuner/web-form.json",
    "simpletuner/wan-2.2-i2v-a14b-low.json",
    "simpletuner/wan-2.2-ti2v-5b.json",
)
"""Files of our own with the family and the kind of training of another one: SimpleTuner's Flux is in config.json."""
RUN_KEYS = ("model_family", "--model_family")


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run file of SimpleTuner or ai-toolkit, in a folder of such files."""

    root: Path
    path: Path

    @property
    def is_simpletuner(self) -> bool:
        return self.path.relative_to(self.root).parts[0] == "simpletuner"

    @property
    def name(self) -> str:
        return str(self.path.relative_to(self.root)).removesuffix("/config.json")


def read_tree(path: Path) -> Any:
    text = path.read_text()
    return yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)


def run_files(root: Path) -> list[RunFile]:
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "README.md")
    trees = {path: read_tree(path) for path in files}
    found = [path for path, tree in trees.items() if isinstance(tree, Mapping) and is_run(tree)]
    return [RunFile(root, path) for path in found]


def is_run(tree: Mapping[str, Any]) -> bool:
    return "config" in tree or any(name in tree for name in RUN_KEYS)


def is_available(file: RunFile) -> bool:
    """Whether its family exists here, by the names that the programs use."""
    text = file.path.read_text()
    arch = re.search(r"arch: ['\"]?([a-z0-9_]+)", text)
    family = re.search(r'"(?:--)?model_family": "([a-z0-9_]+)"', text)
    if family:
        return family[1] in {record.simpletuner.family for record in FAMILIES.values()}
    return not arch or any(arch[1] in record.ai_toolkit for record in FAMILIES.values())


def cases(root: Path, available: bool, briefly: bool = False) -> list[Any]:
    """The run files of `root` whose family exists here, or does not, as test cases. `briefly`: those that repeat the
    family of another file are marked as torture."""
    if not root.is_dir():
        return [pytest.param(None, id="none")]
    files = [file for file in run_files(root) if is_available(file) == available]
    marks = {file: [pytest.mark.torture] if briefly and file.name in SAME_FAMILY else [] for file in files}
    return [pytest.param(file, id=file.name, marks=marks[file]) for file in files]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user: `data` with squares, clips and references, and the hub's cache with datasets."""
    work = tmp_path / "work"
    for name in ("squares", "images/folder", "images/or/video/folder", "dreambooth"):
        pictures(work / "data" / name, 3)
    for name in ("before", "before1", "before2", "before3"):
        pictures(work / "data" / name, 3)
    for owner_and_name in ("someone/squares", "RareConcepts/Domokun", "keras-dreambooth/minercraft"):
        pictures(snapshot(work, owner_and_name), 3)
    for owner_and_name in ("someone/clips", "sayakpaul/video-dataset-disney-organized"):
        rows = [{"file_name": f"{number}.mp4", "prompt": f"clip {number}"} for number in range(3)]
        clips = {f"{number}.mp4": video(frames=9, size=(32, 32)) for number in range(3)}
        metadata = "".join(json.dumps(row) + "\n" for row in rows)
        write(snapshot(work, owner_and_name), {**clips, "metadata.jsonl": metadata})
    monkeypatch.chdir(work)
    return work


def snapshot(work: Path, owner_and_name: str) -> Path:
    """The folder of a dataset in the hub's cache below `work`."""
    repository = work / "hf/hub" / f"datasets--{owner_and_name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


def install(file: RunFile, work: Path) -> Path:
    """Put a run file where its program's users have it, with the folders that it names inside `work`.

    SimpleTuner is started in a folder that has `config/examples`, and its repository also has `simpletuner/examples`.
    """
    if not file.is_simpletuner:
        target = work / file.path.name
        target.write_text(in_place(file.path.read_text(), work))
        return target
    source = file.root / "simpletuner"
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        for folder in ("config/examples", "simpletuner/examples"):
            target = work / folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(in_place(path.read_text(), work))
    data = source / "data" if (source / "data").is_dir() else source
    for name, example in (
        ("multidatabackend", "multidatabackend-multiresolution"),
        ("lycoris_config", "lycoris_config"),
    ):
        found = [
            path
            for path in data.iterdir()
            if path.name.split(".")[0] in (name, example) and "|" not in path.read_text()
        ]
        (work / "config" / f"{name}.json").write_text(in_place(found[0].read_text(), work))
    if file.path.name.startswith("config.json"):
        target = work / "config/config.json" if file.path.parent == source else None
        if target is not None:
            target.write_text(file.path.read_text())
            return target
    missing = work / "simpletuner/examples/wan2.2-ti2v-5b-480p-single-gpu.peft-lora+ramtorch"
    if missing.is_dir():  # its repository has this file; the folder of examples has not
        clips = work / "simpletuner/examples/multidatabackend-small-video-480p.json"
        (missing / "multidatabackend-512pa+81f.json").write_text(clips.read_text())
    return work / "config/examples" / file.path.relative_to(source)


def in_place(text: str, work: Path) -> str:
    """The text of a file with its absolute folders below `work`."""
    for folder in ("/path/to/control/images", "/path/to/control"):
        text = re.sub(rf"{folder}/folder(\d?)", str(work / "data/before"), text)
    text = text.replace("/path/to/images/or/video/folder", str(work / "data/images/or/video/folder"))
    text = text.replace("/path/to", str(work / "data"))
    return text.replace("/home/user/simpletuner/data", str(work / "data"))


def load(path: Path, work: Path, **options: Any) -> LoadedConfig:
    return load_config(path, environ={"HF_HOME": str(work / "hf")}, **options)


def check_valid_and_convertible(file: RunFile, work: Path) -> None:
    path = install(file, work)
    loaded = load(path, work)
    for language in ("json", "yaml", "toml"):
        converted = path.parent / f"converted.{language}"
        converted.write_text(render_tree(canonical_tree(loaded.provenance, path.parent), language))  # type: ignore[arg-type]
        assert load(converted, work).config == loaded.config, language
        assert not [note for note in load(converted, work).notes if note.what.startswith("defaults")]


def check_only_the_family_is_refused(file: RunFile, work: Path) -> None:
    path = install(file, work)
    with pytest.raises(ConfigError) as caught:
        load(path, work, check_paths=False)
    (problem,) = caught.value.problems
    assert re.search(
        r'(family|architecture) "[^"]+" of (SimpleTuner|ai-toolkit) is not available here yet', problem.message
    )


def check_run(file: RunFile, work: Path, parent: TrainingForkServer) -> None:
    """Train two steps of a tiny model of its family; the sizes are made small, everything else is as in the file."""
    path = install(file, work)
    loaded = load(path, work)
    small: dict[str, Any] = {
        "model.path": "tiny",
        "model.attention": "native",
        "run.name": "run",
        "run.output_dir": str(work / "out"),
        "arena.home": str(work / "arenas"),
        "cache_config.cache_dir": str(work / "cache"),
        "train.max_steps": 2,
        "train.device": "cpu",
        "validation.at_start": False,
        "validation.every_steps": "null",
        "validation.inference_steps": 1,
        "validation.width": 32,
        "validation.height": 32,
        "validation.frames": 1,
        "validation.prompts": '["a square"]',
        "report.wandb": "null",
        "exports.push_to_hub": "null",
    }
    for index, dataset in enumerate(loaded.config.datasets):
        prefix = f"datasets[{index}]"
        small |= {f"{prefix}.resolution": "[32]", f"{prefix}.bucket_step": 16}
        small[f"{prefix}.instance_data_dir"] = str(dataset.instance_data_dir)
        if dataset.conditioning_dir is not None:
            small[f"{prefix}.conditioning_resolution"] = 64
    if not loaded.config.datasets:
        folder = {"instance_data_dir": str(work / "data/squares"), "resolution": 32, "bucket_step": 16}
        small["datasets"] = json.dumps([folder])
    sets = [argument for name, value in small.items() for argument in ("--set", f"{name}={value}")]
    assert parent.wait(parent.begin("train", str(path), *sets, cwd=work)) == 0, parent.output()
    losses = [row.loss for row in read_losses(work / "out/run/losses.jsonl")]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert list((work / "out/run").rglob("*.safetensors"))


@pytest.mark.parametrize("file", cases(OWN, available=True))
def test_a_run_file_with_their_keys_is_valid_and_converts_to_the_same_settings(file: RunFile, place: Path) -> None:
    check_valid_and_convertible(file, place)


@pytest.mark.parametrize("file", cases(OWN, available=True, briefly=True))
def test_a_run_file_with_their_keys_trains_a_tiny_model_of_its_family(
    file: RunFile, place: Path, parent: TrainingForkServer
) -> None:
    check_run(file, place, parent)


@pytest.mark.parametrize("file", cases(OWN, available=False))
def test_of_a_family_that_is_not_here_only_the_family_is_refused(file: RunFile, place: Path) -> None:
    check_only_the_family_is_refused(file, place)


@HAS_PEERS
@pytest.mark.parametrize("file", cases(PEERS, available=True))
def test_an_example_file_of_theirs_is_valid_and_converts_to_the_same_settings(file: RunFile, place: Path) -> None:
    check_valid_and_convertible(file, place)


@pytest.mark.torture
@HAS_PEERS
@pytest.mark.parametrize("file", cases(PEERS, available=True))
def test_an_example_file_of_theirs_trains_a_tiny_model_of_its_family(
    file: RunFile, place: Path, parent: TrainingForkServer
) -> None:
    check_run(file, place, parent)


@HAS_PEERS
@pytest.mark.parametrize("file", cases(PEERS, available=False))
def test_of_an_example_file_of_another_family_only_the_family_is_refused(file: RunFile, place: Path) -> None:
    check_only_the_family_is_refused(file, place)


@HAS_PEERS
def test_our_files_have_all_keys_of_their_example_files() -> None:
    for program in ("simpletuner", "ai-toolkit"):
        own, theirs = (
            {key for path in files(root / program) for key in all_keys(read_tree(path))} for root in (OWN, PEERS)
        )
        assert theirs - own == set()


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def all_keys(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, inner in node.items():
            yield prefix + name.removeprefix("--")
            yield from all_keys(inner, f"{prefix}{name.removeprefix('--')}.")
    elif isinstance(node, list):
        for inner in node:
            yield from all_keys(inner, prefix)


@pytest.mark.parametrize("root", [pytest.param(OWN, id="own"), pytest.param(PEERS, id="peers", marks=HAS_PEERS)])
def test_every_key_of_a_template_of_datasets_is_answered(root: Path, place: Path) -> None:
    """The template lists alternatives as values, `random|center`: its values are refused, and never its keys."""
    (template,) = [path for path in files(root / "simpletuner") if "square|preserve" in path.read_text()]
    (place / "datasets.json").write_text(template.read_text())
    (place / "run.json").write_text(json.dumps({"model_family": "flux", "data_backend_config": "datasets.json"}))
    with pytest.raises(ConfigError) as caught:
        load(place / "run.json", place, check_paths=False)
    keys = {problem.path.rsplit(".", 1)[-1] for problem in caught.value.problems}
    assert keys <= {"crop", "crop_style", "crop_aspect", "resolution_type", "type"}
    assert not [problem for problem in caught.value.problems if "not a setting" in problem.message]


def test_paths_are_found_beside_the_file_and_in_the_working_folder(place: Path) -> None:
    (place / "config").mkdir()
    backends = [{"id": "a", "type": "local", "instance_data_dir": "data/squares"}]
    (place / "config/multidatabackend.json").write_text(json.dumps(backends))
    run = {"model_family": "flux", "data_backend_config": "config/multidatabackend.json", "output_dir": "out"}
    (place / "config/config.json").write_text(json.dumps(run))
    config = load(place / "config/config.json", place).config
    assert config.datasets[0].instance_data_dir == place / "data/squares"
    assert config.run.output_dir == place / "config/out"
    (place / "config/multidatabackend.json").write_text(json.dumps([{**backends[0], "instance_data_dir": "nowhere"}]))
    with pytest.raises(ConfigError) as caught:
        load(place / "config/config.json", place)
    assert f"in the folder of multidatabackend.json and in the working folder {place}" in str(caught.value)
    os.remove(place / "config/multidatabackend.json")
    with pytest.raises(ConfigError) as caught:
        load(place / "config/config.json", place)
    both = (place / "config/config/multidatabackend.json", place / "config/multidatabackend.json")
    assert "looked for " + " and ".join(map(str, both)) in str(caught.value)


def test_a_dataset_of_the_hub_that_is_not_downloaded_is_named_with_the_command(place: Path) -> None:
    backend = {"id": "a", "type": "huggingface", "dataset_name": "someone/else", "huggingface": {"revision": "v2"}}
    (place / "run.json").write_text(json.dumps({"model_family": "flux", "data_backend": backend}))
    with pytest.raises(ConfigError) as caught:
        load(place / "run.json", place)
    assert "hf download someone/else --repo-type dataset --revision v2" in str(caught.value)
