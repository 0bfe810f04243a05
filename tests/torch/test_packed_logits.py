"""A packed sample computes what it computes alone, in every family. Needs torch and Transformers."""

import inspect
import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from tiny_packs import CASES, TinyPacks, alone, make_tiny_packs

from trimtab.runtime.data.collate import PackedCollator

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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_packed_logits_equal_those_of_the_samples_alone(case, attention):
    packs = make_tiny_packs(case, attention=attention)
    expected = logits_alone(packs)
    batch = PackedCollator(packs.model.config, attention=attention)(packs.samples)
    assert batch["input_ids"].shape[0] == 1
    assert error(logits_packed(packs, batch), expected) <= EXACT

    assert error(logits_packed(packs, without_masks(batch)), expected) > LARGE


@torch.no_grad()
def test_a_cache_would_join_the_samples():
    packs = make_tiny_packs("internvl qwen2")
    batch = PackedCollator(packs.model.config)(packs.samples)
    assert error(logits_packed(packs, {**batch, "use_cache": True}), logits_alone(packs)) > LARGE


class FlashInTorch:
    """The functions of flash_attn 2 in plain torch, with those of their arguments that Transformers knows; strict."""

    def __init__(self) -> None:
        self.calls: list[int] = []  # number of sequences of each causal call

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=False,
    ):
        for offsets, longest, rows in ((cu_seqlens_q, max_seqlen_q, len(q)), (cu_seqlens_k, max_seqlen_k, len(k))):
            assert offsets.dtype == torch.int32
            assert offsets.is_contiguous()
            assert offsets.device == q.device
            assert (int(offsets[0]), int(offsets[-1])) == (0, rows)
            assert int(longest) == int(offsets.diff().max())
            if causal:  # the kernel's C++ takes an int; a tensor would wait for the device in every layer
                assert type(longest) is int
        if causal:
            self.calls.append(len(cu_seqlens_q) - 1)
        queries, keys = (itertools.pairwise(o.tolist()) for o in (cu_seqlens_q, cu_seqlens_k))
        parts = [
            attend(q[a:b], k[c:d], v[c:d], causal, softmax_scale, window_size)
            for (a, b), (c, d) in zip(queries, keys, strict=True)
        ]
        return torch.cat(parts)

    def flash_attn_func(
        self,
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=False,
    ):
        assert not causal, "a pack came to the kernel without its lengths"
        return torch.stack([attend(*row, causal, softmax_scale, window_size) for row in zip(q, k, v, strict=True)])


@pytest.fixture
def flash_calls(monkeypatch):
    """Makes Transformers take `FlashInTorch` for an installed `flash_attn`: all before the kernel is its own code."""
    kernels = FlashInTorch()
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.flash_attn_func = kernels.flash_attn_func
    package.flash_attn_varlen_func = kernels.flash_attn_varlen_func
    package.flash_attn_with_kvcache = padding.pad_input = padding.unpad_input = None
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    flash = transformers.modeling_flash_attention_utils
    for version in (2, 3, 4):
        monkeypatch.setattr(flash, f"is_flash_attn_{version}_available", lambda version=version: version == 2)
    for name in ("_loaded_implementation", *(n for n in vars(flash) if n.startswith("_flash_") and n.endswith("_fn"))):
        monkeypatch.setattr(flash, name, None)
    return kernels.calls


def attend(q, k, v, causal, scale, window):
    """(rows, heads, dim) attention of one sequence; query i sees keys i - left to i + right, -1: no end."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(len(k))[None, :] - torch.arange(len(q))[:, None]
    left, right = window
    hidden = (ahead > 0) & causal
    hidden |= (ahead < -left) & (left >= 0)
    hidden |= (ahead > right) & (right >= 0)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


FLASH_CASES = [case for case in CASES if case != "gemma3"]


def use_flash(packs):
    """As a model loaded with flash attention is; loading one looks for a GPU."""
    config = packs.model.config
    for part in (config, config.text_config, config.vision_config):
        part._attn_implementation = "flash_attention_2"


@pytest.mark.parametrize("case", FLASH_CASES)
@torch.no_grad()
def test_flash_attention_gets_the_lengths_of_the_samples(case, flash_calls):
    """Varlen attention computed from the collator's keys gives the logits of the samples alone."""
    packs = make_tiny_packs(case)
    expected = logits_alone(packs)
    use_flash(packs)
    batch = PackedCollator(packs.model.config, attention="flash_attention_2")(packs.samples)
    assert "attention_mask" not in batch
    assert error(logits_packed(packs, batch), expected) <= EXACT
    num_layers = packs.model.config.text_config.num_hidden_layers
    assert flash_calls == [len(packs.samples)] * num_layers  # each text layer, and by the samples

    shifted = batch["cu_seq_lens_q"].clone()
    shifted[2] -= 1
    lengths = shifted.diff()
    longest = int(lengths.max())
    more = {"max_length_q": longest, "max_length_k": longest}
    wrong = {**batch, "cu_seq_lens_q": shifted, "cu_seq_lens_k": shifted, **more}
    assert error(logits_packed(packs, wrong), expected) > LARGE  # they are what counts


def test_transformers_takes_the_keys_that_the_collator_gives():
    """Each is a parameter of `_flash_attention_forward`; other names would be swallowed by its **kwargs."""
    packs = make_tiny_packs("internvl qwen2")
    use_flash(packs)
    batch = PackedCollator(packs.model.config, attention="flash_attention_2")(packs.samples)
    flash = transformers.modeling_flash_attention_utils
    taken = inspect.signature(flash._flash_attention_forward).parameters
    names = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert names == {name for name in batch if name.startswith(("cu_", "max_"))}
    assert names | {"position_ids"} <= set(taken)


@torch.no_grad()
def test_an_empty_pack_goes_through_flash_attention(flash_calls):
    packs = make_tiny_packs("qwen2_5_vl")
    use_flash(packs)
    batch = PackedCollator(packs.model.config, attention="flash_attention_2")([])
    assert torch.isfinite(logits_packed(packs, batch)[0]).all()
    assert set(flash_calls) == {1}
