"""LoRA and QLoRA as one option: which linear layers get adapters, of which rank, over weights of how many bits."""

from dataclasses import dataclass, fields
from typing import get_args

from trimtab.errors import PlanError, join_problems
from trimtab.options import AdapterWeights, Tower

ALL_LINEAR = "all-linear"
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a weight as bitsandbytes stores NF4 with double quantisation (arXiv 2305.14314, section 3): four bits; one byte of
scale for a block of 64; four bytes of scale of scales for 256 blocks. Not counted: 1,096 bytes of tables a matrix."""
FOUR_BITS = ("bnb-nf4", "bnb-nf4-double", "awq")
"""Formats of stored weights, as `ModelSpec.stored_as` names them, that adapters are trained over."""
_MOST_RANK = 2**20  # no matrix is so wide
_SAID = "write it as in r=16,targets=q_proj+v_proj,alpha=32,towers=language,bits=4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of rank `r` next to frozen linear layers: y = W x + alpha / r B (A x), only A and B are trained.

    Use it in `PlanOptions(lora=...)`, or as `--lora r=16,targets=all-linear` on the command line.

    targets: names of linear layers, or their last parts, as PEFT's `target_modules`; "all-linear" are all but the head.
    Experts that are one tensor of three dimensions are no linear layers: they stay frozen, as in PEFT.
    towers: where adapters are; all other weights are frozen. bits=4: linear layers of these towers, the head aside,
    lie in NF4 with double quantisation, as bitsandbytes stores them (QLoRA).
    weights: of the adapters, "same" as the model's, "fp32" as PEFT makes them, "fp32_products" without autocast; None:
    as the host makes them.
    dropout changes no cost that is counted.

    >>> Lora(r=8, targets=("q_proj", "v_proj"))
    Lora(r=8, targets=('q_proj', 'v_proj'), towers=('language',), bits=16, alpha=32, dropout=0.0, weights=None)
    """

    r: int
    targets: tuple[str, ...] = (ALL_LINEAR,)
    towers: tuple[Tower, ...] = ("language",)
    bits: int = 16  # of the frozen linear layers of these towers
    alpha: float = 32
    dropout: float = 0.0
    weights: AdapterWeights | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.r <= _MOST_RANK:
            problems.append(f"r {self.r} was asked for, and adapters have ranks of 1 to {_MOST_RANK:,}: give r=16")
        if self.bits not in (4, 16):
            problems.append(f"bits {self.bits} was asked for, and frozen weights have 16 bits or 4 (NF4): give bits=4")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout {self.dropout} is no share below 1: give dropout=0.05, or leave it out")
        if not 0 < self.alpha < float("inf"):
            problems.append(f"alpha {self.alpha} scales adapters to nothing, or beyond numbers: give one above 0")
        if self.weights not in (None, *get_args(AdapterWeights)):
            known = ", ".join(get_args(AdapterWeights))
            problems.append(f"adapters were to have {self.weights!r} weights: give weights= one of {known}")
        if not self.targets or not all(self.targets):
            problems.append(f"no linear layer was named to adapt: give targets={ALL_LINEAR}")
        towers = [tower for tower in get_args(Tower) if tower != "audio"]  # no sample trains an audio tower
        problems += [
            f"adapters were to be in the tower {tower!r}: those of samples are {', '.join(towers)}"
            for tower in self.towers
            if tower not in towers
        ]
        if not self.towers:
            problems.append(f"no tower was named to adapt: give some of {', '.join(towers)}")
        if problems:
            raise PlanError(join_problems([f"lora: {problem}" for problem in problems]))

    def __str__(self) -> str:
        """Write it as it is typed, without what is the default."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            said = "+".join(value) if isinstance(value, tuple) else value
            words.append(f"{field.name}={said:g}" if isinstance(said, float) else f"{field.name}={said}")
        return ",".join(words)


def parse_lora(text: str) -> Lora:
    """Read `r=16,targets=q_proj+v_proj,bits=4` as a `Lora`; `PlanError` names every word that it has no use for.

    >>> parse_lora("r=16,bits=4").bits
    4
    """
    known = {field.name for field in fields(Lora)}
    given: dict[str, object] = {}
    problems = []
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        try:
            if name not in known or name in given or not value:
                raise ValueError
            if name in ("targets", "towers"):
                given[name] = tuple(value.split("+"))
            elif name == "weights":
                given[name] = value
            else:
                given[name] = float(value) if name in ("alpha", "dropout") else int(value)
        except ValueError:
            problems.append(f"lora {word!r} was not understood: {_SAID}")
    if "r" not in given and not problems:
        problems.append(f"lora {text!r} names no rank: {_SAID}")
    if problems:
        raise PlanError(join_problems(problems))
    return Lora(**given)  # type: ignore[arg-type]  # fields by name
