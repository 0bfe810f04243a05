"""A plan's recompute as the ratios of xtuner v1's `FSDPConfig`.

xtuner recomputes the first int(n x ratio) blocks of each tower, in full: `recompute_ratio` of the language model,
`vision_recompute_ratio` of the vision tower. So a number of blocks can be said, and not which. With experts it never
recomputes the last block of the decoder. Read from xtuner v1's fsdp.py, dense.py, moe.py and modeling_vision.py; its
packages on PyPI end before v1, and nothing here was run against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.adapters.blocks import blocks_of, has_other_kinds, lost_tiers, recomputed_blocks, recomputing
from trimtab.errors import UnsupportedPlanError, join_problems
from trimtab.options import Tower
from trimtab.specs import ModelSpec, ParallelDims, Stage

FAMILIES = ("internvl", "internvl_chat", "qwen3_vl", "qwen3_vl_moe")
_FIELDS: dict[Tower, str] = {"language": "recompute_ratio", "vision": "vision_recompute_ratio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class XtunerExport:
    """Fields of `FSDPConfig`; both ratios are 1.0 unless set."""

    fields: tuple[tuple[str, float | bool], ...]
    counts: tuple[tuple[str, int, int], ...]  # field, blocks that recompute, blocks of the tower
    runs: tuple[Stage, ...]
    warnings: tuple[str, ...]

    def python(self) -> str:
        """Lines for an xtuner configuration."""
        notes = {field: f"  # the first {count} of {total} blocks" for field, count, total in self.counts}
        lines = [f"    {name}={value!r},{notes.get(name, '')}" for name, value in self.fields]
        return "\n".join(["from xtuner.v1.config import FSDPConfig", "", "fsdp_cfg = FSDPConfig(", *lines, ")"])


def ratio_for(number: int, total: int) -> float:
    """The shortest decimal r in [0, 1] with int(total * r) == number, as Python's floats multiply.

    Checked by multiplying, since int(50 * 0.58) is 28. There is one: the ratios for a number span 1 / total.
    """
    assert 0 <= number <= total
    if number == total:
        return 1.0
    for digits in range(1, 18):
        scale: int = 10**digits
        first = -(-number * scale // total)
        for ratio in (first / scale, (first + 1) / scale):
            if int(total * ratio) == number:
                return ratio
    raise AssertionError(f"no ratio for {number} of {total} blocks")


def xtuner_ladder(model: ModelSpec, stages: Sequence[Stage]) -> list[list[tuple[Stage, ...]]]:
    """Every pair of numbers, as one ladder over the decoder's for each number of the tower's, without pipeline."""
    if len(stages) > 1:
        return []
    (stage,) = stages
    vision, most = blocks_of(model, stage, "vision"), _most_blocks(model, stage)
    language = blocks_of(model, stage)
    return [
        [(recomputing(stage, vision[:tower] + language[:number]),) for number in range(most + 1)]
        for tower in range(len(vision) + 1)
    ]


def xtuner_export(
    *,
    model: ModelSpec,
    stages: Sequence[Stage],
    dims: ParallelDims,
    zero_stage: int = 1,
) -> XtunerExport:
    """The ratios that recompute as many blocks of each tower as planned, or `UnsupportedPlanError`."""
    problems = _problems(model, dims)
    if problems:
        raise UnsupportedPlanError(join_problems(problems))
    (stage,) = stages
    warnings: list[str] = []
    counts: list[tuple[str, int, int]] = []
    first: list[int] = []
    for tower, field in _FIELDS.items():
        blocks, chosen = blocks_of(model, stage, tower), recomputed_blocks(model, stage, tower)
        number = min(len(chosen), _most_blocks(model, stage)) if tower == "language" else len(chosen)
        if blocks:
            counts.append((field, number, len(blocks)))
        first += blocks[:number]
        warnings += lost_tiers(Counter(chosen.values()), f"{tower} blocks", "xtuner's ratios recompute blocks in full")
        if number < len(chosen):
            warnings.append(
                f"recompute of all {len(blocks)} language blocks is planned, and xtuner keeps the last block of a "
                "decoder with experts: it holds more than planned"
            )
        if has_other_kinds(model, chosen, blocks[:number]):
            warnings.append(
                f"the planned {tower} blocks are of other kinds than the first {number}, which xtuner's {field} takes: "
                "check the memory"
            )
    outside = [i for c in stage.recompute for i in c.layers if model.layers[i].kind != "block"]
    if outside:
        warnings.append(
            f"recompute of {', '.join(model.layers[i].name for i in outside)} is planned, and xtuner's ratios count "
            "blocks alone: these layers keep their activations"
        )
    if zero_stage < 3 and dims.dp > 1:
        warnings.append(
            f"ZeRO stage {zero_stage} was planned, and xtuner shards parameters, gradients and optimizer state: the "
            "run holds less than planned and sends more"
        )
    fields = {field: ratio_for(number, total) for field, number, total in counts}
    return XtunerExport(
        fields=(*fields.items(), ("reshard_after_forward", True)),
        counts=tuple(counts),
        runs=(recomputing(stage, first),),
        warnings=tuple(warnings),
    )


def _most_blocks(model: ModelSpec, stage: Stage) -> int:
    """Decoder blocks that may recompute: with experts all but the last."""
    blocks = blocks_of(model, stage)
    experts = any(mlp is not None and mlp.num_experts for mlp in (model.layers[i].mlp for i in blocks))
    return len(blocks) - 1 if experts else len(blocks)


def _problems(model: ModelSpec, dims: ParallelDims) -> list[str]:
    problems: list[str] = []
    if model.family not in FAMILIES:
        problems.append(
            f"{model.name} is of the family {model.family}, and xtuner v1 has of ours {', '.join(FAMILIES)}: export to "
            "huggingface instead"
        )
    for axis in ("pp", "tp", "cp"):
        degree = getattr(dims, axis)
        if degree > 1:
            problems.append(
                f"{axis} {degree} was planned, and xtuner v1 trains by FSDP with whole layers on every rank: plan with "
                f"{axis} 1"
            )
    return problems
