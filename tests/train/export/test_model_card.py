"""Model cards: what the hub reads from them, what people read, and how an edited card is told from an own one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from supertuner.train.export.model_card import CardFacts, CardOrigin, CardSample, card_origin, render_card
from tests.models.push_server import TOKEN

FACTS = CardFacts(
    repository="someone/cats",
    kinds=("lora",),
    files={"diffusers": ("cats_high_noise.safetensors", "cats_low_noise.safetensors")},
    version="0.2.0",
    base_model="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    task="text-to-video",
    license="apache-2.0",
    trigger_word="ohwx cat",
    figures={"steps": 500, "dataset": "260 images"},
    settings={"adapter.rank": 16, "adapter.targets": ["to_q", "to_v"]},
    samples=(CardSample("an ohwx cat", 3, "samples/a.mp4", "samples/a.frames.png"),),
)


def front_matter(card: str) -> dict[str, Any]:
    found = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def test_the_hub_reads_base_model_task_licence_trigger_word_and_samples() -> None:
    card = render_card(FACTS)
    assert front_matter(card) == {
        "license": "apache-2.0",
        "library_name": "diffusers",
        "base_model": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-to-video",
        "tags": ["lora", "supertuner"],
        "instance_prompt": "ohwx cat",
        "widget": [{"text": "an ohwx cat", "output": {"url": "samples/a.mp4"}}],
    }
    for text in (
        'pipe.load_lora_weights("someone/cats", weight_name="cats_high_noise.safetensors")',
        'weight_name="cats_low_noise.safetensors", load_into_transformer_2=True)',
        'from_pretrained("Wan-AI/Wan2.2-T2V-A14B-Diffusers"',
        "![sample](samples/a.frames.png)",
        "([video](samples/a.mp4))",
        "| dataset | `260 images` |",
        '| adapter.targets | `["to_q", "to_v"]` |',
        "Trigger word: `ohwx cat`",
        "For ComfyUI, download a file and run `supertuner adapter export FILE --for comfyui`.",
    ):
        assert text in card


def test_nothing_is_made_up() -> None:
    card = render_card(CardFacts("someone/cats", ("lokr", "dora"), {"": ("cats.safetensors",)}, base_model="my-model"))
    assert front_matter(card) == {"library_name": "diffusers", "tags": ["lokr", "dora", "lycoris", "supertuner"]}
    assert "has not named a licence" in card and "`my-model`" in card
    assert "lycoris-lora" in card and "load_lora_weights" not in card
    assert "Trigger" not in card and "## Training" not in card and "trained with" not in card


@pytest.mark.parametrize("path", ["/home/me/wan", "./wan", "wan", "a/b/c", "../a/b", "a b/c"])
def test_a_folder_is_never_a_model_on_the_hub(path: str) -> None:
    assert "base_model" not in front_matter(render_card(replace(FACTS, base_model=path)))


def test_comfyui_files_come_with_the_hint_of_the_export_command() -> None:
    card = render_card(replace(FACTS, files={**FACTS.files, "comfyui": ("a.comfyui.safetensors",)}))
    assert "Put it into ComfyUI/models/loras" in card and "adapter export" not in card


def test_foreign_text_can_neither_break_the_markdown_nor_carry_a_token() -> None:
    evil = f"a | b ` c\n---\n# title <script> {TOKEN}"
    card = render_card(
        replace(FACTS, trigger_word=evil, settings={"a": evil}, samples=(CardSample(evil, 0, "a.png", "a.png"),))
    )
    assert TOKEN not in card
    assert set(front_matter(card)) == set(front_matter(render_card(FACTS)))
    assert "\n# title" not in card.split("---\n", 2)[2]
    assert "| a | `a \\| b ' c --- # title <script> hf_(token removed)` |" in card


def test_an_edited_card_is_told_from_an_own_one() -> None:
    card = render_card(FACTS)
    assert card_origin(card) is CardOrigin.OWN
    assert card_origin(card.replace("\n", "\r\n")) is CardOrigin.OWN, "an editor's line ends are no edit"
    assert card_origin(card.replace("ohwx", "OHWX", 1)) is CardOrigin.EDITED
    assert card_origin(card + "\nmore\n") is CardOrigin.EDITED
    assert card_origin("# a card\n") is CardOrigin.FOREIGN
    assert card_origin("") is CardOrigin.FOREIGN
