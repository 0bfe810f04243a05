"""Is packing exact for the model at hand? `verify_packing` says so in seconds; runs of ours call `prepare_packing`."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, nn

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.data.collate import Attention, PackedCollator
from trimtab.runtime.data.conversations import ProcessedSample, read_processed
from trimtab.runtime.data.formats import carries_state, hold_samples_apart, runs_apart
from trimtab.runtime.data.packing_runs import (
    Batch,
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
from trimtab.runtime.ranks import on_first_rank

# Which layer lets one sample of a pack see another, or computes a sample otherwise than alone.


Trace: TypeAlias = dict[tuple[str, int], tuple[Tensor, Tensor]]
"""Rows that went into and came out of each module of one forward, by (path, call), in the order of their ends."""


@contextmanager
def traced(model: nn.Module, num_rows: int) -> Iterator[Trace]:
    """Records every module that turns (1, tokens, ...) or (tokens, ...) rows into as many."""
    trace, counts = Trace(), dict[str, int]()

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            given = kwargs.get("hidden_states", next(iter(args), None))
            before, after = _rows(given, num_rows), _rows(output, num_rows)
            counts[name] = counts.get(name, -1) + 1
            if before is not None and after is not None:
                trace[name, counts[name]] = (before, after)

        return hook

    handles = [
        module.register_forward_hook(record(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _rows(value: Any, num_rows: int) -> Tensor | None:
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.dim() >= 3 and value.shape[:2] == (1, num_rows):
        return value.detach()[0].flatten(1).float()
    if value.dim() == 2 and value.shape[0] == num_rows:
        return value.detach().float()
    return None


def first_leak(base: Trace, changed: Trace, unchanged: Tensor, *, bound: float) -> str | None:
    """Return the first module whose rows of unchanged samples change though those it was given do not."""
    for key, (before, after) in base.items():
        if key not in changed:
            continue
        given, made = changed[key]
        if before.shape != given.shape or after.shape != made.shape:
            continue
        if row_change(given[unchanged], before[unchanged]) <= bound < row_change(made[unchanged], after[unchanged]):
            return key[0]
    return None


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
    unreached: int | None  # tokens that a sparse layer chooses among, if more than were checked; None: all reached
    held: tuple[str, ...] = ()  # layers that `prepare_packing` made run each sample by itself


def verify_packing(
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]] | None = None,
    *,
    collator: PackedCollator | None = None,
    max_tokens: int = 24,
) -> PackingProof:
    """Call this before you train on packs in your own loop: it raises, with the layer's name, if samples mix.

    `samples` are processed samples as `PackedCollator` takes them; the first six are used, each cut to `max_tokens` or
    after its last image. None: samples are drawn, only of text unless the family's smallest image is declared and
    small. Checked: (1) other words and pixels in one sample change no row of another; (2) logits and (3) gradients are
    those of the samples alone, within rounding. Dropout is off; weights, gradients, modes and random numbers stay as
    they are. Call it before FSDP or DeepSpeed wrap the model; DDP is looked through. Not checked: lengths beyond those
    of the samples (see `unreached`), losses over a whole micro-batch (`output_router_logits`).

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
        unreached=check.unreached(pack),
        seconds=time.perf_counter() - begin,
    )


def prepare_packing(model: nn.Module, *, collator: PackedCollator | None = None) -> PackingProof:
    """Call this where a run starts: `verify_packing`, and `hold_samples_apart` for layers with a state that need it.

    >>> prepare_packing(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    trimtab.errors.UnsupportedPlanError: packing was to be verified for Linear, which is no model of Transformers: ...
    """
    try:
        proof = verify_packing(model, collator=collator)
    except UnsupportedPlanError:
        held = hold_samples_apart(unwrap(model))
        if not held:
            raise
        proof = replace(verify_packing(model, collator=collator), held=tuple(held))
        LOG.warning(
            "%d layers with a state (%s the first) run each sample of a pack by itself: their fused kernels, which "
            "take whole packs, are not installed",
            len(held),
            held[0],
        )
    if proof.unreached is not None:
        LOG.warning(
            "packing was found exact on %d tokens, but sparse layers choose among %d: they may still mix samples of "
            "longer packs; call verify_packing with samples that together are longer (max_tokens=)",
            proof.num_tokens,
            proof.unreached,
        )
    return proof


def prepare_packing_on_ranks(model: nn.Module, device: torch.device) -> None:
    """Where every rank has loaded the whole model on its CPU: rank 0 checks, all change the same layers. Collective."""
    if on_first_rank(lambda: bool(prepare_packing(model).held), device):
        hold_samples_apart(model)


