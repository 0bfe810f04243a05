"""Two data-parallel ranks with the whole model each, that share images in a pipeline of one stage. Needs torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pipeline_runs import MICROBATCHES, TEXT_ALONE, WITH_VIDEO, collate, dispatch_by, errors_of, make_packs, step_alone
from rounding import BOUNDS
from tiny_packs import TinyPacks

from refusals import refused
from trimtab.balance.images import keep_at_home, share_images
from trimtab.errors import TrimtabError, UnsupportedPlanError
from trimtab.runtime.pipeline.image_dispatch import read_images
from trimtab.runtime.pipeline.pipeline import Pipeline
from trimtab.runtime.vision.inputs import find_family, join_inputs, tower_flops
from trimtab.torch import PipelineLayout, build_pipeline


def run_all(rank: int, families: str) -> None:
    own = [dist.new_group([r]) for r in range(2)][rank]
    for family in families.split():
        for contents in ((MICROBATCHES, TEXT_ALONE), (WITH_VIDEO, MICROBATCHES)):
            run_step(rank, own, family, contents)
    run_disagreements(rank, own)
    run_cut_tower(rank, own)


def build(packs: TinyPacks, own: Any, *, pooling: int = 1, num: int = 4, **more: Any) -> Pipeline:
    layout = PipelineLayout(
        stages=(packs.layers,), schedule="1F1B", num_microbatches=num, images=dispatch_by(pooling), **more
    )
    return build_pipeline(packs.model, layout, pp_group=own, dp_group=dist.group.WORLD)


def run_step(rank: int, own: Any, family: str, contents: Sequence[Sequence[Sequence[int]]]) -> None:
    """Loss and gradients of one process; the tower's first layer sees the patches that the assignment says."""
    alone = make_packs(family)
    loss = step_alone(alone.model, [batch for each in contents for batch in collate(alone, each)])
    expected = {name: p.grad for name, p in alone.model.named_parameters(remove_duplicate=False)}
    packs = make_packs(family)
    pipeline = build(packs, own)
    dispatch = pipeline.stages[0].images
    assert dispatch is not None
    seen: list[int] = []
    first = pipeline.stages[0].model.get_submodule(packs.layers[0])
    hook = first.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    result = pipeline.step(collate(packs, contents[rank]))
    hook.remove()
    assert abs(float(result.loss) - loss) <= BOUNDS[torch.float32] * loss, (family, float(result.loss), loss)
    worst, whole = errors_of(pipeline, expected)
    assert max(whole, worst) <= BOUNDS[torch.float32], (family, contents, whole, worst)

    # the load by hand, from the sizes of both ranks' images
    model = packs.model
    family_of, held, encoded, calls = find_family(model.config), np.zeros(2, int), np.zeros(2, int), []
    for pair in zip(*(collate(packs, each) for each in contents), strict=True):
        read = [list(read_images(batch, family_of, model.config).values()) for batch in pair]
        both = join_inputs([*read[0], *read[1]])
        if both is None:
            continue
        home = np.repeat([0, 1], [sum(map(len, inputs)) for inputs in read])
        cost = tower_flops(model.config).of(both.patches, patches_windowed=both.windowed)
        shares = keep_at_home(share_images(cost, 2), home, both.patches)
        held += np.bincount(home, both.patches, 2).astype(int)
        encoded += [both.patches[shares.atoms_of(r)].sum() for r in range(2)]
        share = shares.atoms_of(rank)
        calls.append(
            int(both.parts[0].lengths[share].sum()) if len(share) else len(dispatch.tower.template.parts[0].rows)
        )
    load = pipeline.image_load
    assert load is not None
    assert (load.held, load.encoded) == (tuple(held), tuple(encoded)), (family, contents)
    assert seen == calls, (family, contents)


def run_disagreements(rank: int, own: Any) -> None:
    """One rank is odd: both are told, at once, before anything is exchanged; and both go on."""
    packs = make_packs("qwen2_5_vl")
    batches = collate(packs, MICROBATCHES)
    pipeline = build(packs, own)
    told = "rank 1"

    def changed(**keys: Any) -> list[dict[str, Any]]:
        return [{**batches[0], **keys}, *batches[1:]] if rank else batches

    with pytest.raises(TrimtabError, match="torch.float64" if rank else told):
        pipeline.step(changed(pixel_values=batches[0]["pixel_values"].double()))
    with pytest.raises(TrimtabError, match="grid_thw" if rank else told):
        pipeline.step(changed(image_grid_thw=batches[0]["image_grid_thw"] * 2))
    others = build(make_packs("qwen2_5_vl"), own, num=3 if rank else 4)
    with refused(TrimtabError, "1", "3"):
        others.step(batches[:3] if rank else batches)
    others = build(make_packs("qwen2_5_vl"), own, pooling=1 + rank)
    with refused(TrimtabError, "1"):
        others.step(batches)
    pipeline.step(batches)


def run_cut_tower(rank: int, _own: Any) -> None:
    """Refused before anything is built, whichever stage a rank has."""
    packs = make_packs("qwen2_5_vl")
    layers = packs.layers
    stages = (layers[:3], layers[3:])
    layout = PipelineLayout(stages=stages, schedule="1F1B", num_microbatches=2, images=dispatch_by(1))
    both = dist.group.WORLD
    with refused(UnsupportedPlanError, "model.visual"):
        build_pipeline(packs.model, layout, pp_group=both, dp_group=both)
    assert build_pipeline(packs.model, replace(layout, images=None), pp_group=both).image_load is None
