"""Datasets with reference images: settings that change only one image of a pair are refused; ai-toolkit's keys work."""

from __future__ import annotations

import pytest

PAIRS = {"id": "a", "instance_data_dir": "after", "conditioning_dir": "before"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"augment": {"flip": 0.5}}, "datasets[0].augment.flip: would change the sample but not its reference image"),
        ({"crop": "random"}, "datasets[0].crop: would change the sample"),
        ({"resolution": [64, 128], "resolution_mode": "each"}, "datasets[0].resolution_mode: is not available with"),
        ({"dataset_type": "video", "frames": 5}, 'datasets[0].conditioning_dir: needs dataset_type "image"'),
        ({"conditioning_resolution": 8}, "datasets[0].conditioning_resolution: 8 is not allowed"),
    ],
)
def test_settings_that_contradict_reference_images_are_refused(refuse, changed, says):
    problems = refuse({"datasets": [{**PAIRS, **changed}]})
    assert any(problem.startswith(says) or says in problem for problem in problems)


def test_a_size_of_reference_images_without_their_folder_produces_a_warning(load_text):
    loaded = load_text({"datasets": [{"id": "a", "instance_data_dir": "x", "conditioning_resolution": 512}]})
    assert any("without conditioning_dir" in note.message for note in loaded.notes)


def test_ai_toolkits_control_path_is_translated(load_text):
    tree = {
        "datasets": [{"folder_path": "after", "control_path": "before"}, {"folder_path": "b", "control_path": None}]
    }
    first, second = load_text(tree).config.datasets
    assert first.conditioning_dir is not None and first.conditioning_dir.name == "before"
    assert second.conditioning_dir is None


def test_ai_toolkits_architecture_is_translated(load_text):
    model = load_text({"model": {"arch": "qwen_image_edit", "name_or_path": "a/b"}}).config.model
    assert (model.family, model.path) == ("qwen-image-edit", "a/b")
