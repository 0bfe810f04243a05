"""Sizing on Ray Data against the local engine: the same bytes; a local Ray with two workers. Needs ray[data] 2.60.

pip install 'ray[data]==2.60.0'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trimtab.errors import SampleError
from trimtab.models.describe import describe
from trimtab.samples import records
from trimtab.samples.size import size_samples
from trimtab.samples.table import SizingResult, save_sizing

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="sizing past one machine runs on Ray: pip install 'ray[data]==2.60.0'")
    pytest.importorskip("ray.data", reason="sizing past one machine runs on Ray: pip install 'ray[data]==2.60.0'")
    from trimtab.adapters.ray_data import count_cpus, map_on_ray
pytest.importorskip("PIL", reason="the demo draws its data set: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo builds a tokenizer: pip install 'trimtab[data]'")


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Two workers; the tests' own folder of functions goes to them by value."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn data set in two files, one of them a JSON list, with samples that cannot be planned."""
    from trimtab.demo.draw import draw_dataset

    folder = draw_dataset(tmp_path_factory.mktemp("drawn"), num_samples=300).folder
    lines = (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()
    broken = ["{not json", "", json.dumps({"id": "no image", "image": "gone.png", "conversations": []})]
    (folder / "data.jsonl").write_text("\n".join([*lines[:90], *broken, *lines[90:200]]) + "\n", encoding="utf-8")
    (folder / "more.json").write_text(json.dumps([json.loads(line) for line in lines[200:]]), encoding="utf-8")
    return folder


def size(folder: Path, **options: object) -> SizingResult:
    model = describe("Qwen2.5-VL-7B")
    return size_samples(
        [folder / "data.jsonl", folder / "more.json"],
        image_rule=model.image_rule,
        tokenizer=folder / "tokenizer.json",
        on_bad="skip",
        workers=2,
        **options,  # type: ignore[arg-type]
    )


def saved(result: SizingResult, path: Path) -> bytes:
    save_sizing(result, path)
    return path.read_bytes()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(records, "CHUNK_RECORDS", 7)


@pytest.mark.usefixtures("small_chunks")
def test_two_ray_workers_give_the_bytes_of_the_local_engine(drawn: Path, tmp_path: Path) -> None:
    assert len(list(records.list_chunks(drawn / "data.jsonl"))) > 10
    seen: list[tuple[int, int]] = []
    there = size(drawn, map_chunks=map_on_ray, progress=lambda done, total: seen.append((done, total)))
    here = size(drawn)
    assert len(here.bad) == 2
    assert saved(there, tmp_path / "ray.npz") == saved(here, tmp_path / "local.npz")
    assert seen == sorted(seen)
    assert 0.999 < seen[-1][0] / seen[-1][1] <= 1.0


@pytest.mark.usefixtures("small_chunks")
def test_a_pass_begun_on_one_engine_goes_on_on_the_other(drawn: Path, tmp_path: Path) -> None:
    there = size(drawn, map_chunks=map_on_ray, resume_dir=tmp_path / "resume")
    kept = sorted((tmp_path / "resume").iterdir())
    assert len(kept) > 20
    times = [file.stat().st_mtime_ns for file in kept]
    for file in kept[::3]:
        file.unlink()
    here = size(drawn, resume_dir=tmp_path / "resume")
    assert sorted((tmp_path / "resume").iterdir()) == kept
    assert [f.stat().st_mtime_ns for i, f in enumerate(kept) if i % 3] == [t for i, t in enumerate(times) if i % 3]
    assert saved(there, tmp_path / "ray.npz") == saved(here, tmp_path / "local.npz")


def test_results_come_in_the_order_of_the_tasks_whichever_is_ready_first() -> None:
    def make_work() -> Callable[[int], int]:
        def work(task: int) -> int:
            time.sleep(0.3 if task == 0 else 0)
            return task * task

        return work

    reported: list[int] = []
    results = list(map_on_ray(make_work, range(20), 2, lambda task, _result: reported.append(task)))
    assert results == [task * task for task in range(20)]
    assert sorted(reported) == list(range(20))
    assert list(map_on_ray(make_work, (), 2, lambda _task, _result: None)) == []


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    def make_work() -> Callable[[int], int]:
        def work(task: int) -> int:
            if task == 3:
                raise SampleError("row 3 is odd: correct it")
            return task

        return work

    with pytest.raises(SampleError, match=r"^row 3 is odd: correct it$"):
        list(map_on_ray(make_work, range(8), 2, lambda _task, _result: None))


def test_the_tasks_of_a_killed_worker_are_done_again(tmp_path: Path) -> None:
    def make_work() -> Callable[[int], int]:
        def work(task: int) -> int:
            died = tmp_path / "died"
            if task == 5 and not died.exists():
                died.touch()
                os._exit(9)
            return task

        return work

    assert list(map_on_ray(make_work, range(12), 2, lambda _task, _result: None)) == list(range(12))
    assert (tmp_path / "died").exists()


def test_a_task_nested_too_deeply_for_pickle_is_done_here() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    def make_work() -> Callable[[object], str]:
        return lambda task: type(task).__name__

    assert list(map_on_ray(make_work, [1, deep, "text"], 2, lambda _task, _result: None)) == ["int", "list", "str"]


def test_the_cluster_counts_its_own_cpus() -> None:
    assert count_cpus() == 2


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab", *map(str, words)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_command_line_plans_the_same_bytes_on_ray(drawn: Path, tmp_path: Path) -> None:
    words = ["plan", "Qwen2.5-VL-7B", drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json"]
    words += ["--cluster", "8xA100-80GB", "--pp", "2", "--num-microbatches", "4", "--on-bad", "skip"]
    for name, engine in (("local", ()), ("ray", ("--engine", "ray", "--workers", "2"))):
        result = run(*words, *engine, "--out", tmp_path / name, RAY_ADDRESS="")
        assert result.returncode == 0, result.stderr
    for name in ("plan.yaml", "samples.npz", "offsets.npy", "indices.npy", "schedule.npy"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name


def test_a_cluster_that_does_not_answer_is_named(drawn: Path) -> None:
    words = ["size", drawn / "data.jsonl", "--model", "Qwen2.5-VL-7B", "--engine", "ray"]
    result = run(*words, RAY_ADDRESS="127.0.0.1:1")
    assert result.returncode == 2
    assert "no Ray answers at RAY_ADDRESS 127.0.0.1:1" in result.stderr
    assert "start one with `ray start --head`, correct RAY_ADDRESS, or use the local engine" in result.stderr
    assert "Traceback" not in result.stderr


def test_shards_on_ray_are_joined_to_the_bytes_of_one_pass(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import size_by_shard

    ray.cloudpickle.register_pickle_by_value(size_by_shard)
    data, kept = str(drawn / "data.jsonl"), str(tmp_path / "kept")
    told = size_by_shard.run_on_ray([{"data": data, "kept": kept, "shard": number} for number in range(1, 5)])
    assert sum(int(row["told"].split()[-4]) for row in told) == len(os.listdir(kept)) > 0
    whole = size_by_shard.size(data, str(tmp_path / "other"))
    assert saved(size_by_shard.size(data, kept), tmp_path / "a.npz") == saved(whole, tmp_path / "b.npz")
