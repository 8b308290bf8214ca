"""Pictures that samples were made from: found by name, of one size in a bucket, and known by their bytes."""

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
    """As much of a dataset as originals look at."""

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
    chosen = DatasetSettings.model_validate(
        {"id": "pairs", "conditioning_dir": folder, "conditioning_resolution": 64, **settings}, strict=False
    )
    found = find_reference_images(chosen, NamedSamples("a", "deep/b"), MEMBERS)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_dataset_without_such_a_folder_has_none() -> None:
    assert find_reference_images(DatasetSettings(id="x"), NamedSamples("a"), MEMBERS) is None  # type: ignore[arg-type]


def test_originals_are_found_by_name_and_have_the_ratio_of_the_bucket(folder: Path) -> None:
    originals = references_in(folder)
    assert tuple(originals.load_image(0).shape) == (3, 64, 64)
    wide = originals.load_image(1)
    assert tuple(wide.shape) == (3, 32, 96), "the area of 64×64, the ratio of 96×48, sides multiples of 32"
    assert wide.is_contiguous() and wide[1].float().mean() > 200, "what does not fit is cut off above and below"
    assert originals.image_size(WIDE) == (96, 32) and originals.image_size(SQUARE) == (64, 64)


def test_a_megapixel_has_the_sizes_of_the_pipeline(folder: Path) -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    originals = references_in(folder, conditioning_resolution=1024)
    for width, height in ((1024, 1024), (1344, 768), (832, 1216), (640, 1536)):
        theirs = calculate_dimensions(1024 * 1024, width / height)
        assert originals.image_size(Bucket(MediaKind.IMAGE, width, height)) == tuple(map(int, theirs[:2]))


def test_a_mark_changes_with_bytes_size_and_filter_and_with_nothing_else(folder: Path) -> None:
    marks = [
        references_in(folder).cache_key_bytes(0),
        references_in(folder).cache_key_bytes(1),
        references_in(folder, conditioning_resolution=96).cache_key_bytes(0),
    ]
    marks.append(references_in(folder, resize_filter="area").cache_key_bytes(0))
    (folder / "a.png").rename(folder / "other.png")
    Image.new("RGB", (120, 100), "red").save(folder / "a.png")
    assert references_in(folder).cache_key_bytes(0) == marks[0], "the same bytes in another file"
    Image.new("RGB", (120, 100), "blue").save(folder / "a.png")
    marks.append(references_in(folder).cache_key_bytes(0))
    assert len(set(marks)) == 5


def test_a_sample_without_its_original_is_refused_by_name(folder: Path) -> None:
    (folder / "deep" / "b.png").unlink()
    with pytest.raises(SourceError, match=r"conditioning_dir: 1 of 2 samples have no picture in .*deep/b"):
        references_in(folder)


def test_a_folder_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(SourceError, match="is not a folder"):
        references_in(folder / "none")


def test_an_original_that_does_not_decode_is_named(folder: Path) -> None:
    originals = references_in(folder)
    (folder / "a.png").write_bytes(b"no picture")
    with pytest.raises(BrokenMediaError, match=r"original .*a\.png"):
        originals.load_image(0)


def test_an_original_that_is_cut_off_or_no_picture_is_refused_before_the_run(folder: Path) -> None:
    whole = (folder / "a.png").read_bytes()
    for content, says in ((whole[:-20], "truncated"), (b"no picture", "wrong type")):
        (folder / "a.png").write_bytes(content)
        with pytest.raises(SourceError, match=rf"conditioning_dir: .*a\.png: {says}.*; mend it, or remove its sample"):
            references_in(folder)
