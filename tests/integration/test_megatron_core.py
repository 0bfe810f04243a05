"""Our Megatron flags against Megatron-Core's own classes, on a CPU; needs torch and megatron-core 0.16.1 or 0.19.2.

    pip install --no-deps megatron-core==0.16.1

Nothing here starts a process group: Megatron-Core's parser and configuration are plain Python. 0.19.2 asks for Python
3.12, but its code runs on 3.11 from its unpacked wheel (`.ci/run frameworks`).
"""

import copy
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest

from export_cases import by_counts, cut, make_model
from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.adapters.megatron_check import MegatronFlags, built_vision_layers, parse_megatron_flags, stage_counts
from trimtab.adapters.running import Decided, blocks_of
from trimtab.errors import PlanError, UnsupportedPlanError
from trimtab.specs import MlpSpec, ModelSpec, ParallelDims, RecomputeChoice, Stage

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch", reason="megatron-core needs torch")
if find_spec("triton") is None:  # a kernel of experts on GPUs, which 0.19 imports with its configuration
    sys.modules.setdefault("megatron.core.transformer.moe.ops.paged_stash", MagicMock())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Megatron-Core's: no Transformer Engine, no Apex, torch.jit
    pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        reason="needs megatron-core: pip install --no-deps megatron-core==0.16.1",
        exc_type=ImportError,
    )
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend, LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

# TransformerConfig's fields where their names differ from the flags', as Megatron-LM's argument parser maps them
FIELDS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}
NOT_OF_THE_CONFIG = {"micro_batch_size", "global_batch_size", "use_distributed_optimizer", "seq_length"}


def configure(flags: tuple[str, ...], num_layers: int, *, heads: int = 8, kv: int = 2, **more) -> TransformerConfig:
    """The configuration that Megatron-LM's argument parser makes of our flags."""
    given: dict[str, object] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            given[name] = True
        elif name == "recompute_modules":
            given[name] = [word] if given[name] is True else [*given[name], word]
        else:
            given[name] = int(word) if word.isdecimal() else word
    if "optimizer" in given:  # of another class, which has no choices of its own
        assert OptimizerConfig(optimizer=given.pop("optimizer")).optimizer in ("adam", "sgd")
    if "attention_backend" in given:
        given["attention_backend"] = AttnBackend[str(given["attention_backend"])]
    fields = {FIELDS.get(key, key): setting for key, setting in given.items() if key not in NOT_OF_THE_CONFIG}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=num_layers,
            hidden_size=64,
            num_attention_heads=heads,
            num_query_groups=kv,
            pipeline_dtype=torch.bfloat16,
            **fields,
            **more,
        )


def export(model: ModelSpec, stages: Sequence[Stage], pp: int, num_chunks: int = 1, **options) -> MegatronExport:
    options = {"dims": ParallelDims(pp=pp), "num_microbatches": 4 * pp} | options
    schedule = "1F1B" if num_chunks == 1 else "Interleaved1F1B"
    plan = Decided(model=model, stages=tuple(stages), schedule=schedule, num_chunks=num_chunks, **options)
    return megatron_flags(plan)


