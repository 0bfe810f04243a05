"""Packs as shards for Energon: what lies in them, and in which order; ms-swift's: integration/test_pack_carriers.py."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from plans import size_and_plan

from refusals import refused
from trimtab.adapters.data_files import PacksInOrder, read_planned, write_energon_packs
from trimtab.errors import PlanError, SampleError
from trimtab.samples.rows import read_conversation

pytest.importorskip("PIL", reason="the demo draws its data set: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo builds a tokenizer: pip install 'trimtab[data]'")


LIMITS = {"max_pixels": 501760, "max_tokens": 5000, "max_patches": 16384}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trimtab.demo import draw_dataset

    return draw_dataset(tmp_path_factory.mktemp("drawn"), num_samples=60) / "data.jsonl"


@pytest.fixture(scope="module")
def plan(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return size_and_plan([drawn], tmp_path_factory.mktemp("plan") / "plan", **LIMITS)


def ids_of(planned: PacksInOrder, place: int) -> list[str]:
    pack = planned.order[place]
    rows = planned.packing.indices[planned.packing.offsets[pack] : planned.packing.offsets[pack + 1]]
    return [planned.samples.sample_id(row) for row in rows.tolist()]


def read_shards(folder: Path) -> Iterator[dict[str, bytes]]:
    """The samples of all shards as Energon takes them: members of one key, one after the other."""
    key, found = "", dict[str, bytes]()
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                stem, _, name = member.name.partition(".")
                if stem != key and found:
                    yield found
                    found = {}
                content = tar.extractfile(member)
                assert content is not None
                key, found[name] = stem, content.read()
    yield found


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_of_the_shards_is_what_a_rank_runs_in_the_plan(plan: Path, tmp_path: Path, ranks: int | None) -> None:
    planned = read_planned(plan)
    written = write_energon_packs(plan, tmp_path, ranks=ranks, packs_per_shard=3)
    samples = list(read_shards(tmp_path))
    num_packs, dp = planned.packing.num_packs, ranks or 4
    assert len(samples) == num_packs == written.num_packs > 3
    for rank, run in enumerate(np.split(np.arange(num_packs), dp)):
        for at, number in enumerate(run):
            pack = json.loads(samples[number]["json"])
            assert pack["pack"] == rank + at * dp
            assert [record["id"] for record in pack["samples"]] == ids_of(planned, pack["pack"])
            images = [name for name in samples[number] if name.startswith("img")]
            assert [name.partition(".")[0] for name in images] == [f"img{i}" for i in range(len(images))]
    folder = Path(planned.plan.inputs.data.files[0].path).parent
    one = next(s for s in samples if "img0.png" in s or "img0.jpg" in s)
    first = next(r for r in json.loads(one["json"])["samples"] if r.get("image") or r.get("images"))
    named = first.get("image") or first["images"]
    assert (folder / (named if isinstance(named, str) else named[0])).read_bytes() in one.values()


def test_shards_of_an_older_result_are_never_read_with_new_ones(plan, tmp_path, monkeypatch):
    write_energon_packs(plan, tmp_path, packs_per_shard=1)
    written = write_energon_packs(plan, tmp_path)
    assert list(tmp_path.glob("*.tar")) == [path for path in written.files if path.suffix == ".tar"]
    assert (tmp_path / ".nv-meta" / "dataset.yaml").is_file()
    monkeypatch.setattr("trimtab.adapters.data_files._members", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_energon_packs(plan, tmp_path)
    assert not (tmp_path / ".nv-meta" / "dataset.yaml").exists(), "Energon would read what is there"


def test_a_new_export_leaves_no_index_of_the_older_shards(plan: Path, tmp_path: Path) -> None:
    write_energon_packs(plan, tmp_path, packs_per_shard=1)
    meta, shards = tmp_path / ".nv-meta", sorted(tmp_path.glob("*.tar"))
    index = [meta / name for name in (".info.json", ".info.yaml", "index.sqlite", "index.uuid", "split.yaml")]
    index += [shard.with_name(f"{shard.name}.idx") for shard in shards]
    others = [tmp_path / "notes.txt", meta / "notes.txt"]
    for file in index + others:
        file.write_text("of the older shards", encoding="utf-8")
    written = write_energon_packs(plan, tmp_path)
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*written.files, *others}


def test_ranks_that_do_not_divide_the_packs_are_refused(plan: Path, tmp_path: Path) -> None:
    num_packs = read_planned(plan).packing.num_packs
    with refused(PlanError, num_packs, num_packs - 1):
        write_energon_packs(plan, tmp_path, ranks=num_packs - 1)


def test_a_video_is_refused_by_name(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = {"video": "a.mp4", "conversations": [{"from": "human", "value": "<video>"}]}
    monkeypatch.setattr("trimtab.adapters.data_files.read_conversation", lambda _, **__: read_conversation(clip))
    with refused(SampleError):
        write_energon_packs(plan, tmp_path / "packs")
