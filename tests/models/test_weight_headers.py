"""Headers of weight files against the modules of their configs: what loading would refuse is found without loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from supertuner.core.errors import ModelError
from supertuner.models.family_loader import load_family
from supertuner.models.spec import ModelDescription, ModelSource
from supertuner.models.weight_headers import check_weight_files, components_with_weights
from tests.models.families.pipelines import CASES, WrittenPipeline

WAN = load_family("wan2.2")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tiny_wan: ModelSource, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_wan.path, tmp_path / "model"))


def read(folder: Path, **source: object) -> ModelDescription:
    return WAN.read_model(ModelSource(str(folder), **source))  # type: ignore[arg-type]


def problems(folder: Path, component: str = "transformer") -> str:
    return "\n".join(check_weight_files(read(folder), component).problems)


def change(file: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a file; None removes one."""
    content = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, file)


@pytest.mark.parametrize("written", CASES, ids=lambda case: case.name, indirect=True)
def test_the_files_of_an_intact_model_of_every_family_have_no_problems(written: WrittenPipeline) -> None:
    components = components_with_weights(written.model)
    assert {"vae", "text_encoder"} < set(components)
    for component in components:
        report = check_weight_files(written.model, component)
        assert report.problems == report.remarks == ()
        assert report.files == 1 and report.tensors > 5


def test_a_tensor_of_another_shape_is_a_problem_with_both_shapes(folder: Path) -> None:
    change(folder / "transformer" / WEIGHTS, **{"blocks.0.attn1.to_q.weight": torch.zeros(24, 12)})
    assert "blocks.0.attn1.to_q.weight (24, 12), not (24, 24)" in problems(folder)
    assert problems(folder, "transformer_2") == ""


def test_a_wrong_shape_in_a_text_encoder_is_found_too(folder: Path) -> None:
    change(folder / "text_encoder" / "model.safetensors", **{"shared.weight": torch.zeros(7, 16)})
    assert "shared.weight (7, 16), not" in problems(folder, "text_encoder")


def test_a_missing_tensor_is_a_problem_and_an_unknown_one_a_remark(folder: Path) -> None:
    name = next(iter(load_file(folder / "vae" / WEIGHTS)))
    change(folder / "vae" / WEIGHTS, **{name: None, "nobody.knows": torch.zeros(1)})
    report = check_weight_files(read(folder), "vae")
    assert name in report.problems[0] and "lacks 1 tensors" in report.problems[0]
    assert "nobody.knows" in report.remarks[0]


def test_a_truncated_file_is_reported_with_its_bytes(folder: Path) -> None:
    file = folder / "transformer" / WEIGHTS
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1000)
    assert f"{size - 1000:,} of {size:,} bytes; download it again" in problems(folder)


def test_a_missing_shard_and_a_truncated_one_are_both_reported(folder: Path) -> None:
    shards = make_shards(folder)
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    text = problems(folder)
    assert f"weight files are missing: {shards[0].name}" in text and f"{shards[1]} is damaged" in text


def test_an_index_that_disagrees_with_its_shards_is_a_problem(folder: Path) -> None:
    shards = make_shards(folder)
    assert problems(folder) == ""
    index = folder / "transformer" / f"{WEIGHTS}.index.json"
    content = json.loads(index.read_bytes())
    moved = next(name for name, shard in content["weight_map"].items() if shard == shards[0].name)
    content["weight_map"][moved] = shards[1].name
    index.write_text(json.dumps(content))
    text = problems(folder)
    assert f"{shards[1]} lacks 1 tensors ({moved})" in text and f"{shards[0]} has 1 tensors ({moved})" in text


def test_a_single_file_replaces_the_weights_of_its_component_alone(folder: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(folder / "transformer" / WEIGHTS, tmp_path / "denoiser.safetensors"))
    (folder / "transformer" / WEIGHTS).unlink()
    model = read(folder, single_files={"transformer": file})
    assert check_weight_files(model, "transformer").problems == ()
    change(file, **{"blocks.1.norm2.weight": None})
    assert f"{file} lacks" in check_weight_files(model, "transformer").problems[0]


def test_a_model_whose_folder_is_gone_raises_an_error(tmp_path: Path, tiny_wan: ModelSource) -> None:
    model = read(Path(tiny_wan.path))
    gone = ModelDescription(
        ModelSource(str(tmp_path / "gone")), model.title, model.experts, model.media_kinds, 1.0, model.configs
    )
    with pytest.raises(ModelError, match="there is no such folder"):
        check_weight_files(gone, "vae")


def make_shards(folder: Path) -> list[Path]:
    """The transformer's weights in several files with an index."""
    module = WAN.load_denoiser(read(folder), read(folder).experts[0], torch.float32)
    (folder / "transformer" / WEIGHTS).unlink()
    module.save_pretrained(folder / "transformer", max_shard_size="40KB")  # type: ignore[operator]
    shards = sorted((folder / "transformer").glob("*-of-*.safetensors"))
    assert len(shards) > 2
    return shards
