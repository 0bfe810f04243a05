"""The selector inside Megatron-Energon's own packing data set, saved and restored on the way. Needs Energon 7.4.

pip install megatron-energon==7.4.1
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from trimtab.adapters.energon import PackSelector, SampleSize

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]  # Energon's and its dependencies' own

pytest.importorskip("torch", reason="megatron-energon needs torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    energon = pytest.importorskip(
        "megatron.energon", reason="needs Energon: pip install megatron-energon==7.4.1", exc_type=ImportError
    )
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, stateless
    from megatron.energon.errors import FatalSampleError
    from megatron.energon.flavors.base_dataset import Sample, SavableDataset

NUM_SAMPLES = 430


@dataclass
class TextSample(Sample):
    tokens: int
    patches: int


@dataclass
class Pack(Sample):
    keys: list[str]
    tokens: int
    patches: int


class Numbers(SavableDataset):  # type: ignore[misc]
    """Samples of drawn sizes that can be restored by number."""

    _savable_fields = ("_position",)

    def __init__(self, worker_config: Any, long: int | None = None) -> None:
        super().__init__(worker_config=worker_config)
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(20, 900, NUM_SAMPLES).tolist()
        self._patches = rng.integers(0, 2000, NUM_SAMPLES).tolist()
        if long is not None:
            self._tokens[long] = 5000
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._position = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return NUM_SAMPLES

    def worker_has_samples(self) -> bool:
        return True

    def can_restore_sample(self) -> bool:
        return True

    def restore_sample(self, restore_key: Any) -> TextSample:
        i = restore_key[1]
        return TextSample(
            __key__=f"shard/{i}",
            __restore_key__=("Numbers", i),
            __sources__=(),
            tokens=self._tokens[i],
            patches=self._patches[i],
        )

    def __iter__(self) -> Iterator[TextSample]:
        while self._position < NUM_SAMPLES:
            self._position += 1
            yield self.restore_sample(("Numbers", self._position - 1))

    def config(self) -> dict[str, Any]:
        return {"type": "Numbers"}


def size_of(sample: TextSample) -> SampleSize:
    return SampleSize(tokens=sample.tokens, patches=sample.patches)


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.select_samples_to_pack = PackSelector(size_of=size_of, max_patches=8000, max_tokens=4096, **options)

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> Pack:
        return Pack.derive_from(
            samples[0],
            keys=[s.__key__ for s in samples],
            tokens=sum(s.tokens for s in samples),
            patches=sum(s.patches for s in samples),
        )


def packs_of(encoder: Encoder, *, long: int | None = None) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return encoder.build_batch(Numbers(config, long), batch_size=None, packing_buffer_size=100, worker_config=config)


def run(dataset: Any, count: int | None = None) -> list[Pack]:
    config = dataset.worker_config
    config.worker_activate(sample_index=0)
    try:
        found = []
        for pack in dataset:
            found.append(pack)
            if len(found) == count:
                break
        return found
    finally:
        config.worker_deactivate()


def test_energon_hands_on_every_sample_once_within_both_limits() -> None:
    packs = run(packs_of(Encoder()))
    keys = [key for pack in packs for key in pack.keys]
    assert sorted(keys) == sorted(f"shard/{i}" for i in range(NUM_SAMPLES))
    assert max(pack.tokens for pack in packs) <= 4096
    assert max(pack.patches for pack in packs) <= 8000


def test_a_restored_stream_goes_on_with_the_same_packs() -> None:
    whole = [pack.keys for pack in run(packs_of(Encoder()))]
    stopped = packs_of(Encoder())
    first = [pack.keys for pack in run(stopped, count=7)]
    state = stopped.save_state()
    other = packs_of(Encoder())
    other.restore_state(state)
    assert first + [pack.keys for pack in run(other)] == whole


def test_an_over_long_sample_ends_the_run_or_goes_alone() -> None:
    with pytest.raises(FatalSampleError, match="failed 1 times in a row"):
        run(packs_of(Encoder(), long=150))
    packs = run(packs_of(Encoder(oversize="alone"), long=150))
    assert sorted(key for pack in packs for key in pack.keys) == sorted(f"shard/{i}" for i in range(NUM_SAMPLES))
    assert [pack.keys for pack in packs if pack.tokens > 4096] == [["shard/150"]]


def test_energon_names_the_selector_in_its_configuration() -> None:
    config = packs_of(Encoder()).config()
    assert config["pre_packer"].startswith("trimtab.adapters.energon.")
    assert config == packs_of(Encoder()).config()
