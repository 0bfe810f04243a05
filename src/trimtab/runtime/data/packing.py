"""Is packing exact for the model at hand? `verify_packing` says so in seconds."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError, UnsupportedPlanError
from trimtab.models.asking.inputs import image_token, plain_ids
from trimtab.models.families import PackFormat
from trimtab.runtime.data.collate import Attention, PackedCollator, loaded_attention
from trimtab.runtime.data.conversations import ProcessedSample, read_processed
from trimtab.runtime.data.formats import TOKEN_TYPE_KEYS, smallest_image

_CURES = "give family=PackFormat(...), fused kernels for layers with a state, or train without packing"
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest relative error that rounding may leave; a leak is 0.01 to 1 in float32 (tests/torch/test_packing.py)."""
MAX_GRADIENT_NUMBERS = 2**24
"""Parameters are compared smallest first, up to so many numbers: norms and biases of every layer of a large model."""

Batch = dict[str, Any]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, torch.compile or PEFT; refuses one whose weights lie in pieces or nowhere."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        model = model.module if hasattr(model, "module") else model._orig_mod  # type: ignore[assignment]
    if hasattr(model, "get_base_model"):  # PEFT: adapters stay where they are
        model = model.get_base_model()  # type: ignore[operator]
    if sharded(model):
        raise TrimtabError("call verify_packing before FSDP, ZeRO-3 or fully_shard divide the model")
    return model


def sharded(model: nn.Module) -> bool:
    """Return whether it is under FSDP, FSDP2, ZeRO-3 or on the meta device: no rank can run the model by itself."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    return any(p.is_meta or type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in model.parameters())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation, without TF32. Afterwards modes, precision and random numbers are as before."""
    training = {module: module.training for module in model.modules()}
    device = device_of(model)
    devices = [device] if device.type != "cpu" else []
    precision = torch.get_float32_matmul_precision()
    attention = _attention_of(model)
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            model.eval()
            if device.type == "cpu":  # flash kernels run only on accelerators
                _set_attention([(config, "sdpa") for config, name in attention if "flash" in str(name)])
            torch.set_float32_matmul_precision("highest")
            with torch.backends.cudnn.flags(allow_tf32=False):
                yield
        finally:
            torch.set_float32_matmul_precision(precision)
            _set_attention(attention)
            for module, mode in training.items():
                module.training = mode


def _attention_of(model: nn.Module) -> list[tuple[Any, str | None]]:
    """Return the configurations of the model's parts, outer ones first, with the attention each has."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [(config, getattr(config, "_attn_implementation", None)) for config in found.values()]


def _set_attention(chosen: Sequence[tuple[Any, str | None]]) -> None:
    for config, name in chosen:
        if getattr(config, "_attn_implementation", None) != name:
            config._attn_implementation = name


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def bound_of(model: nn.Module) -> float:
    """Return the bound by the coarsest type of the parameters."""
    return max(BOUNDS.get(dtype, 1e-4) for dtype in {p.dtype for p in model.parameters()})


# -- samples --------------------------------------------------------------------------------------------------------


def text_ids(model: Any) -> Tensor:
    """Return ids of the vocabulary that stand for plain text: none that a configuration names."""
    return plain_ids(model.config, model.get_input_embeddings().weight.shape[0])


def draw_samples(model: Any, family: PackFormat) -> list[dict[str, Any]]:
    """Return texts, one of a single token; where the family has an image of few tokens, two where samples meet."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = text_ids(model)

    def text(length: int) -> list[int]:
        picked: list[int] = vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)].tolist()
        return picked

    parts: list[list[Any]] = [[text(11)], [text(6)], [text(1)], [text(9)]]
    num_tokens, keys = smallest_image(family.smallest, model.config) if family.smallest is not None else (0, {})
    if 0 < num_tokens <= 16:
        image = [image_token(model.config)] * num_tokens
        parts += [[text(4), image], [image, text(5)]]
    samples = []
    for part in parts:
        ids = [x for piece in part for x in piece]
        sample: dict[str, Any] = {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}
        samples.append(sample | (_noisy(keys, generator) if len(part) > 1 else {}))
    return samples


