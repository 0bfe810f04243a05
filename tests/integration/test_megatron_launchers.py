"""Our Megatron-Bridge and ms-swift settings against the sources of both; neither imports without a GPU stack.

    pip install --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1 ms-swift==4.6.0

Bridge, 0.3.1 and 0.6.2 with megatron-core 0.19.2: every name is a field of the classes that its configuration is made
of, and Megatron-Core's own configuration takes the model's part. ms-swift: the fields are cut out of its dataclasses,
and Transformers' parser, which ms-swift uses, reads our command with them.
"""

import ast
import dataclasses
import importlib.metadata
import shlex
import sys
import typing
import warnings
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest

from trimtab.adapters import megatron_hosts
from trimtab.adapters.running import Decided, Launch
from trimtab.models.describe import describe
from trimtab.options import Dispatcher
from trimtab.plan.plan import VisionDecision
from trimtab.specs import ParallelDims, RecomputeChoice, stages_between

pytestmark = pytest.mark.integration

MODEL = describe("Qwen2.5-VL-7B")
BLOCK = MODEL.indices("language", "block")[0]
VISION = tuple(MODEL.indices("vision", "block"))


def decided(tier: str | None, *, zero_stage: int = 1, num_chunks: int = 1) -> Decided:
    cuts = (
        [BLOCK + 4 + 3 * s for s in range(4 * num_chunks - 1)]
        if num_chunks == 1
        else [BLOCK + 3 * s for s in range(1, 8)]
    )
    stages = stages_between((0, *cuts, len(MODEL.layers)))
    if tier is not None:
        first = dataclasses.replace(stages[0], recompute=(RecomputeChoice(tier=tier, layers=(*VISION, BLOCK)),))
        stages = (first, *stages[1:])
    return Decided(
        model=MODEL,
        stages=stages,
        dims=ParallelDims(dp=2, pp=4, tp=2, cp=2),
        schedule="1F1B" if num_chunks == 1 else "Interleaved1F1B",
        num_microbatches=8,
        num_chunks=num_chunks,
        zero_stage=zero_stage,
        max_tokens=8192,
    )


def of_experts(dispatcher: Dispatcher, **dims: int) -> Decided:
    model = describe("Qwen3-VL-30B-A3B")
    stages = stages_between((0, model.indices("language", "block")[20], len(model.layers)))
    dims = ParallelDims(dp=4, pp=2, **dims)
    return Decided(
        model=model,
        stages=stages,
        dims=dims,
        schedule="1F1B",
        num_microbatches=8,
        dispatcher=dispatcher,
        max_tokens=8192,
    )


CASES = [
    of_experts("alltoall", ep=4),
    of_experts("deepep", tp=2, cp=2, ep=8, etp=1),
    of_experts("alltoall", tp=2, etp=2),
    decided(None),
    decided(None, zero_stage=0),
    decided("full"),
    decided("selective"),
    decided(None, num_chunks=2),
    dataclasses.replace(decided(None), launch=Launch(grad_dtype="bf16")),
]


