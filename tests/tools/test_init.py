"""`supertuner init`: from a folder of samples to a configuration that loads, with reasons; and what it refuses."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from supertuner.api.forecasting import estimate
from supertuner.cli import OPTION_BY_PARAMETER, app, with_options
from supertuner.config.sources.load import load_config
from supertuner.core.errors import SuperTunerError
from supertuner.core.types import MediaKind
from supertuner.sinks.console import ConsoleSink
from supertuner.tools.init.commented_yaml import add_comments
from supertuner.tools.init.folder_survey import survey_folder
from supertuner.tools.init.run_init import InitRequest, choose_model, run_init
from supertuner.tools.init.settings import run_name, settings_from_data, training_length
from supertuner.tools.sample_data import make_sample_data

TINY = ("--family", "wan2.2", "--model", "tiny", "--machine", "gh200-96", "--set", "datasets[0].resolution=64")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of drawn images, videos and sounds. Traces of the tests are stored in `runs` beside them."""
    folder = tmp_path_factory.mktemp("samples")
    make_sample_data(folder, images=6, videos=3, sounds=1)
    return folder


def init(*options: str | Path) -> Result:
    """The command as typed, without a terminal."""
    return CliRunner().invoke(app, ["init", *map(str, options)])


def refusal(result: Result) -> str:
    assert isinstance(result.exception, SuperTunerError), result.output
    return with_options(str(result.exception))


def tiny(samples: Path, out: Path, *options: str | Path) -> Result:
    return init(*TINY, "--set", f"run.output_dir={samples / 'runs'}", "--out", out, *options)


def test_the_file_holds_the_settings_that_were_forecast(samples: Path, tmp_path: Path) -> None:
    sets = ("datasets[0].resolution=64", f"run.output_dir={samples / 'runs'}")
    request = InitRequest("wan2.2", samples / "images", "gh200-96", tmp_path / "run.yaml", "tiny", None, sets)
    with ConsoleSink() as console:
        result = run_init(request, console)
    loaded = load_config(request.out)
    assert loaded.notes == ()
    config = loaded.config
    assert (config.model.path, config.datasets[0].instance_data_dir) == ("tiny", samples / "images")
    assert (
        config.train.batch_size * config.train.gradient_accumulation_steps == 4 and len(config.validation.prompts) == 3
    )
    assert estimate(loaded, "gh200-96") == result.forecast and result.forecast.fits


def test_the_command_prints_the_reasons_of_the_file_and_the_next_commands(samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run.yaml"
    done = tiny(samples, out, "--data", samples / "images", "--trigger-word", "shapeworld")
    assert done.exit_code == 0, done.output
    words = " ".join(re.sub(r"(?m)^ *# ", "", out.read_text()).split())
    reasons = re.findall(r"(?m)^    (.*)$", done.stdout)
    assert len(reasons) > 10 and all(" ".join(reason.split()) in words for reason in reasons)
    assert "6 images, each with a caption" in done.stdout and "modelled" in done.stdout
    config = load_config(out).config
    assert config.datasets[0].captions.trigger_word == "shapeworld"
    assert all("shapeworld" in prompt for prompt in config.validation.prompts)
    commands = [shlex.split(line)[1:] for line in done.stdout.splitlines() if line.startswith("  supertuner ")]
    assert [words[0] for words in commands] == ["config", "estimate", "train", "train"]
    assert all(str(out) in words for words in commands)
    assert CliRunner().invoke(app, commands[0]).exit_code == 0


def test_an_existing_file_is_never_overwritten(samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    assert "exists, and nothing is overwritten; give another name" in refusal(tiny(samples, out, "--data", samples))
    assert out.read_text() == "mine"


def test_pictures_without_captions_are_reported_in_the_file_and_on_the_console(samples: Path, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    out = tmp_path / "run.yaml"
    done = tiny(samples, out, "--data", tmp_path)
    assert done.exit_code == 0, done.output
    for text in (done.stdout, " ".join(out.read_text().split())):
        assert "without captions" in text and "broken.png" in text
    assert load_config(out).config.validation.prompts == ()
    assert load_config(out).config.train.batch_size == 1, "one picture: a window of one sample"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "missing: --family, --data, --machine (this machine has no GPU)"),
        (("--family", "wan22"), "did you mean wan2.2? Set --family to one of wan2.2, flux"),
        (("--machine", "gh300"), "'gh300' is not a known machine; set --machine to one of gh200-96"),
        (("--data", "nowhere"), "there is no such folder"),
        (("--data", "empty"), "holds no image or video that can be read (it is empty)"),
        (("--data", "sounds"), "1 audio file skipped"),
        (("--data", "corrupt"), "all 1 files that were read are broken; the first is a.jpg: "),
        (("--out", "no/run.yaml"), "name a file in a folder that exists and is writable"),
        (("--out", "run.json"), "give it a name that ends in .yaml"),
        (("--model", "black-forest-labs/FLUX.1-dev"), "is of family flux; set --family to flux"),
        (("--set", "train.batch_siz=2"), "batch_siz"),
        (("--family", "qwen-image-edit"), "name their folder with --set datasets[0].conditioning_dir=FOLDER"),
        (("--family", "flux", "--data", "videos"), "3 video files skipped: dataset_type is image"),
    ],
)
def test_a_wrong_option_is_refused_with_the_remedy_before_any_forecast(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(samples)
    for name in ("empty", "corrupt"):
        (samples / name).mkdir(exist_ok=True)
    (samples / "corrupt" / "a.jpg").write_bytes(b"\xff\xd8\xff and no more")
    right = {"--family": "wan2.2", "--data": "images", "--machine": "gh200-96", "--out": str(tmp_path / "run.yaml")}
    used = {**right, **dict(zip(options[::2], options[1::2], strict=True))} if options else {}
    result = init(*(word for pair in used.items() for word in pair))
    assert message in refusal(result)
    assert result.exit_code != 0 and not (tmp_path / "run.yaml").exists()


def test_a_model_whose_weights_do_not_fit_is_refused_with_machines_and_models_that_may(
    samples: Path, tmp_path: Path
) -> None:
    options = ("--family", "wan2.2", "--data", samples / "images", "--out", tmp_path / "run.yaml")
    message = refusal(init(*options, "--machine", "rtx-4090"))
    assert "not even in 8 bits" in message and "--model Wan-AI/Wan2.2-TI2V-5B-Diffusers" in message
    assert re.search(r"--machine gh200-96, .*gb10", message) and "--machine this also counts" in message
    assert not (tmp_path / "run.yaml").exists()


def test_on_a_terminal_it_asks_for_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "nothing here").mkdir()
    answers = ["sd3.5", "1", "nothing here", "", "gb10"]
    terminal, stdin = pty.openpty()
    command = [sys.executable, "-m", "supertuner", "init"]
    process = subprocess.Popen(command, stdin=stdin, stdout=-1, stderr=-1, text=True, cwd=tmp_path)
    os.write(terminal, "".join(f"{answer}\n" for answer in answers).encode())
    asked, error = process.communicate(timeout=120)
    os.close(terminal)
    os.close(stdin)
    assert process.returncode == 1
    assert all(question in asked for question in ("1  wan2.2", "stable-diffusion-3.5-medium", "folder", "machine"))
    assert f"{tmp_path / 'nothing here'}: holds no image that can be read" in error


