"""Existing adapter files: a new adapter starts from them or is trained on top of them, whichever program wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.core.errors import ModelError
from supertuner.models.adapters.attach import (
    TrainableExpert,
    attach,
    export_tensors,
    load_trainable_state,
    trainable_state,
)
from supertuner.models.adapters.existing_adapters import load_initial_values, merge_frozen
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES
from supertuner.models.quantization import quantize_blocks
from supertuner.train.export.adapter_files import convert_adapter, open_adapter, with_expert
from supertuner.train.export.adapter_init import load_initial_adapters, load_layer_tensors
from tests.models.adapters.modules import flux, flux_output, random_tensor, wan, wan_output

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
KINDS = {
    "lora": AdapterSettings(rank=4, alpha=3.0),
    "dora": AdapterSettings(rank=4, alpha=3.0, dora=True),
    "rslora": AdapterSettings(rank=4, alpha=3.0, rslora=True),
    "locon": AdapterSettings(type="locon", rank=4, alpha=3.0),
    "loha": AdapterSettings(type="loha", rank=4, alpha=3.0),
    "lokr": AdapterSettings(type="lokr", rank=1, alpha=3.0),
    "lokr, whole": AdapterSettings(type="lokr", lokr_full_matrix=True),
    "diff": AdapterSettings(type="diff"),
}
EVERY_KIND = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


def fresh(
    settings: AdapterSettings, seed: int = 1, name: str = "high_noise", module: nn.Module | None = None
) -> TrainableExpert:
    return attach(wan() if module is None else module, settings, ATTENTION, seed=seed, name=name)


def written(settings: AdapterSettings, path: Path, name: str = "high_noise") -> TrainableExpert:
    """An adapter with non-zero weights, and its file."""
    trained = fresh(settings, name=name)
    load_trainable_state(
        trained, {key: tensor + 0.1 * random_tensor(*tensor.shape) for key, tensor in trainable_state(trained).items()}
    )
    tensors, metadata = export_tensors(trained, "transformer", settings)
    save_file(tensors, path, metadata)
    return trained


@EVERY_KIND
def test_an_adapter_starts_from_a_file_of_its_type(settings: AdapterSettings, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    before = written(settings, path)
    trained = fresh(settings, seed=2)
    summary = load_initial_values(trained, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)
    assert summary == f"16 of 16 layers start from the values of {path}"
    assert (wan_output(trained.module) - wan_output(before.module)).abs().max() < 1e-5
    wan_output(trained.module).square().mean().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters.values()), "and goes on learning"


def test_another_alpha_in_the_run_keeps_the_weight_change(tmp_path: Path) -> None:
    for kind in ("lora", "lokr"):
        path = tmp_path / f"{kind}.safetensors"
        before = written(KINDS[kind], path)
        trained = fresh(KINDS[kind].model_copy(update={"alpha": 0.7}))
        load_initial_values(trained, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)
        assert (wan_output(trained.module) - wan_output(before.module)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "kind, scheme",
    [
        *(
            ("lora", name)
            for name in ("kohya", "original", "onetrainer", "ai-toolkit-dollars", "lycoris-stages", "peft")
        ),
        *(("dora", "original-down-up"), ("lokr", "lycoris-stages"), ("lokr", "original"), ("diff", "lycoris-dots")),
        *(("locon", "diffusers"), ("loha", "kohya")),
    ],
)
def test_files_of_all_programs_mean_the_same_adapter(kind: str, scheme: str, tmp_path: Path) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    before = written(KINDS[kind], path)
    source = open_adapter(path, "wan2.2")
    if KEY_SCHEMES[scheme].marks_experts:
        source = with_expert(source, "high_noise")
    convert_adapter(source, KEY_SCHEMES[scheme], other, family="wan2.2")
    trained = fresh(KINDS[kind], seed=2)
    load_initial_values(trained, load_layer_tensors(other, "wan2.2", "high_noise", only_expert=False), other)
    assert (wan_output(trained.module) - wan_output(before.module)).abs().max() < 1e-5


@EVERY_KIND
def test_a_frozen_adapter_has_an_effect_and_is_not_trained(settings: AdapterSettings, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    below = written(settings, path)
    module = wan()
    bare = wan_output(module)
    summary = merge_frozen(module, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)
    assert summary == f"{path} is merged into the frozen weights of 16 layers"
    wanted = wan_output(below.module)
    assert (wanted - bare).abs().max() > 1e-2
    trained = fresh(AdapterSettings(rank=2), seed=3, module=module)
    assert (wan_output(module) - wanted).abs().max() < 1e-5
    frozen = {name: tensor.clone() for name, tensor in module.named_parameters() if not tensor.requires_grad}
    optimizer = torch.optim.Adam(trained.parameters.values(), lr=0.01)
    for _ in range(2):
        wan_output(module).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(frozen[name], tensor) for name, tensor in module.named_parameters() if name in frozen)
    tensors, _ = export_tensors(trained, "transformer", AdapterSettings(rank=2))
    assert all(2 in tensor.shape for tensor in tensors.values()), "what is exported is the trained one alone"


def test_a_frozen_adapter_below_an_8_bit_base_is_added_before_it_is_rounded(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    below = written(KINDS["lora"], path)
    module = wan()
    merge_frozen(module, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)
    quantize_blocks(module, "int8", torch.device("cpu"))
    wanted = wan_output(below.module)
    assert (wan_output(module) - wanted).abs().mean() < 0.2 * (wan_output(wan()) - wanted).abs().mean()


def test_flux_starts_from_a_file(tmp_path: Path) -> None:
    settings, path = AdapterSettings(rank=4), tmp_path / "a.safetensors"
    before = attach(flux(), settings, ATTENTION, seed=1, name="model")
    load_trainable_state(
        before, {key: tensor + 0.1 * random_tensor(*tensor.shape) for key, tensor in trainable_state(before).items()}
    )
    tensors, metadata = export_tensors(before, "transformer", settings)
    save_file(tensors, path, metadata)
    trained = attach(flux(), settings, ATTENTION, seed=2, name="model")
    load_initial_values(trained, load_layer_tensors(path, "flux", "model", only_expert=True), path)
    assert torch.equal(flux_output(trained.module), flux_output(before.module))


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_other_experts_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path, name="low_noise")
    with pytest.raises(ModelError, match=r"a\.safetensors is for low_noise by its metadata or its name, not for high"):
        load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False)
    stray = tmp_path / "style_low_noise.safetensors"
    save_file(load_file(path), stray)
    with pytest.raises(ModelError, match=r"is for low_noise .* in adapter\.high_noise"):
        load_layer_tensors(stray, "wan2.2", "high_noise", only_expert=False)


def test_integers_are_refused_as_weights_and_allowed_as_alphas(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path)
    tensors = {
        key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): tensor
        for key, tensor in load_file(path).items()
    }
    alphas = {key.replace("lora_up.weight", "alpha"): torch.tensor(4) for key in tensors if "lora_up" in key}
    save_file({**tensors, **alphas}, path)
    assert load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False)
    save_file({key: tensor.to(torch.int32) for key, tensor in tensors.items()}, path)
    with pytest.raises(ModelError, match=r"a\.safetensors: .* has numbers of type int32; an adapter"):
        load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False)


def test_a_header_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    entry = (
        '"transformer.blocks.0.attn1.to_q.lora_A.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [%d, %d]}'
    )
    header = ("{" + entry % (0, 4) + ", " + entry % (4, 8) + "}").encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match=r"its header has the key 'transformer.*' twice"):
        open_adapter(path)


def test_unknown_keys_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path)
    tensors = load_file(path)
    save_file({**tensors, "transformer.blocks.0.attn1.to_w.lora_A.weight": torch.ones(4, 24)}, path)
    with pytest.raises(ModelError, match=r"32 of 33 keys matched; not matched: transformer\.blocks\.0\.attn1\.to_w"):
        load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False)
    save_file({"a.b": torch.ones(1)}, path)
    with pytest.raises(ModelError, match=r"a\.safetensors"):
        load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False)
    path.write_bytes(b"not one")
    with pytest.raises(ModelError, match=r"a\.safetensors is not a .safetensors file"):
        load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False)


def test_another_rank_type_or_set_of_layers_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path)
    layers = load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False)
    for settings in (AdapterSettings(rank=8), KINDS["loha"], KINDS["dora"]):
        trained = fresh(settings)
        before = trainable_state(trained)
        with pytest.raises(ModelError, match=r"does not fit the adapter: blocks\.0\.attn1\.to_q needs .* the file has"):
            load_initial_values(trained, layers, path)
        assert all(torch.equal(before[name], parameter) for name, parameter in trained.parameters.items())
    fewer = attach(wan(), KINDS["lora"], ("to_q",), seed=1, name="high_noise")
    with pytest.raises(ModelError, match=r"has 12 layers that are not trained .*; extend adapter\.targets"):
        load_initial_values(fewer, layers, path)
    with pytest.raises(ModelError, match="16 layers that the model does not have"):
        merge_frozen(flux(), layers, path)


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("lora_magnitude_vector", torch.ones(24)),
        ("lora_B.bias", torch.ones(24)),
        ("diff", torch.ones(24, 24)),
        ("lora_mid.weight", torch.ones(4, 4)),
        ("scalar", torch.tensor(2.0)),
    ],
)
def test_a_tensor_that_the_adapter_lacks_is_refused(key: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path)
    save_file({**load_file(path), f"transformer.blocks.0.attn1.to_q.{key}": tensor}, path)
    trained = fresh(KINDS["lora"])
    before = trainable_state(trained)
    with pytest.raises(ModelError, match=r"has no parameters for blocks\.0\.attn1\.to_q: "):
        load_initial_values(trained, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)
    assert all(torch.equal(before[name], parameter) for name, parameter in trained.parameters.items())


@pytest.mark.parametrize(
    "tensors",
    [{"scalar": torch.tensor(2.0)}, {"diff": torch.ones(24, 24)}, {"lokr_w1": torch.ones(2, 2)}],
    ids=lambda tensors: next(iter(tensors)),
)
def test_unsupported_extra_tensors_of_a_lora_are_refused_for_freezing(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path)
    more = {f"transformer.blocks.0.attn1.to_q.{key}": tensor for key, tensor in tensors.items()}
    save_file({**load_file(path), **more}, path)
    with pytest.raises(ModelError, match=rf"{next(iter(tensors))}|diff.*beside .* cannot be merged"):
        merge_frozen(wan(), load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)


def test_the_bias_of_a_frozen_lora_is_scaled_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    key = "lora_unet_blocks_0_self_attn_q"
    lora = {f"{key}.lora_down.weight": random_tensor(4, 24), f"{key}.lora_up.weight": random_tensor(24, 4)}
    save_file({**lora, f"{key}.lora_up.bias": random_tensor(24), f"{key}.alpha": torch.tensor(2.0)}, path)
    module = wan()
    before = module.blocks[0].attn1.to_q.bias.clone()
    merge_frozen(module, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)
    assert torch.allclose(module.blocks[0].attn1.to_q.bias, before + 0.5 * random_tensor(24))
    module.blocks[0].attn1.to_q.bias = None
    with pytest.raises(ModelError, match=r"changes the bias of 1 layers that have none \(blocks\.0\.attn1\.to_q\)"):
        merge_frozen(module, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)


def test_a_frozen_change_of_a_norm_has_an_effect(tmp_path: Path) -> None:
    path, key = tmp_path / "a.safetensors", "lycoris_blocks_0_attn1_norm_q"
    save_file({f"{key}.w_norm": random_tensor(24)}, path)
    module = wan()
    before = module.blocks[0].attn1.norm_q.weight.clone()
    merge_frozen(module, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)
    assert torch.allclose(module.blocks[0].attn1.norm_q.weight, before + random_tensor(24))
    save_file({f"{key}.w_norm": random_tensor(24), f"{key}.b_norm": random_tensor(24)}, path)
    with pytest.raises(ModelError, match="changes the bias of 1 layers"):
        merge_frozen(module, load_layer_tensors(path, "wan2.2", "high_noise", only_expert=False), path)


def test_a_file_of_another_family_is_distinguished_from_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path)
    for family in ("flux", "qwen-image-edit"):
        with pytest.raises(
            ModelError, match=rf"a\.safetensors is an adapter for wan2\.2, and model\.family is '{family}'"
        ):
            load_layer_tensors(path, family, "model", only_expert=True)
    shared = {f"transformer.transformer_blocks.0.attn{n}.to_q.lora_A.weight": torch.ones(4, 8) for n in ("", "2")}
    save_file(shared, path)
    with pytest.raises(ModelError, match=r"is an adapter for sd3\.5, and model\.family is 'flux'; use a file"):
        load_layer_tensors(path, "flux", "model", only_expert=True)
    save_file({**shared, "text_encoder.q.lora_A.weight": torch.ones(1)}, path)
    with pytest.raises(ModelError, match=r"1 of 3 keys matched; .* adapter convert FILE --to bare --partial"):
        load_layer_tensors(path, "flux", "model", only_expert=True)


def test_values_that_are_not_finite_are_refused_by_key(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written(KINDS["lora"], path)
    tensors = load_file(path)
    tensors["transformer.blocks.1.attn2.to_k.lora_B.weight"][3, 1] = float("nan")
    save_file(tensors, path)
    settings = AdapterSettings.model_validate({"high_noise": {"frozen": path}})
    refusal = r"^adapter\.high_noise\.frozen: .*a\.safetensors: blocks\.1\.attn2\.to_k\.lora_up\.weight has values that"
    with pytest.raises(ModelError, match=refusal):
        load_initial_adapters(settings, "wan2.2", "high_noise", only_expert=False)


def test_the_digest_of_a_file_depends_on_its_tensors_and_not_on_key_names(tmp_path: Path) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    written(AdapterSettings(rank=4), path)
    convert_adapter(with_expert(open_adapter(path), "high_noise"), KEY_SCHEMES["kohya"], other)

    def digest(file: Path) -> str:
        settings = AdapterSettings(frozen=file)
        return load_initial_adapters(settings, "wan2.2", "high_noise", only_expert=False)["frozen"].digest

    assert digest(path) == digest(other)
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, other)
    assert digest(path) != digest(other)


def test_each_expert_gets_its_own_files(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"run_{name}.safetensors" for name in ("high_noise", "low_noise")}
    for name, path in paths.items():
        written(KINDS["lora"], path, name=name)
    settings = AdapterSettings.model_validate(
        {"high_noise": {"start_from": paths["high_noise"]}, "low_noise": {"frozen": paths["low_noise"]}}
    )
    assert list(load_initial_adapters(settings, "wan2.2", "high_noise", only_expert=False)) == ["start_from"]
    assert list(load_initial_adapters(settings, "wan2.2", "low_noise", only_expert=False)) == ["frozen"]
