"""SimpleTuner's LyCORIS file is translated; its typos are refused."""

from __future__ import annotations

import json

import pytest

from supertuner.core.errors import ConfigError
from tests.config.dialects.test_config_training_dialects import settings

LYCORIS = {
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 16,
    "apply_preset": {"target_module": ["Attention", "FeedForward"], "module_algo_map": {"Attention": {"factor": 16}}},
}


def lycoris(tmp_path, load_text, **changed):
    (tmp_path / "lycoris.json").write_text(json.dumps({**LYCORIS, **changed}))
    return load_text({"model_type": "lora", "lora_type": "lycoris", "lycoris_config": "lycoris.json"})


def test_simpletuners_lycoris_file_is_translated(tmp_path, load_text):
    loaded = lycoris(tmp_path, load_text)
    assert settings(loaded.config) == {
        "adapter.type": "lokr",
        "adapter.lokr_full_matrix": True,
        "adapter.alpha": 1,
        "adapter.lokr_factor": 16,
        "adapter.targets": "attention_mlp",
    }
    (note,) = [note for note in loaded.notes if "lycoris.json" in note.what and "module_algo_map" in note.what]
    assert "adapter.modules sets their ranks" in note.message


def test_a_typo_in_a_lycoris_file_is_refused_with_a_suggestion(tmp_path, load_text):
    with pytest.raises(ConfigError, match=r"lycoris\.json: linear_dmi: not a key of LyCORIS; did you mean linear_dim"):
        lycoris(tmp_path, load_text, linear_dmi=8)
    with pytest.raises(
        ConfigError, match=r"apply_preset\.target_modul: not a key of LyCORIS; did you mean target_module"
    ):
        lycoris(tmp_path, load_text, apply_preset={"target_modul": ["Attention"]})


def test_with_lycoris_the_sizes_of_a_lora_do_not_count(tmp_path, load_text):
    (tmp_path / "lycoris.json").write_text('{"algo": "locon", "linear_dim": 8, "linear_alpha": 2}')
    tree = {"lora_type": "lycoris", "lycoris_config": "lycoris.json", "lora_rank": 128, "lora_alpha": 64}
    adapter = load_text(tree).config.adapter
    assert (adapter.type, adapter.rank, adapter.alpha) == ("locon", 8, 2)


def test_a_lycoris_file_of_another_algorithm(tmp_path, load_text):
    adapter = lycoris(tmp_path, load_text, algo="loha", linear_dim=8, rs_lora=True, dropout=0.1).config.adapter
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.rslora, adapter.dropout) == ("loha", 8, 1.0, True, 0.1)
    assert lycoris(tmp_path, load_text, algo="full").config.adapter.type == "diff"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"algo": "boft"}, 'lycoris.json: algo: "boft" is not available; allowed: "lora", "locon"'),
        ({"multiplier": 2.0}, "lycoris.json: multiplier: 2.0 is not available"),
        ({"dora_wd": True}, "lycoris.json: dora_wd: is not available for LyCORIS"),
    ],
)
def test_unsupported_options_of_a_lycoris_file_are_refused(tmp_path, refuse, changed, says):
    (tmp_path / "lycoris.json").write_text(json.dumps({**LYCORIS, **changed}))
    problems = refuse({"model_type": "lora", "lora_type": "lycoris", "lycoris_config": "lycoris.json"})
    assert any(says in problem for problem in problems)


def test_simpletuners_init_lora_sets_the_initial_adapter(tmp_path, load_text):
    assert load_text({"init_lora": "a.safetensors"}).config.adapter.start_from == tmp_path / "a.safetensors"
