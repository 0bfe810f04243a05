"""A plan's decisions as arguments of MindSpeed-MM's `pretrain_vlm.py` and fields of its model file.

Its model file names the layers of every stage for the vision tower and the language model apart, so that a plan that
cuts inside the tower is carried whole. Projector and last vision block share a stage, so do embedding and first decoder
block, and last decoder block, norm and head. Read at 57069cd5 (vlm_model.py, vision_transformer_block.py), not run.
"""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from trimtab.adapters.megatron import SCHEDULES
from trimtab.adapters.running import (
    Decided,
    Exported,
    Target,
    blocks_of,
    cut_problems,
    full_blocks,
    head_problems,
    is_block,
    recompute_first,
    recomputed_blocks,
    refuse,
    schedule_problems,
)
from trimtab.errors import UnsupportedPlanError
from trimtab.options import Tower
from trimtab.plan.decide.stages import Expressible
from trimtab.specs import ModelSpec, Stage

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Those whose weights its converter splits by both towers; it trains others by FSDP2, without stages."""
_TOWERS: tuple[Tower, ...] = ("vision", "language")

_KNOWN: Mapping[str, Collection[object]] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "attention": ("flash", "eager"),
    "grad_dtype": ("fp32", "fp16"),
    "fused_kernels": (True,),  # of the NPU, which its models call by themselves
    "sequence_parallel": (True, False),
}


def export(plan: Decided) -> Exported:
    """Return arguments to add to those of `pretrain_vlm.py`, and what to set in the file of `--mm-model`."""
    _refuse_family(plan.model)
    model, stages, dims = plan.model, plan.stages, plan.dims
    problems = [
        *schedule_problems(plan, "MindSpeed-MM", SCHEDULES),
        *cut_problems(
            plan,
            _unsupported_cuts(model),
            "and MindSpeed-MM cuts only between blocks, or before the embedding: export with --fit FOLDER, or plan "
            "with --for mindspeed-mm",
        ),
        *head_problems(model, dims.tp),
    ]
    if plan.zero_stage > 1:
        problems.append(f"MindSpeed-MM's pipeline has no ZeRO stage {plan.zero_stage}: plan with ZeRO stage 1")
    problems += plan.launch.problems("MindSpeed-MM", **_KNOWN)
    if "language" in plan.frozen_towers:
        problems.append("MindSpeed-MM has no field for a frozen language model: train it")
    refuse(problems)

    arguments: dict[str, object] = {"tensor_model_parallel_size": dims.tp, "pipeline_model_parallel_size": dims.pp}
    if plan.num_chunks > 1:
        arguments["virtual_pipeline_model_parallel_size"] = plan.num_chunks
    arguments |= {"micro_batch_size": 1, "global_batch_size": plan.samples_per_step, "variable_seq_lengths": True}
    if plan.zero_stage == 1:
        arguments["use_distributed_optimizer"] = True
    launch = plan.launch
    switches = {
        launch.dtype: launch.dtype != "fp32",
        "use_flash_attn": launch.attention == "flash",
        "sequence_parallel": launch.sequence_parallel,
        "accumulate_allreduce_grads_in_fp32": launch.grad_dtype == "fp32" and launch.dtype == "bf16",
    }
    arguments |= {name: True for name, on in switches.items() if on}
    arguments["optimizer"] = "adam"

    counts = {tower: _most(model, stages, tower) for tower in _TOWERS}
    fields = {tower: _fields(plan, tower, counts[tower]) for tower in _TOWERS}
    encoder = {"vision_encoder": fields["vision"] | {"freeze": "vision" in plan.frozen_towers}}
    encoder["vision_projector"] = {"freeze": "projector" in plan.frozen_towers}
    file = {"image_encoder": encoder, "text_decoder": fields["language"]}

    words = [
        ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])] for name, value in arguments.items()
    ]
    environment = f"export VP_SIZE={plan.num_chunks}\n" if plan.num_chunks > 1 else ""
    flags = " \\\n".join(map(shlex.join, words))
    runs = recompute_first(model, stages, counts)
    return Exported(
        text=f"{environment}# arguments of pretrain_vlm.py\n{flags}\n\n# in the file of --mm-model\n{json.dumps(file)}",
        fields={"arguments": arguments, "model": file},
        runs=runs,
        warnings=tuple(_warnings(model, stages, runs, counts)),
    )


def _fields(plan: Decided, tower: Tower, most: int) -> dict[str, object]:
    """Return the fields of a module of the model file: layers by chunk and rank, how many first blocks recompute."""
    held = [len(blocks_of(plan.model, stage, tower)) for stage in plan.stages]
    pp = plan.dims.pp
    rows = [held[start : start + pp] for start in range(0, len(held), pp)]
    found: dict[str, object] = {"pipeline_num_layers": rows if plan.num_chunks > 1 else held}
    if most:
        found |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": most}
    return found


def _most(model: ModelSpec, stages: Sequence[Stage], tower: Tower) -> int:
    return max(len(recomputed_blocks(model, stage, tower)) for stage in stages)


def _warnings(
    model: ModelSpec, stages: Sequence[Stage], runs: Sequence[Stage], counts: Mapping[Tower, int]
) -> Iterator[str]:
    for tower, most in counts.items():
        planned, run = ([recomputed_blocks(model, stage, tower) for stage in some] for some in (stages, runs))
        if planned != run:
            yield (
                f"MindSpeed-MM recomputes the first {most} {tower} blocks of every stage, {sum(map(len, run))} in all; "
                f"{sum(map(len, planned))} are planned"
            )


def _unsupported_cuts(model: ModelSpec) -> frozenset[int]:
    """Return all but those between two blocks of a tower and the one before the token embedding."""
    embed = model.indices("language", "embed")[0]
    return frozenset(
        cut
        for cut in range(1, len(model.layers))
        if cut != embed and not any(is_block(model, cut - 1, x) and is_block(model, cut, x) for x in _TOWERS)
    )


def _can_run(model: ModelSpec, _pp: int) -> Expressible:
    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        vision, language = (max(len(blocks_of(model, stage, tower)) for stage in stages) for tower in _TOWERS)
        tower_first = [(n, 0) for n in range(vision + 1)] + [(vision, n) for n in range(1, language + 1)]
        decoder_first = [(0, n) for n in range(language + 1)] + [(n, language) for n in range(1, vision + 1)]
        for ladder in (tower_first, decoder_first):
            yield [recompute_first(model, stages, dict(zip(_TOWERS, counts, strict=True))) for counts in ladder]

    _refuse_family(model)
    return Expressible(
        forbidden_cuts=_unsupported_cuts(model),
        tiers=full_blocks,
        ladders=ladders,
        choices={"host": ("megatron",), "schedule": SCHEDULES, "zero_stage": (1, 0)},
        tp_degrees=lambda tp: not head_problems(model, tp),
    )


def _refuse_family(model: ModelSpec) -> None:
    if model.family not in FAMILIES:
        raise UnsupportedPlanError(f"MindSpeed-MM runs {' and '.join(FAMILIES)}, not {model.family}: use megatron")


TARGETS = {
    "mindspeed-mm": Target(
        title="MindSpeed-MM",
        checked_with="its sources at 57069cd5, by `bench/hosts.py`; not run",
        packs=None,
        can=_can_run,
        export=export,
    )
}
