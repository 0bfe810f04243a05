"""Which pipelines are run beside one process: families x schedules x places of the cuts. Needs torch."""

from __future__ import annotations

from pipeline_runs import MICROBATCHES, MIRRORED, TEXT_ALONE, WITH_VIDEO, Case

TEXT = "model.language_model"
EMBED, NORM, HEAD = f"{TEXT}.embed_tokens", f"{TEXT}.norm", "lm_head"
PROJECTOR, MERGER = "model.multi_modal_projector", "model.visual.merger"


def layer(i: int) -> str:
    return f"{TEXT}.layers.{i}"


def intern(i: int) -> str:
    return f"model.vision_tower.encoder.layer.{i}"


def clip(i: int) -> str:
    return f"model.vision_tower.encoder.layers.{i}"


def block(i: int) -> str:
    return f"model.visual.blocks.{i}"


def deep(i: int) -> str:
    return f"model.visual.deepstack_merger_list.{i}"


def both(family: str, *cuts: str, chunks: int = 2, **options: object) -> list[Case]:
    """The two schedules with several stages a device."""
    return [
        Case(family=family, schedule=name, cuts=cuts, chunks=chunks, **options)  # type: ignore[arg-type]
        for name in ("Interleaved1F1B", "ZBVZeroBubble")
    ]


