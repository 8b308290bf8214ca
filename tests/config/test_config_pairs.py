"""Settings of datasets for models that edit: what contradicts pairs is refused, and ai-toolkit's word is understood."""

from __future__ import annotations

import pytest

PAIRS = {"id": "a", "instance_data_dir": "after", "conditioning_dir": "before"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"augment": {"flip": 0.5}}, "datasets[0].augment.flip: would change a sample and not what it was made from"),
        ({"crop": "random"}, "datasets[0].crop: would change a sample"),
        ({"resolution": [64, 128], "resolution_mode": "each"}, "datasets[0].resolution_mode: is not available with"),
        ({"dataset_type": "video", "frames": 5}, 'datasets[0].conditioning_dir: needs dataset_type "image"'),
        ({"conditioning_resolution": 8}, "datasets[0].conditioning_resolution: 8 is not allowed"),
    ],
)
def test_what_contradicts_pairs_is_refused_by_name(refuse, changed, says):
    problems = refuse({"datasets": [{**PAIRS, **changed}]})
    assert any(problem.startswith(says) or says in problem for problem in problems)


def test_a_size_of_pictures_that_are_not_there_is_doubted(load_text):
    loaded = load_text({"datasets": [{"id": "a", "instance_data_dir": "x", "conditioning_resolution": 512}]})
    assert any("only with conditioning_dir" in note.message for note in loaded.notes)


def test_ai_toolkits_control_path_is_understood(load_text):
    tree = {
        "datasets": [{"folder_path": "after", "control_path": "before"}, {"folder_path": "b", "control_path": None}]
    }
    first, second = load_text(tree).config.datasets
    assert first.conditioning_dir is not None and first.conditioning_dir.name == "before"
    assert second.conditioning_dir is None


def test_ai_toolkits_architecture_is_understood(load_text):
    model = load_text({"model": {"arch": "qwen_image_edit", "name_or_path": "a/b"}}).config.model
    assert (model.family, model.path) == ("qwen-image-edit", "a/b")