def collator_of(model: Any) -> PackedCollator:
    """The collator of a model of Transformers, with the attention it was loaded with."""
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedPlanError(
            f"packing was to be verified for {type(model).__name__}, which is no model of Transformers: give one that "
            "has a config and token embeddings"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedPlanError(
            f"packs of {model.config.model_type!r} were asked for, but its encoder reads a whole row at once: train it "
            "without packing"
        )
    loaded = getattr(model.config.get_text_config(), "_attn_implementation", None) or "sdpa"
    attention: Any = "flash_attention_2" if "flash" in loaded else loaded
    if attention not in get_args(Attention):
        raise UnsupportedPlanError(
            f"packs were asked for a model with {attention} attention, but they are made for "
            f"{', '.join(get_args(Attention))}: load it with one of these (attn_implementation=)"
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
            raise UnsupportedPlanError(
                f"packing was to be verified on {len(pack)} samples, but only two or more can mix: give at least two"
            )
        return pack

    def unreached(self, pack: Sequence[ProcessedSample]) -> int | None:
        """Tokens among which layers with an indexer choose, where the pack holds fewer: then they chose all."""
        text = self.model.config.get_text_config()
        kinds = {kind for kind in getattr(text, "layer_types", None) or () if "index" in kind or "sparse" in kind}
        names = ("index_topk", "indexer_budget", "index_topk_blocks")
        limits = [getattr(text, name, None) or 0 for name in names]
        limits[2] *= getattr(text, "index_block_size", None) or 1
        most = max(limits) if kinds else 0
        return most if most >= sum(len(sample.input_ids) for sample in pack) else None

    # -- (1) does a sample see another? -------------------------------------------------------------------------------

    @torch.no_grad()
    def leak(self, pack: Sequence[ProcessedSample]) -> float:
        base_batch = self.collator([as_given(sample) for sample in pack])
        base = run(self.model, base_batch, what="a pack")
        vocabulary, worst = text_ids(self.model), 0.0
        for which in (0, 1):
            changed_batch = self.collator(perturb(pack, which, vocabulary))
            victims = torch.cat(
                [torch.full((len(sample.input_ids),), number % 2 != which) for number, sample in enumerate(pack)]
            )
            changed = run(self.model, changed_batch, what="a pack")
            found = row_change(changed[victims.to(base.device)], base[victims.to(base.device)])
            if not found <= self.bound:
                raise UnsupportedPlanError(self._name_leak(base_batch, changed_batch, victims, found))
            worst = max(worst, found)
        return worst

    def _name_leak(self, base_batch: Batch, changed_batch: Batch, victims: Tensor, found: float) -> str:
        base, changed = (self._trace(batch, len(victims)) for batch in (base_batch, changed_batch))
        path = first_leak(base, changed, victims, bound=self.bound)
        seen = f"(rows change by {found:.2g} of their size, rounding allows {self.bound:g})"
        if path is None:
            return (
                f"packs of {self.kind!r} were asked for, but words or images of one sample change another {seen}, "
                "outside of every layer that turns rows into rows, as where images are encoded or joined: give "
                "family=PackFormat(...) that fits, or train it without packing"
            )
        module = self.model.get_submodule(path)
        advice = "load it with attn_implementation='sdpa', or train it without packing"
        if carries_state(module):
            advice = "call hold_samples_apart(model) before it is wrapped, or install the kernels that take whole packs"
        elif runs_apart(module):
            advice = "its caller does not tell it where samples end, so train it without packing"
        return (
            f"packs of {self.kind!r} were asked for, but in {path} ({type(module).__name__}) one sample sees another "
            f"{seen}: {advice}"
        )

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
                f"packs of {self.kind!r} were asked for, but a packed sample is computed otherwise than alone: logits "
                f"are off by {logits_error:.2g} of their size, rounding allows {self.bound:g}. Its positions may not "
                "restart, or tokens may have to see their whole image: give family=PackFormat(...) that fits, or train "
                "it without packing"
            )
        gradient_error = _gradient_error(gradients.parameters, sums)
        if gradients.rows is not None:
            expected = torch.cat([row for row in rows if row is not None])
            gradient_error = max(gradient_error, relative_error(gradients.rows, expected))
        if not gradient_error <= self.bound * GRADIENT_FACTOR:
            raise UnsupportedPlanError(
                f"packs of {self.kind!r} were asked for, but their gradients are off by {gradient_error:.2g} of their "
                f"size (rounding allows {self.bound * GRADIENT_FACTOR:g}), though their logits are right: look for a "
                "loss or a hook over the whole batch, or train it without packing"
            )
        return logits_error, gradient_error

    def _trace(self, batch: Batch, num_rows: int) -> Trace:
        """A forward that has run before, once more."""
        with traced(self.model, num_rows) as trace:
            run(self.model, batch, what="what ran before")
        return trace


def _gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of the worst parameter; the floor leaves out those whose gradient is zero but for rounding (biases of keys)."""
    largest = max((float(g.norm()) for g in expected.values()), default=0.0)
    return max(
        (relative_error(found[n].float(), g.float(), floor=1e-3 * largest) for n, g in expected.items() if n in found),
        default=0.0,
    )
