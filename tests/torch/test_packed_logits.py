"""A packed sample computes what it computes alone, in every family. Needs torch and Transformers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs tiny models")
transformers = pytest.importorskip("transformers", reason="holds the models that packs are fed to")

from tiny_packs import CASES, TinyPacks, alone, make_tiny_packs, one_thread  # noqa: E402, F401

from trimtab.runtime.collate import PackedCollator  # noqa: E402

pytestmark = pytest.mark.torch

EXACT = 1e-5  # logits are up to 5; float32 leaves about 3e-6
LARGE = 0.1


def logits_alone(packs: TinyPacks) -> torch.Tensor:
    return torch.cat([packs.model(**alone(sample)).logits[0] for sample in packs.samples])


def logits_packed(packs: TinyPacks, batch: dict[str, Any]) -> torch.Tensor:
    return packs.model(**{key: value for key, value in batch.items() if key != "labels"}).logits[0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def without_masks(batch: dict[str, Any]) -> dict[str, Any]:
    """Right positions, but nothing that tells Transformers where samples start."""
    ids = batch["position_ids"]
    rows = ids.shape[0] == 4
    plain = {**batch, "position_ids": ids[1:] if rows else torch.arange(ids.shape[1])[None]}
    return {key: value for key, value in plain.items() if key != "attention_mask"}


def without_positions(explicit: dict[str, Any]) -> dict[str, Any]:
    """Samples kept apart, but one numbering through the row."""
    length = explicit["input_ids"].shape[1]
    return {**explicit, "position_ids": torch.arange(length)[None]}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_packed_logits_equal_those_of_the_samples_alone(case, attention):
    packs = make_tiny_packs(case, attention=attention)
    expected = logits_alone(packs)
    batch = PackedCollator(packs.model.config, attention=attention)(packs.samples)
    assert batch["input_ids"].shape[0] == 1
    assert error(logits_packed(packs, batch), expected) <= EXACT

    explicit = PackedCollator(packs.model.config, attention=attention, explicit_masks=True)(packs.samples)
    assert error(logits_packed(packs, explicit), expected) <= EXACT

    assert error(logits_packed(packs, without_masks(batch)), expected) > LARGE
    if (
        batch["position_ids"].shape[0] == 4
    ):  # one-axis rotary positions are relative: a shift of a whole sample is nothing
        assert error(logits_packed(packs, without_positions(explicit)), expected) > LARGE


@pytest.mark.parametrize("case", ["qwen2_5_vl", "llava_next", "gemma3"])
@torch.no_grad()
def test_the_order_of_samples_does_not_matter(case):
    packs = make_tiny_packs(case)
    packs = TinyPacks(packs.model, packs.samples[::-1])
    batch = PackedCollator(packs.model.config)(packs.samples)
    assert error(logits_packed(packs, batch), logits_alone(packs)) <= EXACT


@pytest.mark.parametrize("neighbours", [True, False], ids=["images meet", "text between images"])
@torch.no_grad()
def test_gemma3_needs_explicit_masks(neighbours):
    """Transformers 5.23 looks its sliding layers' image blocks up by position in the sample, not in the row."""
    packs = make_tiny_packs("gemma3")
    samples = packs.samples if neighbours else [packs.samples[i] for i in (1, 0, 2, 3, 5)]
    packs = TinyPacks(packs.model, samples)
    batch = PackedCollator(packs.model.config)(samples)
    types = torch.cat([sample["token_type_ids"] for sample in samples])[None]
    own = {**{key: value for key, value in batch.items() if key != "attention_mask"}, "token_type_ids": types}
    assert error(logits_packed(packs, batch), logits_alone(packs)) <= EXACT
    assert error(logits_packed(packs, own), logits_alone(packs)) > LARGE


@torch.no_grad()
def test_a_cache_would_join_the_samples():
    packs = make_tiny_packs("internvl qwen2")
    batch = PackedCollator(packs.model.config)(packs.samples)
    assert error(logits_packed(packs, {**batch, "use_cache": True}), logits_alone(packs)) > LARGE


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "internvl qwen2", "llava_onevision tied, sliding, head"])
@torch.no_grad()
def test_flash_attention_gets_the_lengths_of_the_samples(case, monkeypatch):
    """The kernel itself is replaced by plain torch: what is tested is what reaches it."""
    packs = make_tiny_packs(case)
    expected = logits_alone(packs)
    calls: list[int] = []

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, scale, window, **_):
        calls.append(len(cu_seqlens_q) - 1)
        parts = itertools.pairwise(cu_seqlens_q.tolist())
        return torch.cat([attend(q[a:b], k[a:b], v[a:b], causal, scale, window) for a, b in parts])

    def whole(q, k, v, *, causal, scale, window, **_):
        return torch.stack([attend(*row, causal, scale, window) for row in zip(q, k, v, strict=True)])

    def settings(*, is_causal, softmax_scale, sliding_window, **more):
        return {"causal": is_causal, "scale": softmax_scale, "window": sliding_window}

    monkeypatch.setattr(
        "transformers.modeling_flash_attention_utils.lazy_import_flash_attention",
        lambda *_: ((whole, varlen, None, None, None), (settings, None)),
    )
    for config in (packs.model.config, packs.model.config.text_config, packs.model.config.vision_config):
        config._attn_implementation = "flash_attention_2"
    batch = PackedCollator(packs.model.config, attention="flash_attention_2")(packs.samples)
    assert "attention_mask" not in batch
    assert error(logits_packed(packs, batch), expected) <= EXACT
    assert calls[-1] == len(packs.samples)  # of the last text layer

    shifted = batch["cu_seq_lens_q"].clone()
    shifted[1] += 1
    wrong = {**batch, "cu_seq_lens_q": shifted, "cu_seq_lens_k": shifted}
    assert error(logits_packed(packs, wrong), expected) > LARGE  # they are what counts


def attend(q, k, v, causal, scale, window):
    """(rows, heads, dim) attention of one sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    index = torch.arange(len(q))
    hidden = (index[None, :] > index[:, None]) & causal
    if window is not None:
        hidden |= index[None, :] <= index[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
