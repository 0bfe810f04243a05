"""Our lines against ColossalAI's own configuration class and the arguments of its plugin; needs colossalai 0.5.0.

    pip install --no-deps colossalai==0.5.0

Importing the package needs what a GPU run does (it pins torch <= 2.5.1): its files are read, and the configuration's,
which imports nothing of it, is run.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace

import pytest

from trimtab.adapters.blocks import blocks_of, recomputed_blocks
from trimtab.adapters.colossalai import colossal_export, colossal_unsupported_cuts
from trimtab.models.describe import describe
from trimtab.plan.expressible import as_stages
from trimtab.specs import ParallelDims, RecomputeChoice

pytestmark = pytest.mark.integration

_SPEC = importlib.util.find_spec("colossalai")
if _SPEC is None or _SPEC.origin is None:
    pytest.skip("needs colossalai 0.5.0", allow_module_level=True)
HOME = Path(_SPEC.origin).parent
MODEL = describe("Qwen2.5-VL-7B")


def load(path: Path) -> ModuleType:
    """One file of the package as a module by itself."""
    spec = importlib.util.spec_from_file_location(f"colossalai_alone_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def arguments_of(path: Path, class_name: str) -> set[str]:
    (found,) = (
        x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ClassDef) and x.name == class_name
    )
    (init,) = (x for x in found.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    return {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)}


@pytest.mark.parametrize("seed", range(20))
def test_colossalai_recomputes_the_blocks_that_we_say(seed):
    rng = Random(seed)
    pp = rng.choice((2, 3, 4))
    allowed = [c for c in range(1, len(MODEL.layers)) if c not in colossal_unsupported_cuts(MODEL)]
    stages = as_stages(sorted(rng.sample(allowed, pp - 1)), len(MODEL.layers))
    planned = []
    for stage in stages:
        blocks = blocks_of(MODEL, stage)
        chosen = tuple(sorted(rng.sample(blocks, rng.randint(0, len(blocks)))))
        choice = (RecomputeChoice(tier="full", layers=chosen),) if chosen else ()
        planned.append(type(stage)(index=stage.index, start=stage.start, stop=stage.stop, recompute=choice))
    export = colossal_export(
        model=MODEL, stages=planned, dims=ParallelDims(dp=2, pp=pp), schedule="1F1B", num_microbatches=8
    )
    if not export.recomputes:
        assert export.num_ckpt_layers_per_stage is None
        return
    config_class = load(HOME / "shardformer/shard/grad_ckpt_config.py").PipelineGradientCheckpointConfig
    lines = [line for line in export.python().splitlines() if not line.startswith("from ")]
    names = {
        "PipelineGradientCheckpointConfig": config_class,
        "HybridParallelPlugin": lambda **given: SimpleNamespace(**given),
        "language_model": SimpleNamespace(gradient_checkpointing_enable=lambda: None),
    }
    exec("\n".join(lines), names)
    config = names["plugin"].gradient_checkpoint_config
    for stage, run in zip(planned, export.runs, strict=True):
        blocks = blocks_of(MODEL, stage)
        # the call of every pipeline forward (modeling/qwen2.py), which then recomputes `idx - start_idx < number`
        number = config.get_num_ckpt_layers(stage=stage.index, num_stages=pp, num_layers=len(blocks))
        assert tuple(recomputed_blocks(MODEL, run)) == blocks[:number]
        assert number == stage.num_recomputed()


def test_the_plugin_takes_our_arguments():
    whole = as_stages((colossal_free_cut(),), len(MODEL.layers))
    export = colossal_export(model=MODEL, stages=whole, dims=ParallelDims(pp=2), schedule="1F1B", num_microbatches=4)
    known = arguments_of(HOME / "booster/plugin/hybrid_parallel_plugin.py", "HybridParallelPlugin")
    assert {name for name, _ in export.plugin} | {"gradient_checkpoint_config"} <= known


def colossal_free_cut() -> int:
    return next(c for c in range(1, len(MODEL.layers)) if c not in colossal_unsupported_cuts(MODEL))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "command"])
def test_its_pipeline_forwards_keep_to_the_numbers(name):
    text = (HOME / f"shardformer/modeling/{name}.py").read_text()
    assert "shard_config.gradient_checkpoint_config.get_num_ckpt_layers(" in text
    assert "if idx - start_idx < num_ckpt_layers:" in text
    assert "if self.gradient_checkpointing and self.training:" in text, "the switch that our last line sets"
