"""Is packing exact for the model at hand? `verify_packing` says so in seconds."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.data.collate import Attention, PackedCollator
from trimtab.runtime.data.conversations import ProcessedSample, read_processed
from trimtab.runtime.data.packing_runs import (
    alone,
    as_given,
    bound_of,
    cut_sample,
    device_of,
    draw_samples,
    perturb,
    relative_error,
    row_change,
    run,
    run_backward,
    text_ids,
    types_key_of,
    untouched,
    unwrap,
)

LOG = logging.getLogger("trimtab")
GRADIENT_FACTOR = 3.0
"""Gradients may be off by so many bounds (found: 0.06 bounds in float32, 1.1 in bfloat16; bench/packing_exact.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingProof:
    """What `verify_packing` measured; all errors are relative and within `bound`, gradients within 3 bounds."""

    num_samples: int
    num_tokens: int
    leak: float  # largest change of a row when the words of other samples change
    logits_error: float  # packed against alone, of the worst sample
    gradient_error: float  # the same, of the embedded tokens' rows and of parameters
    bound: float  # what rounding may leave in the model's type
    seconds: float


def verify_packing(
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]] | None = None,
    *,
    collator: PackedCollator | None = None,
    max_tokens: int = 24,
) -> PackingProof:
    """Call this before you train on packs in your own loop: it raises if samples mix.

    `samples` are processed samples as `PackedCollator` takes them; the first six are used, each cut to `max_tokens` or
    after its last image. None: samples are drawn, only of text unless the family's smallest image is declared and
    small. Checked: (1) other words and pixels in one sample change no row of another; (2) logits and (3) gradients are
    those of the samples alone, within rounding. Dropout is off; weights, gradients, modes and random numbers stay as
    they are. Call it before FSDP or DeepSpeed wrap the model; DDP is looked through. Not checked: lengths beyond those
    of the samples, losses over a whole micro-batch (`output_router_logits`).

    >>> import transformers
    >>> config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64,
    ...     num_attention_heads=2, num_key_value_heads=2)
    >>> proof = verify_packing(transformers.LlamaForCausalLM(config))
    >>> proof.logits_error < proof.bound
    True
    """
    begin = time.perf_counter()
    model = unwrap(model)
    with untouched(model):
        given = collator or collator_of(model)
        stood_in = given.attention == "flash_attention_2" and device_of(model).type == "cpu"
        attention: Attention = "sdpa" if stood_in else given.attention
        check = _Check(model, replace(given, vision_in_every_pack=False, attention=attention))
        pack = check.read(samples, max_tokens)
        leak = check.leak(pack)
        logits_error, gradient_error = check.errors(pack)
    return PackingProof(
        num_samples=len(pack),
        num_tokens=sum(len(sample.input_ids) for sample in pack),
        leak=leak,
        logits_error=logits_error,
        gradient_error=gradient_error,
        bound=check.bound,
        seconds=time.perf_counter() - begin,
    )


