"""Recognizes configuration files of kohya's scripts, musubi-tuner and OneTrainer, whose keys are not read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from supertuner.core.types import JSON

FIRST_STEPS = (
    "start from `supertuner sample-data FOLDER`, which writes a configuration to change, or from the files in "
    "examples/; docs/configuration.md lists all settings"
)


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """A trainer whose files are recognized and not converted."""

    name: str
    equivalents: str
    """The settings that take the place of its most important ones."""
    keys: frozenset[str]
    """Keys by which its files are recognized."""
    is_kohya_like: bool = True
    """It also has `SHARED_KEYS`."""

    @property
    def message(self) -> str:
        return (
            f"this is a configuration of {self.name}, whose keys are not converted; {self.equivalents}; {FIRST_STEPS}"
        )


_KOHYA_SETTINGS = (
    "model.path is its base model, adapter.rank and adapter.alpha its network_dim and network_alpha, "
    "datasets[].instance_data_dir its image_dir or train_data_dir, optimizer.learning_rate its learning_rate or unet_lr"
)


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


SHARED_KEYS = _keys(
    "network_dim network_alpha network_module network_args network_weights optimizer_type optimizer_args "
    "max_train_epochs save_every_n_epochs save_every_n_steps sample_every_n_steps sample_prompts output_name "
    "lr_scheduler_num_cycles sdpa num_repeats caption_extension enable_bucket general"
)
"""Keys that both kohya's scripts and musubi-tuner have, and SimpleTuner and ai-toolkit do not have together."""

OTHER_PROGRAMS = (
    OtherProgram(
        "musubi-tuner",
        "model.path is a diffusers pipeline (its dit, vae and text encoders are single files), adapter.rank and "
        "adapter.alpha its network_dim and network_alpha, datasets[].instance_data_dir its image_directory or "
        "video_directory",
        _keys(
            "dit image_directory video_directory image_jsonl_file video_jsonl_file target_frames "
            "frame_extraction cache_directory control_directory fp8_llm timestep_boundary"
        ),
    ),
    OtherProgram(
        "kohya's sd-scripts",
        _KOHYA_SETTINGS,
        _keys(
            "network_dim network_module train_data_dir reg_data_dir in_json save_model_as unet_lr text_encoder_lr "
            "min_bucket_reso max_bucket_reso bucket_reso_steps clip_skip image_dir class_tokens subsets "
            "shuffle_caption caption_extension save_precision network_train_unet_only prior_loss_weight no_half_vae"
        ),
    ),
    OtherProgram(
        "OneTrainer",
        "model.path is its base_model_name, adapter.rank and adapter.alpha its lora_rank and lora_alpha, "
        "datasets[].instance_data_dir the path of a concept, train.num_epochs its epochs",
        _keys(
            "base_model_name concept_file_name training_method workspace_dir output_model_destination "
            "output_model_format sample_definition_file_name learning_rate_scheduler only_cache"
        ),
        is_kohya_like=False,
    ),
)


def detect_other_program(tree: Mapping[str, JSON]) -> OtherProgram | None:
    """The trainer that wrote the file; None if none is recognized by a key of its own and at least two in all."""
    if {"model_family", "--model_family", "model", "config"} & tree.keys():
        return None
    names = set(_all_keys(tree))
    for program in OTHER_PROGRAMS:
        known = program.keys | SHARED_KEYS if program.is_kohya_like else program.keys
        if program.keys & names and len(known & names) >= 2:
            return program
    return None


def _all_keys(node: JSON, depth: int = 3) -> list[str]:
    """The keys of the tables of a file down to `depth`, without leading dashes."""
    if isinstance(node, list):
        return [key for entry in node[:4] for key in _all_keys(entry, depth)]
    if not isinstance(node, Mapping) or not depth:
        return []
    own = [str(name).removeprefix("--").replace("-", "_") for name in node]
    return own + [key for inner in node.values() for key in _all_keys(inner, depth - 1)]
