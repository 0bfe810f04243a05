"""A plan's decisions as data for torch.distributed.pipelining: modules, rank and recompute of each stage.

torch.distributed.pipelining takes stages that are modules already; it has no format of its own for who holds what, so
this one is ours, plain enough for JSON. Class names checked against torch 2.13 by tests/torch/test_torch_pipelining.py.
"""

from __future__ import annotations

import json

from trimtab.adapters.blocks import TIERS
from trimtab.adapters.running import Decided, Exported, Target
from trimtab.options import ScheduleName
from trimtab.partition.schedules import device_of_stage
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import tiers_of

SCHEDULE_CLASSES: dict[ScheduleName, str] = {
    "1F1B": "Schedule1F1B",
    "GPipe": "ScheduleGPipe",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "ZBH1": "ScheduleInterleavedZeroBubble",  # with one stage a rank
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
}


def export(plan: Decided, _price: float | None) -> Exported:
    """All that a script needs to build stages and schedule, a stage a line; every split can be said.

    Of each stage its number, its rank in the pipeline's process group, its modules as Hugging Face spells them, in
    forward order, and those to wrap in torch.utils.checkpoint: plain, with a policy that keeps the results of matrix
    products (selective), or with one that keeps the results of fused attention alone. Of tied modules on different
    stages the gradients are to be summed after every step.
    """
    model, dims = plan.model, plan.dims
    names = [layer.name for layer in model.layers]
    stages: list[dict[str, object]] = []
    held: dict[str, int] = {}
    for stage in plan.stages:
        chosen = sorted(tiers_of(stage).items())
        tiers = {tier: [names[i] for i, own in chosen if own == tier] for tier in TIERS}
        modules = names[stage.start : stage.stop]
        held |= dict.fromkeys(modules, stage.index)
        stages.append(
            {
                "stage": stage.index,
                "rank": device_of_stage(plan.schedule, stage.index, num_devices=dims.pp, num_chunks=plan.num_chunks),
                "modules": modules,
                "recompute": tiers["full"],
                "recompute_selective": tiers["selective"],
                "recompute_attention": tiers["attention"],
            }
        )
    tied = [(a, b) for a, b in model.tied if held.get(a) != held.get(b)]
    beside = [
        f"{b} shares the weight of {a} on another stage, and torch.distributed.pipelining does not sum their "
        "gradients: all-reduce both before every optimizer step"
        for a, b in tied
    ]
    if dims.pp > 1:
        beside.append(
            "stock stages take one shape for all micro-batches: pad the packs, or use `trimtab train`, whose stages "
            "take each pack's own shape"
        )
    fields: dict[str, object] = {
        "schedule_class": SCHEDULE_CLASSES[plan.schedule],
        "num_stages": len(stages),
        "pp": dims.pp,
        "num_microbatches": plan.num_microbatches,
        "tied": tied,
        "stages": stages,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items() if key != "stages"]
    each = ",\n  ".join(map(json.dumps, stages))
    text = "{\n " + ",\n ".join([*lines, f'"stages": [\n  {each}\n ]']) + "\n}"
    return Exported(text=text, fields=fields, runs=plan.stages, beside="\n".join(beside) or None)


TARGETS = {
    "torch-pipelining": Target(
        title="torch.distributed.pipelining",
        checked_with="torch 2.13, its own class names and ranks",
        packs="`PlanDataLoader`, in a loop of the user's own",
        can=lambda _model, _pp: Expressible(choices={"tp": (1,), "fills_pipeline": (True,)}),
        export=export,
    )
}
