"""Sizing by shards on Ray Data: joined to the bytes of one pass; a local Ray with two workers. Needs ray[data] 2.60.

pip install 'ray[data]==2.60.0'
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.samples.table import SizingResult, save_sizing

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="sizing past one machine runs on Ray: pip install 'ray[data]==2.60.0'")
    pytest.importorskip("ray.data", reason="sizing past one machine runs on Ray: pip install 'ray[data]==2.60.0'")
pytest.importorskip("PIL", reason="the demo draws its data set: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo builds a tokenizer: pip install 'trimtab[data]'")


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def saved(result: SizingResult, path: Path) -> bytes:
    save_sizing(result, path)
    return path.read_bytes()


def test_shards_on_ray_are_joined_to_the_bytes_of_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import size_by_shard
    from trimtab.demo.draw import draw_dataset

    ray.cloudpickle.register_pickle_by_value(size_by_shard)
    data, kept = str(draw_dataset(tmp_path / "drawn", num_samples=300).data), str(tmp_path / "kept")
    told = size_by_shard.run_on_ray([{"data": data, "kept": kept, "shard": number} for number in range(1, 5)])
    assert sum(int(row["told"].split()[-4]) for row in told) == len(os.listdir(kept)) > 0
    whole = size_by_shard.size(data, str(tmp_path / "other"))
    assert saved(size_by_shard.size(data, kept), tmp_path / "a.npz") == saved(whole, tmp_path / "b.npz")
