"""The model card of a pushed adapter: YAML for the hub, and text for people. Pure.

The last line of a card holds a digest of the lines above it, so that a later push can tell its own card from one that
a user wrote or edited.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import yaml

from supertuner.core.types import JSON, hide_tokens
from supertuner.train.export.loading_hints import comfyui_hint, diffusers_calls, kohya_hint

HUB_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
"""A model on the hub, and not a path."""
KIND_TITLES: Final = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr", "loha": "LoHa", "locon": "LoCon"}
LYCORIS_KINDS: Final = frozenset(("lokr", "loha", "locon", "diff", "oft", "glora", "ia3", "norm"))
_MARK: Final = re.compile(r"\n<!-- Written by SuperTuner, sha256 ([0-9a-f]{64})\. [^\n]*-->\n?\Z")


class CardOrigin(StrEnum):
    OWN = "own"
    EDITED = "edited"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class CardSample:
    """A sample that is pushed with the adapter; its files are paths in the repository."""

    prompt: str
    seed: int
    media: str
    """The image or the video."""
    image: str
    """The image, or one with frames of the video."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says. Values that are None or empty are left out."""

    repository: str
    kinds: tuple[str, ...]
    """The kinds of the adapter's layers, for example `lora` and `dora`."""
    files: Mapping[str, Sequence[str]]
    """Program whose names the files have → files; those of "" are in lycoris-lora's or other names."""
    version: str | None = None
    """The version of SuperTuner that trained it; None: another program did, or it is not known."""
    base_model: str | None = None
    """The name of the base model on the hub, or of its folder."""
    task: str | None = None
    """The hub's `pipeline_tag`."""
    license: str | None = None
    trigger_word: str | None = None
    figures: Mapping[str, JSON] = field(default_factory=dict)
    """What was trained on: steps, samples, dataset size, seed."""
    settings: Mapping[str, JSON] = field(default_factory=dict)
    """Settings that were set, without paths."""
    samples: tuple[CardSample, ...] = ()

    @property
    def hub_base(self) -> str | None:
        return self.base_model if self.base_model and HUB_NAME.fullmatch(self.base_model) else None


def render_card(facts: CardFacts) -> str:
    """The text of README.md."""
    front_matter = yaml.safe_dump(dict(_front_matter(facts)), sort_keys=False, allow_unicode=True)
    sections = [_introduction(facts), _samples(facts), _usage(facts), _training(facts), _licence(facts)]
    text = hide_tokens(f"---\n{front_matter}---\n\n" + "\n\n".join(section for section in sections if section))
    note = "A push replaces this card only while it is unchanged."
    return f"{text}\n\n<!-- Written by SuperTuner, sha256 {_digest(text + chr(10))}. {note} -->\n"


def card_origin(text: str) -> CardOrigin:
    """Whether SuperTuner wrote this card, and whether it was edited since."""
    text = text.replace("\r\n", "\n")
    mark = _MARK.search(text)
    if mark is None:
        return CardOrigin.EDITED if "<!-- Written by SuperTuner" in text else CardOrigin.FOREIGN
    return CardOrigin.OWN if _digest(text[: mark.start()]) == mark[1] else CardOrigin.EDITED


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _front_matter(facts: CardFacts) -> Iterator[tuple[str, JSON]]:
    if facts.license is not None:
        yield "license", facts.license
    yield "library_name", "diffusers"
    if facts.hub_base is not None:
        yield "base_model", facts.hub_base
        yield "base_model_relation", "adapter"
    if facts.task is not None:
        yield "pipeline_tag", facts.task
    family_tags = ["lycoris"] if LYCORIS_KINDS.intersection(facts.kinds) else []
    yield "tags", list(dict.fromkeys((*facts.kinds, *family_tags, "supertuner")))
    if facts.trigger_word is not None:
        yield "instance_prompt", _one_line(facts.trigger_word)
    if facts.samples:
        yield (
            "widget",
            [{"text": _one_line(sample.prompt), "output": {"url": sample.media}} for sample in facts.samples],
        )


def _introduction(facts: CardFacts) -> str:
    kinds = " and ".join(KIND_TITLES.get(kind, kind) for kind in facts.kinds)
    base = _code(facts.base_model) if facts.base_model else "a base model that is not recorded"
    if facts.hub_base is not None:
        base = f"[{facts.hub_base}](https://huggingface.co/{facts.hub_base})"
    lines = [
        f"# {facts.repository.partition('/')[2]}",
        f"An adapter ({kinds}) for {base}{f', trained with SuperTuner {facts.version}' if facts.version else ''}.",
    ]
    if facts.trigger_word is not None:
        lines.append(f"Trigger word: {_code(facts.trigger_word)}. Write it in the prompt.")
    return "\n\n".join(lines)


def _samples(facts: CardFacts) -> str:
    if not facts.samples:
        return ""
    blocks = []
    for sample in facts.samples:
        link = f" ([video]({sample.media}))" if sample.media != sample.image else ""
        blocks.append(f"![sample]({sample.image})\n\n{_code(sample.prompt)}, seed {sample.seed}{link}")
    return "\n\n".join(["## Samples", *blocks])


def _usage(facts: CardFacts) -> str:
    sections = []
    for program, files in facts.files.items():
        names = "\n".join(f"- `{file}`" for file in files)
        if program == "diffusers":
            base, remark = (facts.hub_base, "") if facts.hub_base else ("FOLDER", "  # the folder of the base model")
            code = [
                "import torch",
                "from diffusers import DiffusionPipeline",
                "",
                f'pipe = DiffusionPipeline.from_pretrained("{base}", dtype=torch.bfloat16){remark}',
                *diffusers_calls(files, facts.repository),
            ]
            sections += [f"## diffusers\n\n{names}", "\n".join(["```python", *code, "```"])]
        elif program == "comfyui":
            sections += [f"## ComfyUI\n\n{names}", _sentence(comfyui_hint(len(files)))]
        elif program == "kohya":
            sections += [f"## kohya\n\n{names}", _sentence(kohya_hint())]
        else:
            sections.append(f"## Files\n\n{names}")
            if LYCORIS_KINDS.intersection(facts.kinds):
                hint = "load them with lycoris-lora, or merge them into the base model with `supertuner adapter merge`"
                sections.append(_sentence(hint))
    if "comfyui" not in facts.files:
        sections.append("For ComfyUI, download a file and run `supertuner adapter export FILE --for comfyui`.")
    return "\n\n".join(sections)


def _training(facts: CardFacts) -> str:
    tables = []
    for head, values in (("| | |", facts.figures), ("| setting | value |", facts.settings)):
        rows = [f"| {name} | {_code(value)} |" for name, value in values.items() if value is not None]
        if rows:
            tables.append("\n".join([head, "|---|---|", *rows]))
    return "\n\n".join(["## Training", *tables]) if tables else ""


def _licence(facts: CardFacts) -> str:
    text = "The author has not named a licence for these files."
    if facts.license is not None:
        text = f"Licence of these files: {_code(facts.license)}."
    return f"## Licence\n\n{text} The terms of the base model may apply as well."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _code(value: JSON) -> str:
    """A value as code in one line of Markdown, also inside a table."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = _one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "(empty)"


def _one_line(text: str) -> str:
    return " ".join(text.split())