def source(distribution: str, path: str) -> ast.Module:
    """A file of an installed distribution, parsed."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {distribution}: pip install --no-deps, see above")
    (file,) = [file for file in files if str(file) == path]
    return ast.parse(file.read_text(encoding="utf-8"))


def fields_of(tree: ast.Module, *classes: str) -> dict[str, ast.AnnAssign]:
    """Annotated fields of these classes; of all of the file's if none is named."""
    return {
        item.target.id: item
        for node in tree.body
        if isinstance(node, ast.ClassDef) and (not classes or node.name in classes)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def core_training_fields() -> set[str]:
    """Those of Megatron-Core that the newer Bridge's own classes inherit."""
    files = [str(file) for file in importlib.metadata.files("megatron-core") or []]
    trees = [source("megatron-core", file) for file in files if file.startswith("megatron/training/config/")]
    return {name for tree in trees for name in fields_of(tree)}


def provider_fields() -> set[str]:
    """The fields that the providers of both families of the cases have."""
    paths = ("qwen25_vl_provider", "qwen3_vl_provider")
    found = [set(fields_of(source("megatron-bridge", f"megatron/bridge/models/qwen_vl/{path}.py"))) for path in paths]
    return set.intersection(*found)


@pytest.mark.parametrize("decided", CASES)
def test_every_field_of_bridge_is_there_and_megatron_takes_the_models(decided):
    export = megatron_hosts.export_bridge(decided)
    container = fields_of(source("megatron-bridge", "megatron/bridge/training/config.py"))
    provider = fields_of(source("megatron-bridge", "megatron/bridge/models/gpt_provider.py"), "GPTModelProvider")
    pytest.importorskip("torch", reason="megatron-core needs torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if find_spec("triton") is None:  # a kernel of experts on GPUs, which 0.19 imports with its configuration
            sys.modules.setdefault("megatron.core.transformer.moe.ops.paged_stash", MagicMock())
        pytest.importorskip("megatron.core.transformer", reason="needs megatron-core 0.16.1", exc_type=ImportError)
        import torch
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig
    core = {field.name for field in dataclasses.fields(TransformerConfig)}
    precision = "megatron/bridge/training/mixed_precision.py"
    towers = {f"freeze_{name}" for name in megatron_hosts._FREEZES}
    known = {
        "cfg": set(container),
        "cfg.mixed_precision": set(fields_of(source("megatron-bridge", precision), "MixedPrecisionConfig")),
        "cfg.model": core | set(provider) | (towers & provider_fields()),
        "cfg.optimizer": {field.name for field in dataclasses.fields(OptimizerConfig)},
        "cfg.train": set(container) | core_training_fields(),
        "cfg.ddp": {field.name for field in dataclasses.fields(DistributedDataParallelConfig)},
    }
    for line in ast.parse(export.text).body:
        assert isinstance(line, ast.Assign)
        (target,) = line.targets
        owner, _, name = ast.unparse(target).rpartition(".")
        assert owner == "cfg" or owner.removeprefix("cfg.") in container, owner
        assert name in known[owner], (owner, name)
    model = {
        name.removeprefix("cfg.model."): list(value) if isinstance(value, tuple) else value
        for name, value in export.fields.items()
        if name.startswith("cfg.model.") and name.removeprefix("cfg.model.") in core  # others are the provider's
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=len(decided.model.indices("language", "block")),
            hidden_size=3584,
            num_attention_heads=28,
            num_query_groups=4,
            pipeline_dtype=torch.bfloat16,
            num_moe_experts=128 if decided.model is not MODEL else None,
            add_bias_linear=False,
            **model,
        )
    assert config.pipeline_model_parallel_layout is not None
    assert (config.context_parallel_size, config.expert_model_parallel_size) == (decided.dims.cp, decided.dims.ep)
    assert config.expert_tensor_parallel_size == decided.dims.expert_tp


@pytest.mark.parametrize("decided", CASES)
def test_swift_reads_our_command_as_we_mean_it(decided):
    export = megatron_hosts.export_swift(decided)
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    known = {}
    for path in ("arguments/base_args/base_args", "arguments/base_args/data_args", "megatron/arguments/megatron_args"):
        known |= fields_of(source("ms-swift", f"swift/{path}.py"))
    names = {**vars(typing), "torch": torch, "field": dataclasses.field}
    given = export.fields
    fields = []
    for name in given:
        assert name in known, name
        default = known[name].value
        assert default is not None
        annotation = eval(ast.unparse(known[name].annotation), names)
        value = eval(ast.unparse(default), names)
        fields.append(
            (name, annotation, value if isinstance(value, dataclasses.Field) else dataclasses.field(default=value))
        )
    words = shlex.split(export.text.replace("\\\n", " "))
    assert words[:2] == ["megatron", "sft"]
    parser = transformers.HfArgumentParser(dataclasses.make_dataclass("Arguments", fields))
    (read,) = parser.parse_args_into_dataclasses(words[2:])
    for name, value in given.items():
        assert getattr(read, name) == (list(value) if isinstance(value, tuple) else value), name


def test_what_we_switch_off_is_on_in_swift_by_default():
    known = fields_of(source("ms-swift", "swift/megatron/arguments/megatron_args.py"))
    assert ast.unparse(known["recompute_granularity"].value) == "'selective'"
    assert ast.unparse(known["use_distributed_optimizer"].value) == "True"
    tree = ast.unparse(source("ms-swift", "swift/megatron/arguments/megatron_args.py"))
    assert "self.vit_gradient_checkpointing = not self.freeze_vit" in tree
    for name, default in (("freeze_llm", "False"), ("freeze_vit", "True"), ("freeze_aligner", "True")):
        assert ast.unparse(known[name].value) == default


def test_mimo_takes_both_grids():
    """Its own classes check ours: no gaps, dp that divide, the micro-batch of all ranks."""
    model = describe("Qwen3.5-27B")
    own = VisionDecision(
        group="own", degree=2, exchange="send", pooling=1, rule="balanced", objective="time", reduction=None
    )
    stages = stages_between((0, model.indices("language", "block")[30], len(model.layers)))
    dims = ParallelDims(dp=4, pp=2, tp=2)
    plan = Decided(
        model=model, stages=stages, dims=dims, schedule="1F1B", num_microbatches=8, global_batch=64, vision=own
    )
    fields = megatron_hosts.export_bridge(plan).fields
    path = "megatron/bridge/models/megatron_mimo/megatron_mimo_config.py"
    if not any(str(file) == path for file in importlib.metadata.files("megatron-bridge") or []):
        pytest.skip("needs megatron-bridge 0.6")
    tree = source("megatron-bridge", path)
    tree.body = [x for x in tree.body if not isinstance(x, ast.ImportFrom) or "megatron" not in (x.module or "")]
    names: dict[str, typing.Any] = {"MIMO_LANGUAGE_MODULE_KEY": "language", "__name__": __name__}
    exec(compile(tree, path, "exec"), names)
    grids = {
        module: names["ModuleParallelismConfig"](
            **{name.removeprefix(f"{module}."): x for name, x in fields.items() if name.startswith(f"{module}.")}
        )
        for module in ("language", "images")
    }
    names["MegatronMIMOParallelismConfig"](module_parallelisms=grids).finalize(18)
    assert all(fields["cfg.train.micro_batch_size"] % grid.data_parallel_size == 0 for grid in grids.values())
    assert fields["cfg.train.global_batch_size"] % fields["cfg.train.micro_batch_size"] == 0
