"""What `supertuner init` chooses for known machines: every file that it writes fits by its own forecast.

`docs/init.md` shows the table. Forecasts of all models take minutes: by `make torture`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from supertuner.api.forecasting import estimate
from supertuner.config.sources.load import load_config
from supertuner.core.errors import TrainError
from supertuner.models.published_models import PUBLISHED
from supertuner.sinks.console import ConsoleSink
from supertuner.tools.init.run_init import InitRequest, run_init
from tests.tools.test_models_command import compute_weights

MACHINES = ("gh200-96", "gb200", "gb10", "h100-80-pcie", "rtx-4090")
PRESETS: dict[str, tuple[str, ...]] = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": ("1", "2", "1", "1+c", ""),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ("4", "4", "4", "4", "1-s"),
    "black-forest-labs/FLUX.1-dev": ("2", "4", "2", "1", "1+c+8-s"),
    "Qwen/Qwen-Image": ("1", "2", "1", "1", "1+c+8-s"),
    "Qwen/Qwen-Image-Edit": ("1+c", "1", "1+c", "1+c", ""),
    "stabilityai/stable-diffusion-3.5-medium": ("4", "4", "4", "4", "1"),
    "stabilityai/stable-diffusion-xl-base-1.0": ("4", "4", "4", "4", "2"),
}
"""Model → for each machine: batch size; "+c": checkpointing, "+8": 8-bit weights, "-s": no samples; "": refused."""
PAGE = Path(__file__).resolve().parents[2] / "docs/init.md"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """260 pictures of 1024×1024: one file and 259 links to it."""
    folder = tmp_path_factory.mktemp("presets") / "samples"
    folder.mkdir()
    Image.new("RGB", (1024, 1024), "orange").save(folder / "000.jpg")
    (folder / "000.txt").write_text("an orange square")
    for number in range(1, 260):
        os.link(folder / "000.jpg", folder / f"{number:03d}.jpg")
    return folder


def preset(samples: Path, model: str, machine: str, *sets: str) -> str:
    """What `init` chooses, as in `PRESETS`. The file that it writes is loaded and forecast again."""
    out = samples.parent / f"{model.replace('/', '-')}-{machine}.yaml"
    family = PUBLISHED[model].family if model in PUBLISHED else "wan2.2"
    if model in PUBLISHED and PUBLISHED[model].task == "image editing":
        sets = (*sets, f"datasets[0].conditioning_dir={samples}")
    sets = (*sets, f"run.output_dir={samples.parent / 'runs'}")
    try:
        with ConsoleSink() as console:
            run_init(InitRequest(family, samples, machine, out, model, None, sets), console)
    except TrainError as error:
        assert "fit" in str(error) and not out.exists()
        return ""
    loaded = load_config(out)
    assert estimate(loaded, machine).fits
    config = loaded.config
    has_samples = config.validation.at_end or config.validation.every_steps is not None
    return (
        str(config.train.batch_size)
        + ("+c" if config.train.gradient_checkpointing else "")
        + ("+8" if config.model.base_weights == "int8" else "")
        + ("" if has_samples else "-s")
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_a_tiny_model_gets_the_best_settings_on_every_machine(samples: Path, machine: str) -> None:
    assert preset(samples, "tiny", machine, "datasets[0].resolution=64") == "4"


def test_a_model_of_full_size_fits_a_small_card_with_the_chosen_settings(samples: Path) -> None:
    model = "stabilityai/stable-diffusion-3.5-medium"
    assert preset(samples, model, "rtx-4090") == PRESETS[model][MACHINES.index("rtx-4090")]


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_fits_by_its_own_forecast(samples: Path, model: str) -> None:
    assert tuple(preset(samples, model, machine) for machine in MACHINES) == PRESETS[model]


@pytest.mark.torture
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_size_of_the_table_is_that_of_the_model(name: str) -> None:
    assert compute_weights(name) == PUBLISHED[name].weights


def table_row(model: str) -> str:
    """The row of a model in the page's table."""
    words = {"+c": ", checkpointing", "+8": ", 8-bit weights", "-s": ", no samples"}
    cells = []
    for choice in PRESETS[model]:
        for short, text in words.items():
            choice = choice.replace(short, text)
        cells.append(choice or "does not fit")
    return f"| {model} | {' | '.join(cells)} |"


def test_the_page_shows_the_presets() -> None:
    page = PAGE.read_text()
    assert [row for row in map(table_row, PRESETS) if row not in page] == []