@pytest.mark.parametrize("seed", range(200))
def test_megatron_reads_from_our_layout_the_stages_that_we_planned(seed):
    rng = Random(seed)
    num_language, pp = rng.randint(1, 96), rng.choice((2, 2, 3, 4, 6, 8, 16))
    num_chunks = rng.choice((1, 1, 2, 3))
    model = make_model(rng.randint(0, 48), num_language)
    allowed = [c for c in range(1, len(model.layers)) if c not in unsupported_cuts(model)]
    wanted = pp * num_chunks - 1
    if wanted > len(allowed):
        num_chunks, wanted = 1, min(pp - 1, len(allowed))
        pp = wanted + 1
    stages = cut(model, *sorted(rng.sample(allowed, wanted)))
    planned = [len(blocks_of(model, stage)) for stage in stages]
    result = export(model, stages, pp, num_chunks)

    layout = PipelineParallelLayerLayout(result.layout, pp)
    layout.validate_layer_layout(num_layers=num_language, mtp_num_layers=None)
    read = [layout.layout[s % pp][s // pp].count(LayerType.decoder) for s in range(len(stages))]
    assert read == planned
    assert LayerType.embedding in layout.layout[0][0]
    assert LayerType.loss in layout.layout[(len(stages) - 1) % pp][(len(stages) - 1) // pp]

    config = configure(result.flags, num_language)
    if pp > 1:
        assert config.pipeline_model_parallel_layout.layout == layout.layout
        assert config.virtual_pipeline_model_parallel_size == (num_chunks if num_chunks > 1 else None)


def test_an_empty_first_stage_has_a_layout_and_no_count():
    model = make_model(2, 12)
    result = export(model, by_counts(model, 0, 6, 6), 3)
    assert configure(result.flags, 12).pipeline_model_parallel_layout.layout[0] == [[LayerType.embedding]]
    with pytest.raises(ValueError, match="num_layers_in_first_pipeline_stage must be larger than 0"):
        configure(("--pipeline-model-parallel-size", "3"), 12, num_layers_in_first_pipeline_stage=0)


@pytest.mark.parametrize("tiers", [("full",), ("selective",), ("full", "selective")])
def test_megatron_takes_our_recompute_flags(tiers):
    model = make_model(4, 12)
    blocks = model.indices("language", "block")
    choices = tuple(RecomputeChoice(tier=tier, layers=(blocks[i],)) for i, tier in enumerate(tiers))
    plain = cut(model, blocks[6])
    stages = [Stage(index=0, start=0, stop=plain[0].stop, recompute=choices), plain[1]]
    config = configure(export(model, stages, 2).flags, 12)
    if tiers == ("selective",):
        assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["layernorm", "mlp"])
    else:
        assert (config.recompute_granularity, config.recompute_method) == ("full", "block")
        assert config.recompute_num_layers == len(tiers)


def test_megatron_takes_our_recompute_flags_of_experts():
    model = make_model(4, 12)
    experts = MlpSpec(intermediate_size=64, gated=True, num_experts=8, experts_per_token=2)
    model = replace(model, layers=tuple(replace(x, mlp=experts) if x.kind == "block" else x for x in model.layers))
    block = model.indices("language", "block")[0]
    stages = [*cut(model, block + 6)]
    stages[0] = replace(stages[0], recompute=(RecomputeChoice(tier="selective", layers=(block,)),))
    config = configure(export(model, stages, 2).flags, 12, num_moe_experts=8, moe_ffn_hidden_size=64)
    assert config.recompute_modules == ["layernorm", "moe_act"]


@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (6, 2), (8, 1), (8, 4), (12, 3), (12, 4), (25, 25), (28, 4)])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_we_refuse_the_tensor_degrees_that_megatron_refuses(heads, kv, tp):
    model = make_model(0, 4, heads=heads, kv=kv)
    stages = cut(model, model.indices("language", "block")[2])

    def build() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TransformerConfig(
                num_layers=4,
                hidden_size=64 * heads,
                num_attention_heads=heads,
                num_query_groups=kv,
                tensor_model_parallel_size=tp,
            )

    try:
        result = export(model, stages, 2, dims=ParallelDims(pp=2, tp=tp))
    except UnsupportedPlanError:
        with pytest.raises(ValueError, match="must be a multiple"):
            build()
    else:
        build()
        assert configure(result.flags, 4, heads=heads, kv=kv).tensor_model_parallel_size == tp


@pytest.mark.parametrize("layout", ["VEt*6|t*6L", "E t*6|t*6L", "t*6|Et*6L", "Et*6|t*6", "Et*6|t*5L", "Et*6|t*3|t*3L"])
def test_megatron_refuses_what_we_never_write(layout):
    """Vision letters, blanks, misplaced E and L, wrong totals, stages that are no multiple of pp."""

    def read() -> None:
        PipelineParallelLayerLayout(layout, 2).validate_layer_layout(num_layers=12, mtp_num_layers=None)

    with pytest.raises(AssertionError):
        read()


@pytest.fixture
def on_first_rank():
    parallel_state.set_pipeline_model_parallel_rank(0)
    yield
    parallel_state.set_pipeline_model_parallel_rank(None)


def copied(config: TransformerConfig) -> TransformerConfig:
    """The 24 layers of a tower, as Megatron-LM's examples/multimodal/model.py makes them of the language model's."""
    vision = copy.deepcopy(config)
    vision.num_layers = 24
    vision.pipeline_model_parallel_size = 1
    # the names of an older Megatron-Core
    vision.first_pipeline_num_layers = None
    vision.last_pipeline_num_layers = None
    return vision


@pytest.mark.parametrize("counts", [(8, 20), (0, 28)])
def test_the_vision_tower_is_truncated_by_a_copied_split_and_whole_with_our_fields(on_first_rank, counts):
    model = make_model(24, 28)
    result = export(model, by_counts(model, *counts), 2)
    vision = copied(configure(result.flags, 28))
    assert get_num_layers_to_build(vision) == counts[0] < 24
    exec(result.vision_python(), {"vision_config": vision})
    assert get_num_layers_to_build(vision) == 24
    vision.__post_init__()  # and the configuration as a whole stands Megatron's own checks


# -- `trimtab check --for megatron` ---------------------------------------------------------------------------------