def collator_of(model: Any) -> PackedCollator:
    """The collator of a model of Transformers, with the attention it was loaded with."""
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedPlanError(
            f"{type(model).__name__} is no model of Transformers: give one with a config and token embeddings"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedPlanError(
            f"the encoder of {model.config.model_type!r} reads a whole row at once: train it without packing"
        )
    loaded = getattr(model.config.get_text_config(), "_attn_implementation", None) or "sdpa"
    attention: Any = "flash_attention_2" if "flash" in loaded else loaded
    if attention not in get_args(Attention):
        raise UnsupportedPlanError(
            f"packs are not made for {attention} attention: load the model with {', '.join(get_args(Attention))}"
        )
    return PackedCollator(model.config, attention=attention, vision_in_every_pack=False)


@dataclass(frozen=True, slots=True)
class _Check:
    model: Any
    collator: PackedCollator

    @property
    def bound(self) -> float:
        return bound_of(self.model)

    @property
    def kind(self) -> str:
        return str(self.model.config.model_type)

    def read(self, samples: Sequence[Mapping[str, Any]] | None, max_tokens: int) -> list[ProcessedSample]:
        assert self.collator.family is not None, "filled in when made"
        given = draw_samples(self.model, self.collator.family) if samples is None else samples[:6]
        pack = [cut_sample(s, max_tokens) for s in read_processed(given, self.model.config, self.collator.family)]
        if len(pack) < 2:
            raise UnsupportedPlanError(f"packing is verified on two samples or more, not {len(pack)}: give more")
        return pack

    # -- (1) does a sample see another? -------------------------------------------------------------------------------

    @torch.no_grad()
    def leak(self, pack: Sequence[ProcessedSample]) -> float:
        base_batch = self.collator([as_given(sample) for sample in pack])
        base = run(self.model, base_batch, what="a pack")
        vocabulary, worst = text_ids(self.model), 0.0
        for which in (0, 1):
            changed_batch = self.collator(perturb(pack, which, vocabulary))
            others = torch.cat(
                [torch.full((len(sample.input_ids),), number % 2 != which) for number, sample in enumerate(pack)]
            )
            changed = run(self.model, changed_batch, what="a pack")
            found = row_change(changed[others.to(base.device)], base[others.to(base.device)])
            if not found <= self.bound:
                raise UnsupportedPlanError(
                    f"packs of {self.kind!r} mix samples: rows change by {found:.2g} of their size, rounding allows "
                    f"{self.bound:g}; install fused kernels of layers with a state, give family=PackFormat(...), or "
                    "train without packing"
                )
            worst = max(worst, found)
        return worst

    # -- (2) and (3): is it computed as if it were alone? -------------------------------------------------------------

    def errors(self, pack: Sequence[ProcessedSample]) -> tuple[float, float]:
        """Of logits, and of gradients."""
        types_key = types_key_of(inspect.signature(self.model.forward).parameters)
        batch, generator = self.collator([as_given(sample) for sample in pack]), torch.Generator().manual_seed(2)
        lengths = [len(sample.input_ids) for sample in pack]
        weights = torch.randn(sum(lengths), 4096, generator=generator)
        packed, gradients = run_backward(self.model, batch, weights, what="a pack")
        apart, rows, sums = [], [], dict[str, Tensor]()
        for sample, own in zip(pack, torch.split(weights, lengths), strict=True):
            logits, found = run_backward(self.model, alone(sample, types_key), own, what="a sample alone")
            apart.append(logits)
            rows.append(found.rows)
            for name, gradient in found.parameters.items():
                sums[name] = sums[name] + gradient if name in sums else gradient
        pairs = list(zip(torch.split(packed, lengths), apart, strict=True))
        logits_error = max(relative_error(a, b) for a, b in pairs)
        if not logits_error <= self.bound:
            raise UnsupportedPlanError(
                f"packed samples of {self.kind!r} are computed otherwise than alone: logits are off by "
                f"{logits_error:.2g}, rounding allows {self.bound:g}; give family=PackFormat(...) that fits, or train "
                "without packing"
            )
        gradient_error = _gradient_error(gradients.parameters, sums)
        if gradients.rows is not None:
            expected = torch.cat([row for row in rows if row is not None])
            gradient_error = max(gradient_error, relative_error(gradients.rows, expected))
        if not gradient_error <= self.bound * GRADIENT_FACTOR:
            raise UnsupportedPlanError(
                f"gradients of {self.kind!r} packs are off by {gradient_error:.2g}, rounding allows "
                f"{self.bound * GRADIENT_FACTOR:g}, though logits are right: look for a loss or a hook over the whole "
                "batch, or train without packing"
            )
        return logits_error, gradient_error


def _gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of the worst parameter; the floor leaves out those whose gradient is zero but for rounding (biases of keys)."""
    largest = max((float(g.norm()) for g in expected.values()), default=0.0)
    return max(
        (relative_error(found[n].float(), g.float(), floor=1e-3 * largest) for n, g in expected.items() if n in found),
        default=0.0,
    )
