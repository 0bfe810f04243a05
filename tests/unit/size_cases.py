"""What tests of sizing size: a folder of three images and a tokenizer. Needs the [data] extra."""

import pytest

pytest.importorskip("tokenizers", reason="the [data] extra is not installed")
pytest.importorskip("jinja2", reason="the [data] extra is not installed")
pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="the [data] extra is not installed")

import numpy as np  # noqa: E402
from sample_sets import PixelRule, png, talk, write_tokenizer  # noqa: E402

from trimtab.samples.size import size_samples  # noqa: E402

COLUMNS = ("num_images", "num_patches", "num_tokens", "patches_sq", "patches_windowed")
TALK = talk("<image> and <image>?", "the cat")
GOOD = {"conversations": talk("what?", "a cat")}


def fill_folder(path):
    """Three images and a tokenizer."""
    (path / "a.png").write_bytes(png(40, 20))
    (path / "b.png").write_bytes(png(30, 30))
    (path / "sub").mkdir()
    (path / "sub" / "c.png").write_bytes(png(100, 100))
    write_tokenizer(path / "model")
    return path


def size(folder, *data, **options):
    options = {"tokenizer": folder / "model", "image_rule": PixelRule(), **options}
    return size_samples([folder / name for name in data], **options)


def rows_of(result):
    return np.stack([getattr(result.table, name) for name in COLUMNS], axis=1).tolist()


class CoarseWhenMany(PixelRule):
    def in_sample(self, num_images):
        return self if num_images == 1 else PixelRule(cell=1000)
