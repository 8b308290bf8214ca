"""The checks of `supertuner train --try` on the full-size run: each problem is found without loading a weight."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import load_config
from supertuner.core.errors import TrainError
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.models.family_loader import load_family
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus
from supertuner.tools.trial.adapter_checks import check_experts
from supertuner.tools.trial.data_checks import DataFindings, check_datasets
from supertuner.tools.trial.machine_checks import (
    BackgroundForecast,
    SpaceNeed,
    check_memory,
    check_space,
    judge_memory,
    list_space_needs,
)
from supertuner.tools.trial.model_checks import check_captions, check_weights, find_model
from supertuner.tools.trial.shrink import replaced_settings, trial_name, trial_settings
from supertuner.train.run_checks import require_export_format
from tests.models.families.pipelines import tiny_wan
from tests.models.hub_server import GATED
from tests.models.test_hub import SECRET, hub_of
from tests.train.runs import pictures

__all__ = ["tiny_wan"]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").iterdir()
    if path.suffix in (".yaml", ".toml", ".json")
    and path.name not in ("supertuner.schema.json", "accelerate_config_gh200.yaml", "video_and_audio.toml")
)
"""The last of the three has no model."""
QUIET = NullSink()


def settings(folder: Path, **blocks: Any) -> RunConfig:
    """A run of the two-expert family on `folder/data`."""
    tree: dict[str, Any] = {
        "run": {"output_dir": str(folder / "runs")},
        "model": {"family": "wan2.2", "path": "tiny"},
        "arena": {"home": str(folder / "arenas")},
        "datasets": [{"id": "squares", "instance_data_dir": str(folder / "data"), "resolution": 64}],
    }
    return load_config({**tree, **blocks}, check_paths=False).config


def check_data(folder: Path, **dataset: Any) -> DataFindings:
    block = {"id": "squares", "instance_data_dir": str(folder / "data"), "resolution": 64, **dataset}
    return check_datasets(settings(folder, datasets=[block]), RunContext(folder, QUIET, QUIET, HostFacts()))


def found(checks: list[CheckResult], status: CheckStatus) -> str:
    return "\n".join(f"{one.name}: {one.finding} → {one.remedy}" for one in checks if one.status is status)


def problems(checks: list[CheckResult]) -> str:
    return found(checks, CheckStatus.BAD)


def warnings(checks: list[CheckResult]) -> str:
    return found(checks, CheckStatus.WARNING)


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_caption_is_a_warning_with_the_name_of_its_file(tmp_path: Path) -> None:
    pictures(tmp_path / "data", 6)
    (tmp_path / "data/003.txt").unlink()
    findings = check_data(tmp_path)
    assert "1 of 6 files have no caption: 003 → write a .txt file" in warnings(findings.checks)
    assert problems(findings.checks) == ""
    assert findings.captions["a red square"] == "squares: 000"


def test_samples_without_captions_by_intention_are_no_warning(tmp_path: Path) -> None:
    pictures(tmp_path / "data", 2)
    assert "have no caption" not in warnings(check_data(tmp_path, captions={"source": "none"}).checks)


def test_broken_files_are_listed_with_their_reasons(tmp_path: Path) -> None:
    pictures(tmp_path / "data", 6)
    (tmp_path / "data/002.png").write_bytes((tmp_path / "data/002.png").read_bytes()[:60])
    assert "1 of 6 files are broken: 002.png: " in warnings(check_data(tmp_path, max_broken_share=0.5).checks)
    assert "002.png" in problems(check_data(tmp_path, strict=True).checks)


def test_every_unusable_dataset_is_a_problem_of_its_own(tmp_path: Path) -> None:
    pictures(tmp_path / "data", 2)
    blocks = [{"id": name, "instance_data_dir": str(tmp_path / name)} for name in ("one", "two")]
    blocks.append({"id": "small", "instance_data_dir": str(tmp_path / "data"), "upscale": False, "resolution": 1024})
    checks = check_datasets(settings(tmp_path, datasets=blocks), RunContext(tmp_path, QUIET, QUIET, HostFacts())).checks
    assert "datasets[one]" in problems(checks) and "datasets[two]" in problems(checks)


def test_a_trigger_word_is_part_of_the_captions_that_are_tokenized(tmp_path: Path) -> None:
    pictures(tmp_path / "data", 1)
    rules = {"trigger_word": "p3rson", "shuffle_tags": True}
    assert list(check_data(tmp_path, captions=rules).captions) == ["p3rson, a red square"]


# ── model ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def model_of(tmp_path: Path, path: str, **model: Any) -> RunConfig:
    return settings(tmp_path, model={"family": "wan2.2", "path": path, **model})


def test_a_wrong_shape_a_missing_file_and_an_intact_one_are_told_apart(tiny_wan: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_wan.path, tmp_path / "model"))
    shutil.copy(folder / "vae/diffusion_pytorch_model.safetensors", folder / "transformer")
    (folder / "text_encoder/model.safetensors").unlink()
    findings = find_model(model_of(tmp_path, str(folder)), tmp_path)
    checks = list(check_weights(findings, QUIET))
    assert "transformer: " in problems(checks) and "download it again" in problems(checks)
    assert "text_encoder: " in problems(checks) and "no .safetensors file" in problems(checks)
    assert [one.name for one in checks if one.status is CheckStatus.GOOD] == ["transformer_2", "vae"]


def test_a_caption_that_is_too_long_is_a_warning_with_its_sample(tiny_wan: Any, tmp_path: Path) -> None:
    findings = find_model(model_of(tmp_path, tiny_wan.path), tmp_path)
    captions = {"a red square": "squares: 000", "a red square " * 300: "squares: 001"}
    checks = list(check_captions(findings, load_family("wan2.2"), captions, QUIET))
    assert "1 of 2 captions are longer than the model reads" in warnings(checks) and "squares: 001" in warnings(checks)
    del captions["a red square " * 300]
    (check,) = check_captions(findings, load_family("wan2.2"), captions, QUIET)
    assert check.status is CheckStatus.GOOD


def test_a_tokenizer_that_does_not_load_is_a_problem(tiny_wan: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_wan.path, tmp_path / "model"))
    (folder / "tokenizer/tokenizer.json").write_text("{")
    findings = find_model(model_of(tmp_path, str(folder)), tmp_path)
    assert "tokenizer" in problems(list(check_captions(findings, load_family("wan2.2"), {"a": "b"}, QUIET)))


def test_a_folder_that_does_not_exist_is_a_problem_and_its_layers_are_left_out(tmp_path: Path) -> None:
    findings = find_model(model_of(tmp_path, str(tmp_path / "nowhere")), tmp_path)
    assert "there is no such folder" in problems(findings.checks) and findings.model is None


@pytest.fixture
def hub(tiny_wan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with hub_of(Path(tiny_wan.path), tmp_path, monkeypatch) as opened:
        yield opened


def test_a_gated_repository_is_a_problem_that_names_the_licence_and_never_the_token(hub: Any, tmp_path: Path) -> None:
    checks = find_model(model_of(tmp_path, GATED), tmp_path).checks
    assert "is gated" in problems(checks) and "licence" in problems(checks)
    assert all(SECRET not in f"{one.finding} {one.remedy}" for one in checks)


def test_a_model_that_is_not_downloaded_is_a_warning_with_its_size(hub: Any, tmp_path: Path) -> None:
    findings = find_model(model_of(tmp_path, "owner/model"), tmp_path)
    checks = list(check_weights(findings, QUIET))
    weights = sum(file.stat().st_size for file in hub.folder.rglob("*.safetensors"))
    assert findings.download_bytes == weights and "not downloaded yet" in warnings(checks)
    assert "hf download owner/model" in warnings(checks) and problems([*findings.checks, *checks]) == ""
    assert not [asked for asked in hub.requests if asked.startswith("GET") and asked.endswith(".safetensors")]


def test_the_headers_of_a_downloaded_model_are_checked_in_the_hubs_cache(hub: Any, tmp_path: Path) -> None:
    snapshot = Path(huggingface_hub.snapshot_download("owner/model"))
    file = (snapshot / "vae/diffusion_pytorch_model.safetensors").resolve()
    file.write_bytes(file.read_bytes()[:-8])
    checks = list(check_weights(find_model(model_of(tmp_path, "owner/model"), tmp_path), QUIET))
    assert "vae: " in problems(checks) and "truncated" in problems(checks)
    assert sum(one.status is CheckStatus.GOOD for one in checks) == 3


def test_without_a_network_the_layers_of_a_published_model_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    findings = find_model(model_of(tmp_path, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), tmp_path)
    assert "hf download Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in warnings(findings.checks)
    assert problems(findings.checks) == "" and findings.model is not None and not findings.has_files
    config = model_of(tmp_path, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    adapter = check_experts(config, load_family("wan2.2"), findings.model)
    assert "lora on 240 layers of transformer, 11,796,480 trained parameters" in adapter.checks[0].finding


# ── adapter ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_adapter(tmp_path: Path, **blocks: Any) -> list[CheckResult]:
    config = settings(tmp_path, **blocks)
    findings = find_model(config, tmp_path)
    assert findings.model is not None
    return check_experts(config, load_family("wan2.2"), findings.model).checks


def test_a_target_that_matches_no_layer_is_a_problem_of_each_expert(tmp_path: Path) -> None:
    checks = check_adapter(tmp_path, adapter={"targets": ["to_q", "to_w"]})
    assert problems(checks).count("has the name 'to_w'") == 2


def test_a_missing_initial_file_is_a_problem_and_the_layers_are_counted_all_the_same(tmp_path: Path) -> None:
    adapter = {"type": "loha", "start_from": str(tmp_path / "none.safetensors")}
    model = {"family": "wan2.2", "path": "tiny", "experts": "low_noise"}
    checks = check_adapter(tmp_path, adapter=adapter, model=model)
    assert "none.safetensors" in problems(checks)
    assert "low_noise: loha on 16 layers" in found(checks, CheckStatus.GOOD)


def test_a_layer_that_a_program_has_no_name_for_is_refused() -> None:
    shapes = {f"transformer.blocks.0.{layer}.lora_A.weight": (4, 24) for layer in ("attn1.to_q", "new_layer")}
    shapes |= {f"transformer.blocks.0.{layer}.lora_B.weight": (24, 4) for layer in ("attn1.to_q", "new_layer")}
    with pytest.raises(TrainError, match=r"no name for 2 tensors, such as transformer\.blocks\.0\.new_layer"):
        require_export_format("comfyui", load_family("wan2.2"), shapes)


@pytest.mark.parametrize("kind", ["lora", "lokr", "diff"])
def test_layers_and_parameters_of_every_expert_are_counted(tmp_path: Path, kind: str) -> None:
    exports = {"formats": ["diffusers", "comfyui", "kohya"]}
    checks = check_adapter(tmp_path, adapter={"type": kind, "rank": 4}, exports=exports)
    assert problems(checks) == ""
    counted = [one.finding for one in checks if "trained parameters" in one.finding]
    assert len(counted) == 2 and all("16 layers" in finding for finding in counted)
    assert "names" not in counted[0] and "comfyui, kohya have a name" in found(checks, CheckStatus.GOOD)
    if kind == "diff":  # 24 × 24 weights and 24 biases of 16 layers
        assert f"{16 * (24 * 24 + 24):,} trained" in counted[0]


# ── machine ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class SmallDisk(HostFacts):
    def free_bytes(self, folder: Path) -> int:
        return 1000


def test_a_disk_that_is_too_small_is_a_problem_with_what_fills_it(tmp_path: Path) -> None:
    needs = [SpaceNeed("checkpoints", tmp_path / "runs", 900), SpaceNeed("exports", tmp_path / "runs/x", 200)]
    (check,) = check_space(needs, SmallDisk())
    assert check.status is CheckStatus.BAD and "checkpoints 900 B, exports 200 B" in check.finding
    (check,) = check_space(needs[:1], SmallDisk())
    assert check.status is CheckStatus.GOOD and "modelled" in check.finding


def test_the_space_of_checkpoints_and_caches_is_counted_where_they_are_written(tmp_path: Path) -> None:
    from supertuner.memory.machines import MACHINES
    from supertuner.plan.forecast.results import MachineCapacity

    pictures(tmp_path / "data", 4)
    config = settings(tmp_path, cache_config={"persistent_cache": True, "cache_dir": str(tmp_path / "cache")})
    findings = find_model(config, tmp_path)
    assert findings.model is not None
    sizes = check_experts(config, load_family("wan2.2"), findings.model).sizes
    needs = list_space_needs(config, sizes, MachineCapacity(MACHINES["cpu"], "this", None, None, ""))
    places = {need.what: need.folder for need in needs}
    assert places["cache of latents, persistent"] == tmp_path / "cache"
    assert places["checkpoints"] == tmp_path / "runs" and places["cache of text"] == tmp_path / "arenas"
    assert all(need.nbytes for need in needs)


def test_a_forecast_that_is_not_ready_is_a_warning_and_its_process_ends(tmp_path: Path) -> None:
    with BackgroundForecast(tmp_path / "run.json", (), None) as forecast:
        check = check_memory(forecast, time.monotonic(), Path("run.json"), refuses=True)
    assert check.status is CheckStatus.WARNING and "supertuner estimate run.json" in check.remedy
    assert forecast._process.returncode is not None


@pytest.mark.parametrize(
    ("fits", "source", "refuses", "status"),
    [
        (True, "free now", True, CheckStatus.GOOD),
        (False, "free now", True, CheckStatus.BAD),
        (False, "free now", False, CheckStatus.WARNING),
        (False, "no GPU here, so a GH200 is assumed", True, CheckStatus.WARNING),
        (None, "free now", True, CheckStatus.WARNING),
    ],
)
def test_only_a_run_that_would_be_refused_here_is_a_problem(
    fits: bool | None, source: str, refuses: bool, status: CheckStatus
) -> None:
    forecast = {"verdict": "modelled: …", "fits": fits, "machine": {"source": source}}
    assert judge_memory(forecast, "change it", refuses=refuses).status is status


# ── the small configuration ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_shipped_example_stays_valid_when_it_is_shrunk(example: Path) -> None:
    config = load_config(example, check_paths=False).config
    changes = {setting: value for setting, value, _ in replaced_settings(config)}
    small = load_config(example, overrides={**trial_settings(config, "x-try"), **changes}, check_paths=False).config
    assert small.model.path == "tiny" and small.model.family == config.model.family
    assert small.adapter == config.adapter and small.optimizer == config.optimizer
    assert small.exports == config.exports and small.objective == config.objective
    assert max(side for dataset in small.datasets for side in dataset.resolution) == 64
    assert small.arena.disk_home == small.run.output_dir / "x-try/arenas" and small.arena.keep == "run"


def test_settings_that_need_the_real_model_are_replaced_with_a_reason(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        model={"family": "wan2.2", "path": "/m", "compile": True},
        adapter={"start_from": "a.safetensors", "high_noise": {"frozen": "b.safetensors"}},
        plan={"weights": "streamed"},
        memory={"overflow": {"enabled": True}},
        report={"wandb": "project"},
    )
    replaced = {setting: why for setting, _, why in replaced_settings(config)}
    assert {"model.compile", "plan.weights", "memory.overflow.enabled", "report.wandb"} < set(replaced)
    assert {"adapter.start_from", "adapter.high_noise.frozen"} < set(replaced) and all(replaced.values())


def test_a_trial_never_takes_the_folder_of_another_run(tmp_path: Path) -> None:
    assert trial_name("cats", tmp_path) == "cats-try"
    (tmp_path / "cats-try").mkdir()
    (tmp_path / "cats-try-2").mkdir()
    assert trial_name("cats", tmp_path) == "cats-try-3"
