"""Every scheme to the canonical name and back is the identity, over every layer of the full-size models."""

from __future__ import annotations

import re
from functools import cache

import pytest

from supertuner.config import families as table
from supertuner.core.errors import ModelError
from supertuner.models.adapters.family_layers import FAMILY_LAYERS, family_layers
from supertuner.models.adapters.keys import (
    AdapterTensorName,
    format_key,
    possible_meanings,
    read_keys,
    split_tensor_name,
)
from supertuner.models.adapters.keys_modules import fused_members
from supertuner.models.adapters.keys_schemes import (
    CANONICAL_TENSORS,
    KEY_SCHEMES,
    KEY_STYLES,
    LAYER_NAMINGS,
    TENSOR_SPELLINGS,
    KeyScheme,
    LayerNaming,
    spell_tensor,
)
from tests.models.adapters.architectures import FAMILIES, VARIANTS, layers, variant_layers

OF_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@cache
def canonical_layers(family: str, naming: LayerNaming) -> tuple[str, ...]:
    """The canonical names of all layers in this naming; fused layers under their own names."""
    real, rows = layers(family), FAMILY_LAYERS[family].original_names
    if naming == "diffusers":
        return real
    found = [name for name in real if rows[_row_of(name, family)] is not None]
    for row in (row for row in rows if len(fused_members(row)) > 1):
        found += [
            row.replace("#", name.split(".")[1]) for name in real if _row_of(name, family) == fused_members(row)[0]
        ]
    return tuple(found)


def _row_of(name: str, family: str) -> str:
    rows = FAMILY_LAYERS[family].original_names
    if name in rows:
        return name
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    for hidden in ([numbers[0]], [numbers[-1]], *([place] for place in numbers), numbers):
        row = ".".join("#" if place in hidden else part for place, part in enumerate(parts))
        if row in rows:
            return row
    raise AssertionError(f"{name} is in no row of {family}")


def names_of(family: str, scheme: KeyScheme, tensors: tuple[str, ...]) -> list[AdapterTensorName]:
    experts = list(FAMILY_LAYERS[family].experts) if scheme.marks_experts else [None]
    if scheme.marks_experts and len(experts) == 1:
        return []
    return [
        AdapterTensorName(expert, layer, tensor)
        for expert in experts
        for layer in canonical_layers(family, scheme.naming)
        for tensor in tensors
    ]


@pytest.mark.parametrize("family", table.FAMILIES)
def test_every_family_has_a_table_of_layers(family: str) -> None:
    assert family_layers(family).family in FAMILIES
    assert family_layers(family).comfyui_scheme in KEY_SCHEMES


@OF_FAMILY
def test_every_layer_of_the_full_size_model_has_a_row(family: str) -> None:
    assert len(layers(family)) > 400
    for name in layers(family):
        assert _row_of(name, family)


@OF_FAMILY
def test_every_row_is_a_layer_of_the_model(family: str) -> None:
    real = {_row_of(name, family) for name in layers(family)}
    optional = {row for row in FAMILY_LAYERS[family].original_names if row not in real}
    if family == "sdxl":  # the table also has rows for attention and shortcuts that SDXL lacks
        optional = {row for row in optional if ".attentions." not in row and not row.endswith("conv_shortcut")}
    assert all(len(fused_members(row)) > 1 for row in optional), optional
    assert all(one in real for row in optional for one in fused_members(row))


@OF_FAMILY
@pytest.mark.parametrize("style", KEY_STYLES)
@pytest.mark.parametrize("naming", LAYER_NAMINGS)
def test_every_layer_in_every_style_is_read_back(family: str, style: str, naming: LayerNaming) -> None:
    scheme = KeyScheme(style, naming, "kohya")
    wanted = names_of(family, scheme, ("lora_A",))
    if not wanted:
        return  # a style that names experts, for a family with one expert
    keys = {format_key(name, scheme, family): name for name in wanted}
    assert len(keys) == len(wanted), "two names have one key"
    found = read_keys(keys)
    assert found.names == keys and not found.unknown
    assert family in found.families
    if naming == "original" and family != "qwen-image":
        assert found.scheme == scheme and found.families == (family,)
    assert [format_key(name, found.scheme, family) for name in found.names.values()] == list(keys)


