"""The picture of a forecast shows its figures: classes in their colours, the limit at its height, every peak."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from supertuner.core.types import GIB, MIB
from supertuner.tools.estimate_picture import (
    COLOURS,
    LEFT,
    LIMIT_COLOUR,
    RIGHT,
    STEP_HEIGHT,
    WHAT_IF_HEIGHT,
    WIDTH,
    PassBand,
    StepMemoryChart,
    WhatIfBar,
    WhatIfChart,
    render_estimate,
    stacking_order,
)

CHART = slice(LEFT + 4, WIDTH - RIGHT - 4)


def a_chart(limit_gib: float | None = 96.0, scale: float = GIB, spike: int | None = None) -> StepMemoryChart:
    moments = 5000
    rising = np.concatenate([np.linspace(0, 40, moments // 2), np.linspace(40, 0, moments // 2)])
    temporary = np.zeros(moments)
    if spike is not None:
        temporary[spike] = 30.0
    return StepMemoryChart(
        title="train model",
        note="by hand",
        edges=np.linspace(0.0, 50.0, moments + 1),
        bytes_by_class={
            "frozen weights": np.full(moments, 26.0 * scale),
            "activations": rising * scale,
            "temporaries": temporary * scale,
        },
        passes=(PassBand("forward", 0, 25), PassBand("backward", 25, 49.9), PassBand("update", 49.9, 50)),
        unit="seconds, modelled",
        limit_bytes=None if limit_gib is None else int(limit_gib * GIB),
        limit_name="GH200 96 GB",
    )


def drawn(chart: StepMemoryChart | None, what_ifs: tuple[WhatIfChart, ...] = ()) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(render_estimate(chart, what_ifs))).convert("RGB")).astype(int)


def where(picture: np.ndarray, colour: str) -> np.ndarray:
    """Pixels of a colour, or of one very close to it: antialiasing blends edges."""
    rgb = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    found: np.ndarray = np.abs(picture - rgb).max(axis=2) < 16
    return found


def test_classes_are_stacked_in_their_colours_below_the_limit() -> None:
    picture = drawn(a_chart())
    assert picture.shape == (STEP_HEIGHT, WIDTH, 3)
    middle = picture[:, CHART]
    frozen, active, limit = (np.flatnonzero(where(middle, colour).any(axis=1)) for colour in (
        COLOURS["frozen weights"], COLOURS["activations"], LIMIT_COLOUR,
    ))  # fmt: skip
    assert frozen.max() > active.max(), "weights are below activations"
    assert limit.min() < active.min(), "the limit, 96 GiB, is above the peak, 66 GiB"


def test_a_peak_of_one_interval_in_five_thousand_is_visible() -> None:
    spike = 1234
    picture = drawn(a_chart(spike=spike))
    column = LEFT + round(spike / 5000 * (WIDTH - LEFT - RIGHT))
    near = where(picture[100:, column - 3 : column + 4], COLOURS["temporaries"])
    assert near.any()
    elsewhere = where(picture[100:, CHART], COLOURS["temporaries"])
    assert elsewhere.sum() < 40 * near.sum()


def test_a_far_limit_does_not_flatten_a_small_step() -> None:
    picture = drawn(a_chart(scale=MIB))[:, CHART]
    rows = np.flatnonzero(where(picture, COLOURS["frozen weights"]).any(axis=1))
    assert rows.max() - rows.min() > 100
    assert not where(picture, LIMIT_COLOUR)[110:].any(), "the limit is named beside the chart"


def test_an_unknown_limit_draws_no_line() -> None:
    assert not where(drawn(a_chart(limit_gib=None)), LIMIT_COLOUR).any()


def test_the_height_of_a_bar_is_proportional_to_its_bytes() -> None:
    bars = tuple(
        WhatIfBar(str(n), {"frozen weights": 20 * GIB, "activations": n * 10 * GIB}, 2.0 * n, n == 1) for n in (1, 4)
    )
    picture = drawn(None, (WhatIfChart("What if", bars, 96 * GIB, "GH200 96 GB"),))
    assert picture.shape == (WHAT_IF_HEIGHT, WIDTH, 3)
    half = (LEFT + WIDTH - RIGHT) // 2
    colours = where(picture, COLOURS["frozen weights"]) | where(picture, COLOURS["activations"])
    heights = [np.flatnonzero(colours[:, side].any(axis=1)) for side in (slice(LEFT, half), slice(half, WIDTH - RIGHT))]
    small, large = (rows.max() - rows.min() for rows in heights)
    assert large / small == pytest.approx(2.0, rel=0.05), "60 GiB and 30 GiB"


@pytest.mark.parametrize("values", [[], [{}], [{"unknown class": 1}], [{"activations": 0}], [{"activations": 1 << 50}]])
def test_empty_unknown_and_huge_bars_can_be_drawn(values: list[dict[str, int]]) -> None:
    bars = tuple(WhatIfBar("x" * 200, value, None, note="not known") for value in values)
    assert drawn(a_chart(), (WhatIfChart("t" * 500, bars, None, "n"),)).shape[0] == STEP_HEIGHT + WHAT_IF_HEIGHT


def test_classes_without_a_colour_are_stacked_last() -> None:
    assert stacking_order(["zebra", "activations", "frozen weights"]) == ["frozen weights", "activations", "zebra"]
