"""Our stages against torchtitan's own configuration and module splitter; needs torch and torchtitan 0.3.0.

    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0

The model is a stand-in with the children of torchtitan's vision-language models: the splitter looks at names alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from random import Random
from types import SimpleNamespace

import pytest

from trimtab.adapters.running import Decided
from trimtab.adapters.torchtitan import export, titan_names, titan_unsupported_cuts
from trimtab.models.describe import describe
from trimtab.specs import ParallelDims, RecomputeChoice, stages_between

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch", reason="torchtitan needs torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan", reason="needs torchtitan 0.3.0", exc_type=ImportError)
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping, _split_module
    from torchtitan.protocols.module import ModuleDict

MODEL = dataclasses.replace(describe("Qwen2.5-VL-7B"), family="qwen3_5")  # which torchtitan has
NUM_BLOCKS = len(MODEL.indices("language", "block"))


class Stand(torch.nn.Module):
    """The children of torchtitan's Qwen3.5 vision-language model, each a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_encoder = torch.nn.Linear(1, 1)
        self.tok_embeddings = torch.nn.Linear(1, 1)
        self.layers = ModuleDict({str(i): torch.nn.Linear(1, 1) for i in range(NUM_BLOCKS)})
        self.norm = torch.nn.Linear(1, 1)
        self.lm_head = torch.nn.Linear(1, 1)


def held_by(part: torch.nn.Module) -> list[str]:
    names = [name for name, child in part.named_children() if child is not None and name != "layers"]
    return sorted(names + [f"layers.{key}" for key in part.layers])


@pytest.mark.parametrize("seed", range(10))
def test_torchtitan_splits_a_model_as_the_plan_does(seed):
    rng = Random(seed)
    pp = rng.choice((2, 3, 4))
    allowed = [c for c in range(1, len(MODEL.layers)) if c not in titan_unsupported_cuts(MODEL)]
    schedule, chunks = rng.choice((("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)))
    stages = stages_between((0, *sorted(rng.sample(allowed, pp * chunks - 1)), len(MODEL.layers)))
    dims = ParallelDims(dp=2, pp=pp)
    made = {"schedule": schedule, "num_chunks": chunks, "num_microbatches": 4 * pp}
    plan = Decided(model=MODEL, stages=stages, dims=dims, **made)
    config = ParallelismConfig(**export(plan, None).fields["parallelism"])
    parts = config.module_fqns_per_model_part
    assert parts is not None
    names = titan_names(MODEL)
    whole, seen = Stand(), []
    for stage, part in zip(stages, parts, strict=True):
        held = held_by(_split_module(whole, part))
        assert held == sorted(name for i in range(stage.start, stage.stop) for name in names[i])
        seen += held
    assert sorted(seen) == held_by(whole)

    mapping = [
        _get_pp_rank_to_stage_indices_mapping(rank, pp, config.pipeline_parallel_schedule, len(stages))
        for rank in range(pp)
    ]
    assert sorted(s for ranks in mapping for s in ranks) == list(range(len(stages)))
    assert {len(ranks) for ranks in mapping} == {chunks}


@pytest.mark.parametrize("tier", ["full", "selective", None])
def test_torchtitan_has_the_recompute_policies_that_we_name(tier):
    block = MODEL.indices("language", "block")[0]
    stages = stages_between((0, block + 3, len(MODEL.layers)))
    if tier is not None:
        first = dataclasses.replace(stages[0], recompute=(RecomputeChoice(tier=tier, layers=(block,)),))
        stages = (first, stages[1])
    plan = Decided(model=MODEL, stages=stages, dims=ParallelDims(pp=2), schedule="1F1B", num_microbatches=4)
    found = export(plan, None)
    cfg = SimpleNamespace(parallelism=ParallelismConfig(), training=SimpleNamespace())
    exec(found.text, {"cfg": cfg})
    assert {f.name for f in dataclasses.fields(cfg.parallelism)} >= set(found.fields["parallelism"])
    expected = {"full": "FullAC", "selective": "SelectiveAC"}.get(tier or "")
    if expected is None:
        assert cfg.activation_checkpoint is None
    else:
        assert isinstance(cfg.activation_checkpoint, getattr(activation_checkpoint, expected).Config)