@OF_FAMILY
@pytest.mark.parametrize("spelling", TENSOR_SPELLINGS)
def test_every_tensor_in_every_spelling_is_read_back(family: str, spelling: str) -> None:
    for style in KEY_STYLES:
        for naming in LAYER_NAMINGS:
            scheme = KeyScheme(style, naming, spelling)
            few = names_of(family, scheme, ("alpha",))[::701]
            wanted = [AdapterTensorName(one.expert, one.module, tensor) for one in few for tensor in CANONICAL_TENSORS]
            keys = [format_key(name, scheme, family) for name in wanted]
            assert len(set(keys)) == len(wanted)
            if keys:
                found = read_keys(keys, family)
                assert list(found.names.values()) == wanted
                assert [format_key(name, found.scheme, family) for name in found.names.values()] == keys


@OF_FAMILY
def test_a_tensor_name_is_separated_from_every_layer_name_in_every_style(family: str) -> None:
    """With the test of every layer above, this is every tensor of every layer in every scheme: what a key means is
    what stands before the tensor's name, and the tensor. Parts before the last three are never looked at, and of the
    numbers of blocks one is as good as another."""
    before = {
        format_key(name, KeyScheme(style, naming, "kohya"), family).removesuffix(".alpha")
        for style in KEY_STYLES
        for naming in LAYER_NAMINGS
        for name in names_of(family, KeyScheme(style, naming, "kohya"), ("alpha",))
    }
    assert len(before) > 10 * len(layers(family))
    ends = {".".join(["x", *one.split(".")[-3:]]) if one.count(".") > 2 else one for one in before}
    ends = {re.sub(r"(?<=[._$])\d{2,}(?=[._$])", "39", one) for one in ends}
    called = {spell_tensor(tensor, spelling): tensor for spelling in TENSOR_SPELLINGS for tensor in CANONICAL_TENSORS}
    for end in ends:
        for name, tensor in called.items():
            found = split_tensor_name(f"{end}.{name}")
            assert found is not None and found[:2] == (end, tensor)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("naming", LAYER_NAMINGS)
def test_the_layers_of_other_published_sizes_are_in_the_table(name: str, naming: LayerNaming) -> None:
    family, scheme = VARIANTS[name][0], KeyScheme("lora_unet", naming, "kohya")
    rows = FAMILY_LAYERS[family].original_names
    assert len(variant_layers(name)) > 300
    wanted = [
        AdapterTensorName(None, layer, tensor)
        for layer in variant_layers(name)
        for tensor in ("lora_A", "lora_B", "alpha")
        if naming == "diffusers" or rows[_row_of(layer, family)] is not None
    ]
    keys = {format_key(one, scheme, family): one for one in wanted}
    assert read_keys(keys, family).names == keys and len(keys) == len(wanted)


@OF_FAMILY
@pytest.mark.parametrize("style", KEY_STYLES)
@pytest.mark.parametrize("naming", LAYER_NAMINGS)
def test_a_key_alone_has_one_meaning(family: str, style: str, naming: LayerNaming) -> None:
    """Except with `transformer.`, which names one expert or none, depending on the other keys of the file."""
    scheme = KeyScheme(style, naming, "kohya")
    for name in names_of(family, scheme, ("lora_B",))[::19]:
        key = format_key(name, scheme, family)
        meanings = {
            meaning.name for meaning in possible_meanings(key) if meaning.family == family_layers(family).family
        }
        assert name in meanings
        assert {(one.module, one.tensor) for one in meanings} == {(name.module, name.tensor)}
        said = {one.expert for one in meanings if one.expert is not None}
        assert len(said) <= 1
        if name.expert is not None and not key.startswith("transformer."):
            assert {one.expert for one in meanings} == {name.expert}


def test_a_block_number_is_not_read_as_an_expert() -> None:
    one = read_keys(
        ["lycoris_transformer_1_blocks_2_attn1_to_q.lokr_w1", "lycoris_transformer_2_blocks_1_attn1_to_q.lokr_w1"]
    )
    assert list(one.names.values()) == [
        AdapterTensorName("high_noise", "blocks.2.attn1.to_q", "lokr_w1"),
        AdapterTensorName("low_noise", "blocks.1.attn1.to_q", "lokr_w1"),
    ]
    flux = read_keys(
        ["lycoris_transformer_blocks_1_attn_to_q.lokr_w1", "lycoris_single_transformer_blocks_2_proj_mlp.lokr_w1"]
    )
    assert list(flux.names.values()) == [
        AdapterTensorName(None, "transformer_blocks.1.attn.to_q", "lokr_w1"),
        AdapterTensorName(None, "single_transformer_blocks.2.proj_mlp", "lokr_w1"),
    ]


