"""The packs of a plan through the hosts' own data code: Megatron-Energon's loader and ms-swift's packing data set.

pip install megatron-energon==7.4.1
pip install --no-deps ms-swift==4.6.0
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from test_host_packs import drawn, ids_of, plan  # noqa: F401  # fixtures

from trimtab.adapters.data_files import read_planned, write_energon_packs, write_swift_packs

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_energon_gives_every_rank_its_packs_in_the_order_of_the_plan(
    plan: Path,  # noqa: F811
    tmp_path: Path,
    num_workers: int,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        energon = pytest.importorskip("megatron.energon", reason="needs megatron-energon 7.4.1", exc_type=ImportError)
    written = write_energon_packs(plan, tmp_path, packs_per_shard=5)
    words = ["prepare", "--non-interactive", "--split-parts", "train:.*", "--skip-dataset-yaml", "--num-workers", "1"]
    command = [sys.executable, "-c", "from megatron.energon.cli.main import main; main()", *words, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-1000:]

    class Encoder(energon.DefaultTaskEncoder):  # type: ignore[name-defined,misc]
        cookers: ClassVar = [energon.Cooker(energon.stateless(lambda sample: sample))]

        def encode_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
            return sample

        def batch(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return samples

        def encode_batch(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return batch

    planned = read_planned(plan)
    dp = planned.schedule.table.shape[1]
    for rank in range(dp):
        data = energon.get_train_dataset(
            tmp_path,
            worker_config=energon.WorkerConfig(rank=rank, world_size=dp, num_workers=num_workers),
            batch_size=1,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            shuffle_over_epochs_multiplier=None,
            parallel_shard_iters=1,
            task_encoder=Encoder(),
            repeat=False,
        )
        loader = energon.get_loader(data)
        found = [json.loads(b["json"]) if isinstance(b["json"], bytes) else b["json"] for (b,) in loader]
        assert [pack["pack"] for pack in found] == list(range(rank, written.num_packs, dp))
        for pack in found:
            assert [record["id"] for record in pack["samples"]] == ids_of(planned, pack["pack"])


def swift_packing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """ms-swift's own module, without the packages that its others import."""
    try:
        files = importlib.metadata.files("ms-swift") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs ms-swift 4.6.0: pip install --no-deps ms-swift==4.6.0")
    (path,) = [file.locate() for file in files if str(file) == "swift/dataset/packing.py"]
    pytest.importorskip("torch")
    stubs = {name: ModuleType(name) for name in ("swift", "swift.dataset", "swift.template", "swift.utils")}
    stubs["swift.template"].MaxLengthError = ValueError  # type: ignore[attr-defined]
    utils = stubs["swift.utils"]
    utils.get_logger, utils.is_dist, utils.is_master = lambda: None, lambda: False, lambda: True  # type: ignore[attr-defined]
    utils.split_list = lambda values, _num: [values]  # type: ignore[attr-defined]
    utils.get_external_files, utils.import_external_file = list, exec  # type: ignore[attr-defined]
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    spec = importlib.util.spec_from_file_location("swift.dataset.packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "swift.dataset.packing", module)
    stubs["swift"].dataset, stubs["swift.dataset"].packing = stubs["swift.dataset"], module  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
    return module


class Lengths:
    """What ms-swift's packing asks of a data set."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, key: Any) -> Any:
        return self._lengths if key == "lengths" else key


def test_ms_swifts_packing_data_set_holds_the_planned_packs(
    plan: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing = swift_packing(monkeypatch)
    packing.PackingDataset.PACKING_BATCH_SIZE = 7
    planned = read_planned(plan)
    written = write_swift_packs(plan, tmp_path)
    ids = [json.loads(line)["id"] for line in (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = {planned.samples.sample_id(row): int(n) for row, n in enumerate(planned.samples.num_tokens)}
    lengths = Lengths([tokens[name] for name in ids])

    def packs() -> list[list[str]]:
        made = packing.PackingDataset(
            ModuleType("template"), lengths, packing_length=5000, packing_strategy="sequential"
        )
        return [[ids[number] for number in made[i]] for i in range(len(made))]

    meant = [ids_of(planned, place) for place in range(written.num_packs)]
    assert packs() != meant, "its own packing fills up by tokens alone"
    exec((tmp_path / "planned_packs.py").read_text(encoding="utf-8"), {})
    assert packs() == meant