def random_flags(rng: Random) -> MegatronFlags:
    """Flags around what is legal, wrong in many ways."""
    pp = rng.choice((1, 2, 3, 4))
    num_layers = rng.choice((8, 12, 13))
    kind = rng.choice(("even", "account", "uneven", "uneven", "layout", "layout", "mixed"))
    chunks = rng.choice((None, None, 2)) if pp > 1 else None
    given: dict[str, Any] = {}
    if kind in ("account", "mixed"):
        given["account_for_embedding_in_pipeline_split"] = rng.random() < 0.7
        given["account_for_loss_in_pipeline_split"] = rng.random() < 0.7
    if kind in ("uneven", "mixed"):
        given["decoder_first_pipeline_num_layers"] = rng.choice((None, 0, 2, 3, 4, 9))
        given["decoder_last_pipeline_num_layers"] = rng.choice((None, None, 0, 2, 3, 4))
    if kind == "layout":
        counts = [rng.randint(0, 6) for _ in range(pp * rng.choice((1, 1, 2)))]
        counts[-1] += rng.choice((0, 1, num_layers - sum(counts), num_layers - sum(counts)))
        fields = ["t" * max(0, count) for count in counts]
        text = "E" + "|".join(fields) + rng.choice(("L", "L", "L", "", "VL"))
        given["pipeline_model_parallel_layout"] = text.replace("tttt", "t*4")
        chunks = None
    if kind != "layout":
        given["num_virtual_stages_per_pipeline_rank"] = chunks
    return MegatronFlags(pipeline_model_parallel_size=pp, num_layers=num_layers, **given)


def megatron_counts(flags: MegatronFlags) -> list[int] | None:
    """Decoder blocks that Megatron-Core builds on each stage, in the order they run; None where it refuses."""
    given = {
        FIELDS.get(f.name, f.name): value
        for f in dataclasses.fields(flags)
        if (value := getattr(flags, f.name)) is not None and f.name != "num_layers_per_virtual_pipeline_stage"
    }
    pp = flags.pipeline_model_parallel_size
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = TransformerConfig(
                hidden_size=64, num_attention_heads=8, num_query_groups=2, pipeline_dtype=torch.bfloat16, **given
            )
        if config.pipeline_model_parallel_layout is not None:
            layout = config.pipeline_model_parallel_layout.layout
            chunks = len(layout[0])
            return [layout[s % pp][s // pp].count(LayerType.decoder) for s in range(pp * chunks)]
        chunks = config.virtual_pipeline_model_parallel_size or 1
        vp = [None] if chunks == 1 else list(range(chunks))
        return [get_num_layers_to_build(config, chunk, rank) for chunk in vp for rank in range(pp)]
    except (AssertionError, ValueError):
        return None


def test_our_reading_of_the_flags_is_megatrons():
    rng, agreed, refused = Random(0), 0, 0
    for _ in range(1500):
        flags = random_flags(rng)
        ours: list[int] | PlanError
        try:
            ours = list(stage_counts(flags, flags.num_layers))
        except PlanError as error:
            ours = error
        theirs = megatron_counts(flags)
        if theirs is not None and (sum(theirs) != flags.num_layers or min(theirs) < 0):
            theirs = None  # it starts, and trains other layers than declared, or a stage of less than none
        assert (None if isinstance(ours, PlanError) else ours) == theirs, (flags, ours)
        agreed += theirs is not None
        refused += theirs is None
    assert agreed > 300
    assert refused > 300


@pytest.mark.parametrize(
    "text",
    [
        "--decoder-first-pipeline-num-layers 8",
        "--decoder-last-pipeline-num-layers 6",
        "--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 6",
        "--pipeline-model-parallel-layout Et*8|t*20L",
        "--pipeline-model-parallel-layout E|t*28L",
        "",
    ],
)
def test_we_foretell_how_many_vision_layers_a_copied_split_builds(on_first_rank, text):
    flags = parse_megatron_flags(f"--pipeline-model-parallel-size 2 {text}")
    words = f"--pipeline-model-parallel-size 2 {text}".split()
    vision = copied(configure(tuple(words), 14 if "first" in text and "last" in text else 28))
    assert built_vision_layers(24, flags) == get_num_layers_to_build(vision)


@pytest.mark.filterwarnings("ignore")  # that other packages are missing
def test_every_flag_of_megatrons_own_parser_is_read_or_refused() -> None:
    """Its parser came into the wheel with 0.19; importing it asks for more packages than Megatron-Core needs."""
    import argparse

    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        pytest.skip(f"Megatron's parser cannot be imported: {error}")
    from trimtab.adapters.launch_files import megatron_flags

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    asked = {word.removeprefix("--").replace("-", "_") for action in parser._actions for word in action.option_strings}
    assert sorted(name for name in asked - set(megatron_flags()) if len(name) > 2) == []