def test_transformer_is_the_high_noise_expert_only_together_with_transformer_2() -> None:
    high, low = "transformer.blocks.0.attn1.to_q.lora_A.weight", "transformer_2.blocks.0.attn1.to_q.lora_A.weight"
    assert read_keys([high]).experts == (None,)
    assert read_keys([high, low]).experts == ("high_noise", "low_noise")
    assert read_keys([low]).experts == ("low_noise",)


@pytest.mark.parametrize(
    "key",
    [
        "lycoris__blocks_0_attn1_to_q.lokr_w1",
        "lycoris_transformer_1__blocks_0_attn1_to_q.lokr_w1",
        "lycoris_transformer_1blocks_0_attn1_to_q.lokr_w1",
        "lycoris_transformer_3_blocks_0_attn1_to_q.lokr_w1",
        "transformer..blocks.0.attn1.to_q.lora_A.weight",
        "transformer.blocks.0.attn1.to_qlora_A.weight",
        "transformer.blocks.00.attn1.to_q.lora_A.weight",
        "transformer.blocks.-1.attn1.to_q.lora_A.weight",
        "transformer.blocks.#.attn1.to_q.lora_A.weight",
        "transformer.blocks.²​.attn1.to_q.lora_A.weight",
        "diffusion_model.blocks.0.self_attn.q",
        "blocks.0.self_attn.q.weight",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        "",
    ],
)
def test_an_almost_correct_key_is_reported(key: str) -> None:
    right = "lora_unet_blocks_0_self_attn_q.lora_down.weight"
    found = read_keys([right, key])
    assert list(found.names) == [right] and list(found.unknown) == [key] and found.unknown[key]
    assert "1 of 2 keys matched" in found.summary() and key in found.summary()
    with pytest.raises(ModelError, match="none of 1 keys"):
        read_keys([key])


def test_two_keys_of_one_tensor_are_both_reported() -> None:
    twice = ["transformer.blocks.0.attn1.to_q.lora_A.weight", "transformer.blocks.0.attn1.to_q.lora_down.weight"]
    found = read_keys([*twice, "transformer.blocks.0.attn1.to_q.lora_B.weight"])
    assert list(found.unknown) == twice and len(found.names) == 1


def test_a_file_with_two_schemes_reports_the_smaller_part() -> None:
    kohya = [f"lora_unet_blocks_{n}_self_attn_q.lora_down.weight" for n in range(3)]
    found = read_keys([*kohya, "transformer.blocks.0.attn1.to_k.lora_A.weight"])
    assert list(found.names) == kohya
    assert "another scheme" in found.unknown["transformer.blocks.0.attn1.to_k.lora_A.weight"]


def test_layers_that_families_share_do_not_determine_the_family() -> None:
    found = read_keys(["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"])
    assert set(found.families) == {"flux", "qwen-image", "sd3.5"}
    with pytest.raises(ModelError, match="choose the family"):
        _ = found.family
    assert read_keys(found.names, "sd3.5").family == "sd3.5"


def test_names_that_a_scheme_cannot_express_raise_an_error() -> None:
    with pytest.raises(ModelError, match="cannot name an expert"):
        format_key(AdapterTensorName("low_noise", "blocks.0.attn1.to_q", "lora_A"), KEY_SCHEMES["kohya"], "wan2.2")
    with pytest.raises(ModelError, match="set `expert`"):
        format_key(AdapterTensorName(None, "blocks.0.attn1.to_q", "lora_A"), KEY_SCHEMES["diffusers-pair"], "wan2.2")
    with pytest.raises(ModelError, match="not a separate layer"):
        format_key(AdapterTensorName(None, "transformer_blocks.0.attn.to_q", "lora_A"), KEY_SCHEMES["kohya"], "flux")
    with pytest.raises(ModelError, match=r"not a layer of wan2\.2"):
        format_key(AdapterTensorName(None, "blocks.0.attn3.to_q", "lora_A"), KEY_SCHEMES["kohya"], "wan2.2")


@OF_FAMILY
def test_the_scheme_for_comfyui_is_readable_by_its_rules(family: str) -> None:
    scheme = KEY_SCHEMES[FAMILY_LAYERS[family].comfyui_scheme]
    assert FAMILY_LAYERS[family].comfyui_loads(scheme)
    assert FAMILY_LAYERS["wan2.2"].comfyui_loads(KEY_SCHEMES["diffusers"]) is False, (
        "ComfyUI knows no diffusers' names of Wan"
    )
