"""Creates a small captioned dataset of drawn shapes and synthesized tones. Equal seeds give equal files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from supertuner.tools.shape_drawing import SHAPE_NAMES, draw_shape

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "blue": (38, 99, 214),
    "yellow": (240, 190, 30),
    "purple": (142, 68, 173),
    "orange": (230, 120, 30),
}
BACKGROUNDS = {"white": (245, 245, 240), "grey": (176, 182, 190), "pale blue": (200, 220, 240), "dark": (44, 48, 58)}
PICTURE_SIZES = ((640, 640), (768, 512), (512, 768), (896, 512), (700, 500))
VIDEO_SIZES = ((320, 192), (192, 320))
TONES = {"low": 196.0, "middle": 392.0, "high": 784.0}
WAVES = ("sine", "square", "sawtooth")
VIDEO_FPS, AUDIO_RATE = 16, 24_000
PictureLook: TypeAlias = tuple[str, str, str]
"""(colour, shape, background)."""
_SUPERSAMPLING = 3
"""Pictures are drawn this many times larger and then reduced."""


@dataclass(frozen=True, slots=True)
class SampleData:
    config: Path
    """A configuration with the datasets."""
    images: int
    videos: int
    sounds: int


def make_sample_data(folder: Path, *, images: int = 30, videos: int = 6, sounds: int = 6, seed: int = 0) -> SampleData:
    """Write that many images, videos and audio files with captions below `folder`, and a configuration for them."""
    random = Random(seed)
    looks = list(product(COLOURS, SHAPE_NAMES, BACKGROUNDS))
    random.shuffle(looks)
    for name in ("images", "videos", "sounds"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(images):
        _write_picture(folder / "images", number, looks[number % len(looks)], random)
    for number in range(videos):
        _write_video(folder / "videos", number, looks[-1 - number % len(looks)], random)
    for number in range(sounds):
        _write_sound(folder / "sounds", number, random)
    config = folder / "config.json"
    config.write_text(json.dumps(_dataset_config(), indent=2) + "\n")
    return SampleData(config, images, videos, sounds)


def draw_picture(size: tuple[int, int], look: PictureLook, centre: tuple[float, float], radius: float) -> Image:
    """A shape on a background. Centre and radius are shares of the sides and of
    the shorter side."""
    colour, shape, ground = look
    return draw_shape(size, shape, COLOURS[colour], BACKGROUNDS[ground], centre, radius, _SUPERSAMPLING)


def synthesize_tone(wave: str, hertz: float, seconds: float) -> NDArray[np.float32]:
    """A stereo tone, plucked twice per second, that moves from left to right; shape (samples, 2)."""
    time = np.arange(round(seconds * AUDIO_RATE)) / AUDIO_RATE
    phase = (time * hertz) % 1
    sine, square = np.sin(2 * np.pi * phase), np.where(phase < 0.5, 0.6, -0.6)
    shape = {"sine": sine, "square": square, "sawtooth": 1.2 * phase - 0.6}
    loudness = np.minimum((time % 0.5) / 0.02, 1) * np.exp(-2.5 * (time % 0.5))
    right = np.linspace(0.2, 0.8, len(time))
    stereo = np.column_stack([1 - right, right]) * (1.2 * shape[wave] * loudness)[:, None]
    samples: NDArray[np.float32] = stereo.astype(np.float32)
    return samples


def _write_picture(folder: Path, number: int, look: PictureLook, random: Random) -> None:
    centre = (random.uniform(0.35, 0.65), random.uniform(0.35, 0.65))
    picture = draw_picture(PICTURE_SIZES[number % len(PICTURE_SIZES)], look, centre, random.uniform(0.2, 0.32))
    kind = ("jpg", "png", "webp")[number % 3]
    picture.save(folder / f"{number:03d}.{kind}", quality=92)  # ignored for PNG
    colour, shape, ground = look
    tags = f"{shape}, {colour}, flat drawing"
    _write_caption(folder, number, f"{_with_article(colour)} {shape} on a {ground} ground, {tags}")


def _write_video(folder: Path, number: int, look: PictureLook, random: Random) -> None:
    import av

    size = VIDEO_SIZES[number % len(VIDEO_SIZES)]
    count = (20, 37)[number % 4 // 2]
    rightwards = random.random() < 0.5
    with av.open(folder / f"{number:03d}.mp4", mode="w") as container:
        codec = "libx264" if "libx264" in av.codec.codecs_available else "mpeg4"
        stream = container.add_stream(codec, rate=VIDEO_FPS)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for frame in range(count):
            fraction = frame / (count - 1)
            x = 0.2 + 0.6 * (fraction if rightwards else 1 - fraction)
            picture = draw_picture(size, look, (x, 0.5 + 0.15 * float(np.sin(2 * np.pi * fraction))), 0.22)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")))
        container.mux(stream.encode(None))
    colour, shape, ground = look
    where = "right" if rightwards else "left"
    _write_caption(folder, number, f"{_with_article(colour)} {shape} moves to the {where} on a {ground} ground")


def _write_sound(folder: Path, number: int, random: Random) -> None:
    import soundfile

    wave, (pitch, hertz) = WAVES[number % len(WAVES)], random.choice(sorted(TONES.items()))
    kind = ("wav", "flac")[number % 2]
    soundfile.write(folder / f"{number:03d}.{kind}", synthesize_tone(wave, hertz, 1.3 + 0.9 * (number % 3)), AUDIO_RATE)
    _write_caption(folder, number, f"a {pitch} {wave} tone, plucked")


def _with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _write_caption(folder: Path, number: int, text: str) -> None:
    (folder / f"{number:03d}.txt").write_text(text + "\n")


def _dataset_config() -> dict[str, object]:
    """Small buckets, and a little of each augmentation, so that a contact sheet shows them. Videos are not flipped,
    because their captions say "left" or "right"."""
    colour = {"flip": 0.5, "brightness": 0.1, "contrast": 0.1, "saturation": 0.2, "hue": 0.02}
    tags = {"trigger_word": "shapeworld", "shuffle_tags": True, "keep_tags": 1, "dropout": 0.1}
    audio = {"sample_rate": AUDIO_RATE, "channels": 2, "max_seconds": 3, "step_seconds": 1}
    datasets = [
        _dataset("pictures", "image", "images", resolution=256, crop="random", augment=colour, captions=tags),
        _dataset(
            "clips", "video", "videos", resolution=192, frames=[17, 33], fps=VIDEO_FPS, augment={"brightness": 0.1}
        ),
        _dataset("tones", "audio", "sounds", audio=audio),
    ]
    return {"run": {"seed": 0}, "datasets": datasets, "train": {"batch_size": 4}}


def _dataset(name: str, kind: str, folder: str, **settings: object) -> dict[str, object]:
    return {"id": name, "dataset_type": kind, "instance_data_dir": folder, **settings}