CASES = [
    # the whole model on three and on four ranks: inside the tower, behind it, inside the language model, uneven
    Case(family="internvl", schedule="1F1B", cuts=(intern(2), layer(1)), ranks=3),
    Case(family="qwen2_5_vl", schedule="GPipe", cuts=(block(1), EMBED), ranks=3),
    Case(family="llava", schedule="1F1B", cuts=(PROJECTOR, NORM), ranks=3),
    Case(family="qwen3_vl", schedule="1F1B", cuts=(block(2), layer(1)), ranks=3),
    Case(family="internvl tied", schedule="GPipe", cuts=(intern(1), PROJECTOR, HEAD), ranks=4),
    Case(family="qwen3_vl", schedule="1F1B", cuts=(deep(0), MERGER, layer(1)), ranks=4),
    # beside data parallelism, one replica with text alone
    Case(family="qwen2_5_vl", schedule="1F1B", cuts=(block(3),), dp=2, packs=(MICROBATCHES, TEXT_ALONE)),
    Case(family="internvl tied", schedule="1F1B", cuts=(EMBED,), dp=2, packs=(TEXT_ALONE, MICROBATCHES)),
    Case(family="llava", schedule="GPipe", cuts=(layer(2),), dp=2, packs=(MICROBATCHES, (*MICROBATCHES[::-1],))),
    *both("qwen2_5_vl tied", block(2), EMBED, layer(1), dp=2, packs=(TEXT_ALONE, MICROBATCHES)),
    # two ranks, two stages
    Case(family="internvl", schedule="1F1B", cuts=(EMBED,)),
    Case(family="qwen2_5_vl", schedule="1F1B", cuts=(block(0),)),
    Case(family="qwen2_5_vl", schedule="1F1B", cuts=(MERGER,), packs=(WITH_VIDEO,)),
    Case(family="llava taps", schedule="1F1B", cuts=(clip(2),)),
    Case(family="llava tied", schedule="1F1B", cuts=(EMBED,)),
    Case(family="qwen3_vl", schedule="GPipe", cuts=("model.visual.pos_embed",)),
    Case(family="qwen3_vl tied", schedule="1F1B", cuts=(layer(0),)),
    Case(family="qwen3_vl", schedule="GPipe", cuts=(layer(1),), packs=(WITH_VIDEO,)),
    Case(family="qwen2_vl tied", schedule="1F1B", cuts=(block(1),)),
    Case(family="qwen3_vl_moe", schedule="1F1B", cuts=(layer(1),)),
    # two ranks, four stages
    *both("internvl tied", intern(1), PROJECTOR, layer(1)),
    *both("qwen2_5_vl", block(1), MERGER, layer(2)),
    *both("llava taps", clip(0), clip(2), layer(1)),
    *both("qwen3_vl tied", block(1), MERGER, layer(1)),
    # frozen towers, frozen text, a micro-batch that no gradient reaches
    Case(family="internvl", schedule="1F1B", cuts=(intern(1), PROJECTOR), ranks=3, frozen=("model.vision_tower",)),
    Case(family="qwen3_vl", schedule="GPipe", cuts=(EMBED,), frozen=("model.visual",)),
    Case(family="qwen2_5_vl", schedule="1F1B", cuts=(block(2),), frozen=("model.language_model", "lm_head")),
    Case(
        family="llava",
        schedule="1F1B",
        cuts=(PROJECTOR,),
        frozen=("model.vision_tower", "model.language_model", "lm_head"),
    ),
    *both("internvl", intern(1), PROJECTOR, layer(1), frozen=("model.vision_tower",)),
    *both("llava", clip(1), PROJECTOR, EMBED, frozen=("model.vision_tower", "model.multi_modal_projector")),
    *both("qwen2_5_vl", block(1), EMBED, layer(1), frozen=("model.language_model", "lm_head")),
    # bfloat16 across the cuts
    Case(family="internvl", schedule="1F1B", cuts=(intern(1),), dtype="bfloat16"),
    Case(family="qwen3_vl", schedule="1F1B", cuts=(layer(1),), dtype="bfloat16"),
    # recompute
    Case(family="internvl", schedule="1F1B", cuts=(intern(2),), recompute="full"),
    Case(family="qwen2_5_vl", schedule="GPipe", cuts=(layer(1),), recompute="full"),
    Case(family="qwen3_vl", schedule="1F1B", cuts=(layer(1),), recompute="selective"),
    *both("qwen2_5_vl", block(1), MERGER, layer(2), recompute="full"),
    Case(family="llava", schedule="Interleaved1F1B", cuts=(clip(1), EMBED, layer(2)), chunks=2, recompute="selective"),
    # data-parallel ranks share images: stage 0 the tower alone, or with text behind it; ranks and micro-batches without
    # images; several micro-batches in one call; clips by their frames; every schedule
    Case(family="qwen2_5_vl", schedule="1F1B", cuts=(EMBED,), dp=2, packs=(MICROBATCHES, TEXT_ALONE), shared=1),
    Case(family="internvl tied", schedule="1F1B", cuts=(layer(1),), dp=2, packs=(TEXT_ALONE, MICROBATCHES), shared=3),
    Case(family="llava taps", schedule="GPipe", cuts=(layer(2),), dp=2, packs=(MICROBATCHES, MIRRORED), shared=2),
    Case(family="qwen3_vl_moe", schedule="GPipe", cuts=(EMBED,), dp=2, packs=(TEXT_ALONE, TEXT_ALONE), shared=1),
    *both("qwen2_5_vl", layer(0), layer(1), layer(2), dp=2, packs=(WITH_VIDEO, TEXT_ALONE), shared=2),
    Case(
        family="qwen2_5_vl",
        schedule="1F1B",
        cuts=(layer(0),),
        dp=2,
        packs=(MICROBATCHES, MIRRORED),
        shared=1,
        recompute="full",
    ),
    Case(
        family="internvl",
        schedule="1F1B",
        cuts=(EMBED,),
        dp=2,
        packs=(MICROBATCHES, TEXT_ALONE),
        shared=1,
        frozen=("model.vision_tower",),
    ),
    # the tower on every rank of a pipeline: four stages, or two beside data parallelism; fewer images than ranks; a
    # replica of text alone; frozen towers; videos; several stages a device
    Case(family="qwen2_5_vl", schedule="1F1B", cuts=(layer(0), layer(1), layer(2)), ranks=4, replica="kept"),
    Case(family="internvl tied", schedule="GPipe", cuts=(EMBED, layer(0), layer(1)), ranks=4, replica="again"),
    Case(family="qwen3_vl", schedule="1F1B", cuts=(layer(0), layer(1), NORM), ranks=4, replica="kept"),
    Case(
        family="gemma3",
        schedule="1F1B",
        cuts=(layer(0), layer(1), NORM),
        ranks=4,
        replica="again",
        packs=(((0,), (1, 5), (5,), (1,)),),
    ),
    Case(
        family="qwen2_5_vl",
        schedule="1F1B",
        cuts=(layer(1),),
        dp=2,
        packs=(MICROBATCHES, TEXT_ALONE),
        replica="again",
    ),
    Case(family="qwen3_vl", schedule="1F1B", cuts=(layer(1),), dp=2, packs=(MICROBATCHES, WITH_VIDEO), replica="kept"),
    Case(family="internvl", schedule="1F1B", cuts=(layer(1),), replica="kept", frozen=("model.vision_tower",)),
    Case(family="qwen2_5_vl", schedule="GPipe", cuts=(layer(1),), replica="kept", frozen=("model.visual",)),
    Case(
        family="qwen2_5_vl",
        schedule="1F1B",
        cuts=(layer(1),),
        replica="kept",
        frozen=("model.language_model", "lm_head"),
    ),
    Case(family="gemma3", schedule="1F1B", cuts=(layer(1),), replica="kept"),
    Case(family="internvl", schedule="1F1B", cuts=(layer(1),), replica="kept", packs=(TEXT_ALONE,)),
    *both("qwen3_vl tied", layer(0), layer(1), layer(2), replica="kept"),
]
