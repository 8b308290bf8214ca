"""Reference images of editing models: found by name, of one size per bucket, with keys that depend on their bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from supertuner.config.settings.data import DatasetSettings
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.types import MediaKind
from supertuner.data.corpus.reference_images import ReferenceImages, find_reference_images
from supertuner.data.ordering.bucket_members import BucketMembers
from supertuner.data.ordering.buckets import Bucket


class NamedSamples:
    """The part of SampleCollection that reference images use."""

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, i: int) -> str:
        return self._keys[i]


WIDE, SQUARE = Bucket(MediaKind.IMAGE, 96, 48), Bucket(MediaKind.IMAGE, 64, 64)
MEMBERS = BucketMembers((WIDE, SQUARE), np.array([0, 1, 2]), np.array([1, 0], np.uint32), np.zeros(0, np.uint32))
"""Sample 1 is wide, sample 0 square."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    Image.new("RGB", (120, 100), "red").save(tmp_path / "a.png")
    left = Image.new("RGB", (100, 100), "blue")
    left.paste((0, 255, 0), (0, 25, 100, 75))
    left.save(tmp_path / "deep" / "b.png")
    return tmp_path


def references_in(folder: Path, **settings: object) -> ReferenceImages:
    dataset = DatasetSettings.model_validate(
        {"id": "pairs", "conditioning_dir": folder, "conditioning_resolution": 64, **settings}, strict=False
    )
    references = find_reference_images(dataset, NamedSamples("a", "deep/b"), MEMBERS)  # type: ignore[arg-type]
    assert references is not None
    return references


def test_a_dataset_without_conditioning_dir_has_no_references() -> None:
    assert find_reference_images(DatasetSettings(id="x"), NamedSamples("a"), MEMBERS) is None  # type: ignore[arg-type]


def test_references_are_found_by_name_and_have_the_bucket_s_aspect_ratio(folder: Path) -> None:
    references = references_in(folder)
    assert tuple(references.load_image(0).shape) == (3, 64, 64)
    wide = references.load_image(1)
    assert tuple(wide.shape) == (3, 32, 96), "the area of 64×64, the aspect ratio of 96×48, sides multiples of 32"
    assert wide.is_contiguous() and wide[1].float().mean() > 200, "cropped above and below"
    assert references.image_size(WIDE) == (96, 32) and references.image_size(SQUARE) == (64, 64)


def test_sizes_of_a_megapixel_equal_those_of_the_diffusers_pipeline(folder: Path) -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    references = references_in(folder, conditioning_resolution=1024)
    for width, height in ((1024, 1024), (1344, 768), (832, 1216), (640, 1536)):
        theirs = calculate_dimensions(1024 * 1024, width / height)
        assert references.image_size(Bucket(MediaKind.IMAGE, width, height)) == tuple(map(int, theirs[:2]))


def test_the_cache_key_depends_on_bytes_size_and_filter_only(folder: Path) -> None:
    keys = [
        references_in(folder).cache_key_bytes(0),
        references_in(folder).cache_key_bytes(1),
        references_in(folder, conditioning_resolution=96).cache_key_bytes(0),
    ]
    keys.append(references_in(folder, resize_filter="area").cache_key_bytes(0))
    (folder / "a.png").rename(folder / "other.png")
    Image.new("RGB", (120, 100), "red").save(folder / "a.png")
    assert references_in(folder).cache_key_bytes(0) == keys[0], "the same bytes in another file"
    Image.new("RGB", (120, 100), "blue").save(folder / "a.png")
    keys.append(references_in(folder).cache_key_bytes(0))
    assert len(set(keys)) == 5


def test_a_sample_without_a_reference_is_refused_by_name(folder: Path) -> None:
    (folder / "deep" / "b.png").unlink()
    with pytest.raises(SourceError, match=r"conditioning_dir: 1 of 2 samples have no image in .*deep/b"):
        references_in(folder)


def test_a_missing_folder_is_refused(folder: Path) -> None:
    with pytest.raises(SourceError, match="is not a folder"):
        references_in(folder / "none")


def test_a_reference_that_does_not_decode_is_named(folder: Path) -> None:
    references = references_in(folder)
    (folder / "a.png").write_bytes(b"not an image")
    with pytest.raises(BrokenMediaError, match=r"reference image .*a\.png"):
        references.load_image(0)


def test_a_truncated_reference_or_a_file_of_another_type_is_refused_before_the_run(folder: Path) -> None:
    complete = (folder / "a.png").read_bytes()
    for content, message in ((complete[:-20], "truncated"), (b"not an image", "wrong type")):
        (folder / "a.png").write_bytes(content)
        with pytest.raises(
            SourceError, match=rf"conditioning_dir: .*a\.png: {message}.*; repair it, or remove its sample"
        ):
            references_in(folder)
