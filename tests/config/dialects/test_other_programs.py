"""Files of trainers whose keys are not read here are recognized and answered by the name of the program."""

from __future__ import annotations

import pytest

KOHYA = """
pretrained_model_name_or_path = "sdxl.safetensors"
network_module = "networks.lora"
network_dim = 16
unet_lr = 1e-4
optimizer_type = "AdamW8bit"
"""
KOHYA_DATASET = """
[general]
enable_bucket = true
[[datasets]]
resolution = 1024
  [[datasets.subsets]]
  image_dir = "squares"
  class_tokens = "a square"
"""
MUSUBI = """
dit = "wan.safetensors"
vae = "vae.safetensors"
network_module = "networks.lora_wan"
network_dim = 32
optimizer_type = "adamw8bit"
"""
MUSUBI_DATASET = """
[general]
resolution = [960, 544]
[[datasets]]
video_directory = "clips"
target_frames = [1, 25]
"""
ONETRAINER = """
{"training_method": "LORA", "base_model_name": "a/b", "workspace_dir": "w", "lora_rank": 16, "epochs": 10}
"""


@pytest.mark.parametrize(
    ("text", "name", "program"),
    [
        (KOHYA, "run.toml", "kohya's sd-scripts"),
        (KOHYA_DATASET, "data.toml", "kohya's sd-scripts"),
        (MUSUBI, "run.toml", "musubi-tuner"),
        (MUSUBI_DATASET, "data.toml", "musubi-tuner"),
        (ONETRAINER, "run.json", "OneTrainer"),
    ],
)
def test_a_file_of_another_trainer_is_answered_by_its_name_and_with_our_settings(refuse, text, name, program):
    (problem,) = refuse(text, name)
    assert problem.startswith(f"this is a configuration of {program}, whose keys are not converted; ")
    assert "adapter.rank" in problem and "instance_data_dir" in problem and "docs/configuration.md" in problem


@pytest.mark.parametrize(
    "text",
    [
        '{"network_dim": 4}',
        '{"model_family": "flux", "network_dim": 4, "unet_lr": 1e-4}',
        '{"train": {"unet_lr": 1e-4}, "model": {"arch": "flux"}, "network": {"network_dim": 4}}',
    ],
)
def test_a_file_with_one_such_key_or_with_a_model_of_a_known_program_is_read(refuse, text):
    problems = refuse(text)
    assert any("network_dim: not a setting" in problem for problem in problems)