def _noisy(images: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Draw other pixels in images of the same sizes."""
    drawn = {k: torch.randn(v.shape, generator=generator) for k, v in images.items() if v.is_floating_point()}
    return {key: value + drawn[key] if key in drawn else value for key, value in images.items()}


def cut_sample(sample: ProcessedSample, max_tokens: int) -> ProcessedSample:
    """Cut text after the last image; images stay whole."""
    rows = (sample.token_types > 0).nonzero()
    end = max(max_tokens, int(rows[-1]) + 2 if len(rows) and sample.images else 0)
    return replace(
        sample,
        input_ids=sample.input_ids[:end],
        labels=sample.labels[:end],
        token_types=sample.token_types[:end],
    )


def perturb(samples: Sequence[ProcessedSample], which: int, vocabulary: Tensor) -> list[dict[str, Any]]:
    """The samples with other words and other pixels in every second one, the first of them number `which`."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for number, sample in enumerate(samples):
        ids, images = sample.input_ids, dict(sample.images)
        if number % 2 == which:
            other = vocabulary[torch.randint(len(vocabulary), ids.shape, generator=generator)]
            plain = torch.isin(ids, vocabulary) & (sample.token_types == 0)
            ids = torch.where(plain, torch.where(other == ids, vocabulary[0], other), ids)
            images = _noisy(images, generator)
        result.append(as_given(replace(sample, input_ids=ids, images=images)))
    return result


def as_given(sample: ProcessedSample) -> dict[str, Any]:
    """Return what the collator takes."""
    ids = sample.input_ids
    return {"input_ids": ids, "labels": ids, "token_type_ids": sample.token_types, **sample.images}


def alone(sample: ProcessedSample, types_key: str | None) -> Batch:
    """Return a batch of one as any loop would give it: no positions, no masks."""
    types = {types_key: sample.token_types[None]} if types_key is not None else {}
    return {"input_ids": sample.input_ids[None], "use_cache": False, **types, **sample.images}


def types_key_of(forward_parameters: Mapping[str, Any]) -> str | None:
    return next((key for key in TOKEN_TYPE_KEYS if key in forward_parameters), None)


# -- forwards -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGradients:
    rows: Tensor | None  # (tokens, width) of the embedded tokens; None: the model names no embedding
    parameters: dict[str, Tensor]


def run(model: nn.Module, batch: Batch, *, what: str) -> Tensor:
    """Return (tokens, vocabulary) logits in float32 or float64; a forward that fails is refused."""
    device, dtype = device_of(model), next(model.parameters()).dtype
    given = {key: _place(value, device, dtype) for key, value in batch.items() if key not in ("labels", "loss_weights")}
    try:
        logits: Tensor = model(**given).logits
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        sentence = " ".join(str(error).split())[:300].rstrip(".")
        raise UnsupportedPlanError(
            f"{type(model).__name__} does not take {what} ({type(error).__name__}: {sentence}): {_CURES}"
        ) from error
    length = batch["input_ids"].shape[1]
    if logits.dim() != 3 or logits.shape[1] != length:
        raise UnsupportedPlanError(f"{length} tokens make logits of {tuple(logits.shape)}: train without packing")
    return logits[0].to(torch.float64 if dtype == torch.float64 else torch.float32)


def _place(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, Mapping):
        return {key: _place(part, device, dtype) for key, part in value.items()}
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def run_backward(model: nn.Module, batch: Batch, weights: Tensor, *, what: str) -> tuple[Tensor, SampleGradients]:
    """Return logits, and gradients of their sum weighted by `weights` (of the first entries); no `.grad` is written."""
    leaves: list[Tensor] = []
    length = batch["input_ids"].shape[1]

    def take(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.shape[:2] != (1, length) or leaves:
            return output
        leaves.append(output.detach().requires_grad_())
        return leaves[0].clone()  # some models write the images' rows in place

    hook = model.get_input_embeddings().register_forward_hook(take)  # type: ignore[operator]
    try:
        with torch.enable_grad():
            logits = run(model, batch, what=what)
            width = min(logits.shape[1], weights.shape[1])
            loss = (logits[:, :width] * weights[:, :width].to(logits)).sum() / width**0.5
            chosen = _small_parameters(model)
            found = torch.autograd.grad(loss, [*leaves, *chosen.values()], allow_unused=True)
    finally:
        hook.remove()
    rows = found[0][0].to(logits) if leaves and found[0] is not None else None
    parts = {n: g for n, g in zip(chosen, found[len(leaves) :], strict=True) if g is not None}
    return logits.detach(), SampleGradients(rows=rows, parameters=parts)


def _small_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    chosen, left = {}, MAX_GRADIENT_NUMBERS
    for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[1].numel()):
        if parameter.requires_grad and parameter.numel() <= left:
            chosen[name] = parameter
            left -= parameter.numel()
    return chosen


# -- errors ---------------------------------------------------------------------------------------------------------


def row_change(found: Tensor, expected: Tensor) -> float:
    """Return the largest change of a row, over the root mean square of all rows' norms."""
    if not len(expected):
        return 0.0
    scale = expected.norm(dim=-1).square().mean().sqrt().clamp_min(1e-12)
    return float((found - expected).norm(dim=-1).max() / scale)


def relative_error(found: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(max(floor, 1e-12)))


# -- what is proved ---------------------------------------------------------------------------------------------------


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
        raise UnsupportedPlanError(f"{type(model).__name__} is no model of Transformers with embeddings: give one")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedPlanError(
            f"the encoder of {model.config.model_type!r} reads a whole row: train without packing"
        )
    attention: Any = loaded_attention(model.config) or "sdpa"
    if attention not in get_args(Attention):
        raise UnsupportedPlanError(f"no packs for {attention} attention: load it with {', '.join(get_args(Attention))}")
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
                    f"packs of {self.kind!r} mix samples: rows change by {found:.2g}, not {self.bound:g}: {_CURES}"
                )
            worst = max(worst, found)
        return worst

    # -- (2) and (3): is it computed as if it were alone? -------------------------------------------------------------

    def errors(self, pack: Sequence[ProcessedSample]) -> tuple[float, float]:
        """Return the errors of logits, and of gradients."""
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
                f"{self.kind!r} packs have logits {logits_error:.2g} off, not {self.bound:g}: {_CURES}"
            )
        gradient_error = _gradient_error(gradients.parameters, sums)
        if gradients.rows is not None:
            expected = torch.cat([row for row in rows if row is not None])
            gradient_error = max(gradient_error, relative_error(gradients.rows, expected))
        if not gradient_error <= self.bound * GRADIENT_FACTOR:
            raise UnsupportedPlanError(
                f"{self.kind!r} packs have gradients {gradient_error:.2g} off: look for a loss over the batch, or "
                f"{_CURES}"
            )
        return logits_error, gradient_error


def _gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the worst parameter's error; the floor leaves out gradients that are rounding alone (biases of keys)."""
    largest = max((float(g.norm()) for g in expected.values()), default=0.0)
    return max(
        (relative_error(found[n].float(), g.float(), floor=1e-3 * largest) for n, g in expected.items() if n in found),
        default=0.0,
    )
