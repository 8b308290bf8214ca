"""Pushing a run and a file to a local hub: at the end of training, by command, again, and when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

import supertuner as st
from supertuner.api.training import training_summary
from supertuner.cli import app, main
from supertuner.core.errors import HubError, ModelError, OptionError
from supertuner.models.adapters.keys_schemes import KEY_SCHEMES
from tests.models.push_server import TOKEN, PushHub, serve_push_hub, use_push_hub
from tests.train.export.test_adapter_files import wan_lora
from tests.train.runs import config

REPOSITORY = "someone/squares"
STEM = "run-step00000002"
CHANGES: dict[str, Any] = {
    "train": {"max_steps": 2},
    "model": {"switch_boundary_every": 1},
    "adapter": {"dropout": 0.0},
    "validation": {"at_start": False, "at_end": True, "every_steps": None, "seeds": [0, 1]},
    "exports": {"push_to_hub": REPOSITORY, "formats": ["comfyui"], "trigger_word": "ohwx"},
}


@dataclass(frozen=True)
class PushedRun:
    hub: PushHub
    file: Path
    """Its configuration."""
    result: st.TrainingResult

    @property
    def files(self) -> dict[str, bytes]:
        return self.hub.repositories[REPOSITORY].files


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PushedRun]:
    """A run that was trained and pushed."""
    with serve_push_hub() as hub, pytest.MonkeyPatch.context() as patch:
        use_push_hub(hub, patch)
        file = config(tmp_path_factory.mktemp("pushed"), "a", **CHANGES)
        yield PushedRun(hub, file, st.train(st.load_config(file), show_progress=False))


def card(run: PushedRun) -> str:
    return run.files["README.md"].decode()


def commits(run: PushedRun) -> int:
    return len(run.hub.repositories[REPOSITORY].messages)


def push_command(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["adapter", "push", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    assert TOKEN not in done.output
    return done.output


def test_training_pushes_both_experts_the_samples_of_the_last_step_and_a_card(pushed: PushedRun) -> None:
    run_dir = pushed.result.run_dir
    expected = {
        f"{STEM}_{expert}{end}.safetensors" for expert in ("high_noise", "low_noise") for end in ("", ".comfyui")
    }
    samples = {f"samples/step-00000002/prompt-00-seed-{seed}.png" for seed in (0, 1)}
    assert set(pushed.files) == expected | samples | {"README.md"}
    assert pushed.hub.repositories[REPOSITORY].private
    for name in expected:
        if name.endswith(".comfyui.safetensors"):
            assert pushed.files[name] == (run_dir / "exports/step-00000002" / name).read_bytes()
    facts = yaml.safe_load(card(pushed).split("---\n")[1])
    assert facts["pipeline_tag"] == "text-to-video" and facts["instance_prompt"] == "ohwx"
    assert "license" not in facts and "base_model" not in facts, "the tiny model is not on the hub"
    assert {row["output"]["url"] for row in facts["widget"]} == samples
    for text in (
        "| steps | `2` |",
        "| dataset | `6 images` |",
        "| adapter.rank | `2` |",
        "| optimizer.learning_rate | ",
    ):
        assert text in card(pushed)


def test_the_card_has_no_path_of_this_machine(pushed: PushedRun) -> None:
    folder = pushed.file.parent
    assert str(folder) not in card(pushed) and folder.name not in card(pushed) and "/tmp" not in card(pushed)
    assert "instance_data_dir" not in card(pushed) and "cache" not in card(pushed)


def test_the_summary_and_the_events_say_what_was_pushed(pushed: PushedRun) -> None:
    url = f"{pushed.hub.address}/{REPOSITORY}"
    assert f"  hub          {url} (private): 7 files" in training_summary(pushed.result)
    assert pushed.result.to_dict()["hub"][1] == "the model card names no licence: exports.license is not set"  # type: ignore[index]
    events = (pushed.result.run_dir / "events.jsonl").read_text()
    assert f"{REPOSITORY} is pushed when training ends, as someone" in events and url in events


def test_a_finished_run_and_the_command_push_nothing_twice(pushed: PushedRun) -> None:
    before = commits(pushed)
    again = st.train(st.load_config(pushed.file), show_progress=False)
    assert "unchanged: the hub has the same files" in again.hub_lines[0]
    run_dir = str(again.run_dir)
    for source in (run_dir, f"{run_dir}@2", f"{run_dir}/checkpoints/step-00000002"):
        assert "unchanged: the hub has the same files" in push_command(source, REPOSITORY)
    assert commits(pushed) == before


def test_a_card_that_was_edited_or_is_foreign_is_kept_unless_forced(pushed: PushedRun) -> None:
    run_dir, own = str(pushed.result.run_dir), card(pushed)
    edited = own.replace("ohwx", "my word")
    for text, reason in ((edited, "was edited there"), ("# mine\n", "is not one of SuperTuner's")):
        pushed.files["README.md"] = text.encode()
        output = push_command(run_dir, REPOSITORY)
        assert f"the model card on the hub {reason}, and is kept" in output and "--force replaces" in output
        assert card(pushed) == text
    assert "kept" not in push_command(run_dir, REPOSITORY, "--force")
    assert card(pushed) == own
    output = push_command(run_dir, REPOSITORY, "--license", "mit", "--trigger-word", "sks", "--public")
    assert "licence" not in output and "its visibility is unchanged" in output
    assert "license: mit" in card(pushed) and "instance_prompt: sks" in card(pushed)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"commit": [403]}, "does not allow the token to write"),
        ({"commit": [500]}, "answered with status 500"),
        ({"info": [401, 401], "create": [401]}, "rejects the token"),
    ],
)
def test_a_push_that_fails_at_the_end_is_a_warning_with_the_command_for_later(
    pushed: PushedRun, faults: dict[str, list[int]], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pushed.files["README.md"] = b"<!-- Written by SuperTuner"
    pushed.files.pop(f"{STEM}_low_noise.safetensors", None)
    pushed.hub.faults.update({step: list(statuses) for step, statuses in faults.items()})
    result = st.train(st.load_config(pushed.file))
    assert result.stopped_by is None and len(result.adapters) == 2 and all(path.is_file() for path in result.adapters)
    first, second = result.hub_lines
    assert first.startswith(f"NOT PUSHED to {REPOSITORY}: ") and reason in first
    assert second == f"push it later: supertuner adapter push {result.run_dir}@2 {REPOSITORY}"
    assert "NOT PUSHED" in training_summary(result) and second in training_summary(result)
    assert TOKEN not in "".join(capfd.readouterr())
    pushed.hub.faults.clear()
    push_command(*second.split()[-2:], "--force")
    assert f"{STEM}_low_noise.safetensors" in pushed.files


@pytest.mark.parametrize(
    ("token", "role", "owner", "message"),
    [
        (
            "hf_aTokenThatNobodyKnows1234",
            "write",
            "someone",
            "the Hugging Face hub rejects the token; run `hf auth login`",
        ),
        ("", "write", "someone", "there is no token of the Hugging Face hub; run `hf auth login`"),
        (TOKEN, "read", "someone", "may only read"),
        (TOKEN, "write", "nobody", "someone is neither nobody nor a member of it"),
    ],
)
def test_a_run_that_could_not_be_pushed_does_not_start(
    pushed: PushedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str, role: str, owner: str, message: str
) -> None:
    import huggingface_hub

    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setitem(pushed.hub.account["auth"], "accessToken", {"role": role})
    exports = {"push_to_hub": f"{owner}/new"}
    file = config(tmp_path, "b", **{**CHANGES, "exports": exports})
    with pytest.raises(HubError, match=rf'exports.push_to_hub is "{owner}/new": .*{message}'):
        st.train(st.load_config(file), show_progress=False)
    assert not (tmp_path / "b/run/losses.jsonl").exists() and not list((tmp_path / "arenas").glob("*"))


def test_without_a_network_a_run_starts_with_a_warning(pushed: PushedRun) -> None:
    pushed.hub.faults["whoami"] = [503]
    st.train(st.load_config(pushed.file), show_progress=False)
    events = [json.loads(line) for line in (pushed.result.run_dir / "events.jsonl").read_text().splitlines()]
    warnings = [event["message"] for event in events if event["event"] == "warned"]
    assert any("could not be checked" in text and "is tried when training ends" in text for text in warnings)


def test_a_trial_with_a_part_of_the_data_is_not_pushed(pushed: PushedRun) -> None:
    from supertuner.api.session import load_command_config

    loaded = load_command_config(pushed.file, [], limit=2)
    assert loaded.config.push_repository is None
    assert [note.message for note in loaded.notes if note.what == "exports.push_to_hub"] == [
        "has no effect: a trial with a part of the data is not pushed"
    ]


def test_no_file_of_the_run_and_nothing_that_was_sent_as_a_file_has_the_token(pushed: PushedRun) -> None:
    """The last test of the run: the sessions above succeeded, failed, and were refused by answers with the token."""
    for path in pushed.file.parent.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert not any(TOKEN.encode() in content for content in pushed.files.values())


def test_a_token_in_a_configuration_file_is_not_stored(pushed: PushedRun, tmp_path: Path) -> None:
    file = config(tmp_path, "c", **{**CHANGES, "exports": {}})
    tree = json.loads(file.read_text())
    tree["datasets"][0]["hf_token"] = TOKEN  # SimpleTuner's key, which has no meaning here
    file.write_text(json.dumps(tree))
    with pytest.raises(HubError):  # stopped before training; the folder has its configuration by then
        st.train(st.load_config(file, overrides={"exports.push_to_hub": "nobody/x"}), show_progress=False)
    stored = (tmp_path / "c/run/config.given.json").read_text()
    assert TOKEN not in stored and "hf_(token removed)" in stored
    assert all(TOKEN not in path.read_text() for path in (tmp_path / "c/run").glob("*.json*"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    metadata = {"supertuner": json.dumps({"base_model": "Wan-AI/Wan2.2", "step": 7, "type": "lora"})}
    path = tmp_path / "cat_low_noise.safetensors"
    save_file(wan_lora(KEY_SCHEMES["diffusers"], 1.0, torch.float32), path, metadata)
    return path


def test_a_file_is_pushed_from_a_new_process_without_the_token_in_its_output(pushed: PushedRun, adapter: Path) -> None:
    environ = {**os.environ, "HF_ENDPOINT": pushed.hub.address, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    command = [sys.executable, "-W", "ignore", "-m", "supertuner", "adapter", "push", str(adapter)]
    done = subprocess.run(
        [*command, "a-group/cat", "--for", "comfyui", "--public"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "/a-group/cat (public): 3 files" in done.stdout and TOKEN not in done.stdout + done.stderr
    files = pushed.hub.repositories["a-group/cat"].files
    assert set(files) == {adapter.name, "cat_low_noise.comfyui.safetensors", "README.md"}
    text = files["README.md"].decode()
    assert (
        "base_model: Wan-AI/Wan2.2\n" in text and "load_into_transformer_2=True" in text and "| steps | `7` |" in text
    )


def test_a_failed_command_prints_one_message_and_no_traceback(
    pushed: PushedRun, adapter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pushed.hub.faults["info"] = [500]
    with pytest.raises(SystemExit) as ended:
        main(["adapter", "push", str(adapter), "someone/cat"])
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (1, "")
    assert err == "the Hugging Face hub answered with status 500 for someone/cat; try again later\n"


def test_wrong_arguments_are_refused_before_anything_is_created(pushed: PushedRun, adapter: Path) -> None:
    pushed.hub.requests.clear()
    for repository, options, message in (
        ("cat", {}, '"cat" is not allowed; allowed: OWNER/NAME'),
        ("someone/cat", {"license": "My Own"}, '"My Own" is not allowed; allowed: the hub\'s name of a licence'),
    ):
        with pytest.raises(OptionError, match=message):
            st.adapters.push(adapter, repository, **options)
    with pytest.raises(ModelError, match="'gimp' is not a program to export for"):
        st.adapters.push(adapter, "someone/cat", programs=["gimp"])
    with pytest.raises(ModelError, match="no export and no checkpoint of step 9; it has 2"):
        st.adapters.push(f"{pushed.result.run_dir}@9", "someone/cat")
    assert pushed.hub.requests == []