def test_videos_are_surveyed_for_their_size_length_and_rate(samples: Path) -> None:
    survey = survey_folder(samples / "videos", [MediaKind.IMAGE, MediaKind.VIDEO], None)
    assert (survey.kind, survey.files, survey.captioned) == (MediaKind.VIDEO, 3, 3)
    values = {one.path: one.value for one in settings_from_data(choose_model("wan2.2", None), survey, None)}
    assert (values["datasets[0].resolution"], values["datasets[0].fps"]) == (256, 16)
    frames = values["datasets[0].frames"]
    assert isinstance(frames, int) and frames % 4 == 1 and frames <= survey.clip_frames(16)


def test_of_a_mixed_folder_the_kind_with_more_files_is_used_and_the_rest_is_named(samples: Path) -> None:
    survey = survey_folder(samples, [MediaKind.IMAGE, MediaKind.VIDEO], None)
    assert survey.kind is MediaKind.IMAGE and any(note.startswith("3 video files skipped") for note in survey.notes)


def test_short_datasets_are_repeated_more_often_than_long_ones() -> None:
    assert [training_length(count) for count in (1, 20, 260, 100_000)] == [
        *((100, 100), (100, 500), (23, 1495), (1, 25_000))
    ]


@pytest.mark.parametrize("folder", ["süß & neu", "..", "-x-", "a" * 300])
def test_every_folder_gives_a_name_that_a_run_may_have(folder: str) -> None:
    assert load_config({}, overrides={"run.name": run_name(folder, "sd3.5")}).config.run.name


def test_comments_stand_above_their_settings_also_inside_lists() -> None:
    text = "train:\n  steps: 1\ndatasets:\n- type: disk\n  crop: {}\n- type: memory\n  inner:\n    deep: 2\nlast: 3\n"
    comments = {
        "train.steps": "one",
        "datasets[1].type": "two",
        "datasets[1].inner.deep": "three\nlines",
        "last": "four",
    }
    expected = (
        "# head\n\ntrain:\n  # one\n  steps: 1\n\ndatasets:\n- type: disk\n  crop: {}\n# two\n- type: memory\n"
        "  inner:\n    # three\n    # lines\n    deep: 2\n\n# four\nlast: 3\n"
    )
    assert add_comments(text, comments, ["head"]) == expected


def test_messages_name_options_for_the_parameters_that_init_uses() -> None:
    assert {"family", "machine"} <= OPTION_BY_PARAMETER.keys()
