"""Planned packs in Energon's loader against Transformers, and steps of Megatron's optimizer on them; on a CPU.

Needs torch, megatron-energon 7.4.1, megatron-core 0.19.2 and megatron-bridge 0.6.2, unpacked side by side.
"""

import itertools
import json
import logging
import subprocess
import sys
import typing
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="megatron-core needs torch")
transformers = pytest.importorskip("transformers")
if find_spec("triton") is None:  # a kernel of experts on GPUs, which 0.19 imports with its configuration
    sys.modules.setdefault("megatron.core.transformer.moe.ops.paged_stash", MagicMock())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.energon", reason="needs megatron-energon 7.4.1", exc_type=ImportError)
    pytest.importorskip("megatron.core.models.gpt", reason="needs megatron-core 0.19.2", exc_type=ImportError)
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    from trimtab.runtime.training.energon import PlannedPacks

from PIL import Image  # noqa: E402

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("unit", "torch")]
from model_folders import TEMPLATE, write_data, write_model, write_plan_of  # noqa: E402
from processor_cases import make_processor  # noqa: E402

from refusals import refused  # noqa: E402
from trimtab.adapters.data_files import read_planned, write_energon_packs  # noqa: E402
from trimtab.errors import PlanError  # noqa: E402
from trimtab.models.families import MARKUPS  # noqa: E402

DP, STEPS = 2, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its data, a plan for two ranks, and its packs as shards that are indexed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    write_model(folder / "model", "qwen2_5_vl")
    data = write_data(folder / "data", num=16)
    write_plan_of(
        folder,
        data,
        {"dp": DP, "pp": 1, "tp": 1, "num_microbatches": 2, "dtype": "fp32", "attention": "eager"},
        cluster="2xA100-80GB",
    )
    write_energon_packs(folder / "plan", folder / "packs", data=[data])
    words = ["prepare", "--non-interactive", "--split-parts", "train:.*", "--skip-dataset-yaml", "--num-workers", "1"]
    command = [sys.executable, "-c", "from megatron.energon.cli.main import main; main()", *words, folder / "packs"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """What Megatron-Core makes on a GPU by name: `device="cuda"` and `.cuda()`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        return function(*args, **(kwargs | {"device": "cpu"} if "cuda" in str(kwargs.get("device")) else kwargs))


class Alone:
    """One process that stands for any rank, and has no GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.at(0, 1)

    def at(self, rank: int, dp: int) -> None:
        for name, value in (("rank", rank), ("world_size", dp)):
            self._patch.setattr(parallel_state, f"get_data_parallel_{name}", lambda value=value, **_: value)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Alone]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, 1, DP)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with OnCpu():
        yield Alone(monkeypatch)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def configure(**more: Any) -> TransformerConfig:
    text = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    fields = {
        "ffn_hidden_size": 112,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "mrope_section": [2, 3, 3],
        "attention_backend": AttnBackend.unfused,
        "use_cpu_initialization": True,
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**{**text, **fields, **more})


def packs_of(run: Path, config: TransformerConfig, **options: Any) -> PlannedPacks:
    return PlannedPacks(run / "plan", run / "packs", run / "model", config, **{"num_workers": 0, **options})


def processed(run: Path) -> dict[str, dict[str, Any]]:
    """Each record as Transformers' own processor gives it, and the positions of its own model, by id."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    markup = MARKUPS["qwen2_5_vl"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(run / "model" / "tokenizer.json"),
        pad_token="</s>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )
    images = transformers.AutoImageProcessor.from_pretrained(run / "model", backend="pil")
    template = TEMPLATE.replace("IMAGE", markup.written or markup.placeholder)
    processor: Any = make_processor(Qwen2_5_VLProcessor, images, tokenizer, chat_template=template)
    model = transformers.Qwen2_5_VLModel(transformers.AutoConfig.from_pretrained(run / "model"))
    found = {}
    for line in (run / "data" / "data.jsonl").read_text().splitlines():
        record = json.loads(line)
        question, answer = (turn["value"] for turn in record["conversations"])
        parts = list(
            itertools.chain(*([{"type": "image"}, {"type": "text", "text": x}] for x in question.split("<image>")[1:]))
        )
        turns = [{"role": "user", "content": parts or question}, {"role": "assistant", "content": answer}]
        pictures = [Image.open(run / "data" / name) for name in record["image"]]
        made = processor(images=pictures or None, text=processor.apply_chat_template(turns, tokenize=False))
        ids = torch.tensor(made["input_ids"])
        types = (ids == tokenizer.convert_tokens_to_ids(markup.soft)).long()
        grids = torch.as_tensor(made["image_grid_thw"]) if pictures else None
        positions = model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)[0]
        reply = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
        labels, end = torch.full_like(ids[0], -100), len(ids[0]) - 1  # a line break stands behind the answer
        labels[end - len(reply) : end] = torch.tensor(reply)
        own = {"ids": ids[0], "labels": labels, "reply": reply, "positions": positions[:, 0], "num": len(pictures)}
        found[record["id"]] = {**made, **own}
    return found


@pytest.mark.parametrize("multiple", [1, 4])
def test_packs_are_what_processor_and_model_of_transformers_give_sample_by_sample(run, alone, multiple):
    planned, theirs, seen = read_planned(run / "plan"), processed(run), []
    config = SimpleNamespace(**vars(configure(context_parallel_size=multiple // 2 or 1)))
    for rank in range(DP):
        alone.at(rank, DP)
        for turn, batch in enumerate(itertools.islice(packs_of(run, config), planned.packing.num_packs // DP)):
            names = [planned.samples.sample_id(row) for row in planned.rows(rank + turn * DP)]
            borders = batch["cu_seqlens_q"].tolist()
            assert len(batch["input_ids"][0]) == borders[-1]
            assert int(batch["max_seqlen_q"]) == max(b - a for a, b in itertools.pairwise(borders))
            for name, start, stop in zip(names, borders, borders[1:], strict=False):
                expected = theirs[name]
                ids = expected["ids"]
                end = start + len(ids)
                assert stop == start - (-len(ids) // multiple) * multiple
                assert batch["input_ids"][0, start:end].tolist() == ids.tolist()
                assert batch["position_ids"][:, 0, start:end].tolist() == expected["positions"].tolist()
                behind = [*expected["labels"][1:].tolist(), *[-100] * (stop - end + 1)]
                assert batch["labels"][0, start:stop].tolist() == behind
                assert batch["loss_mask"][0, start:stop].tolist() == [float(x != -100) for x in behind]
            pixels = [torch.as_tensor(theirs[x]["pixel_values"]) for x in names if theirs[x]["num"]]
            if pixels:
                assert torch.equal(batch["visual_inputs"].pixel_values, torch.cat(pixels))
            else:  # a filler of no weight keeps the tower busy
                assert len(borders) == len(names) + 2
                assert not batch["loss_mask"][0, borders[-2] :].any()
            seen += names
    assert sorted(seen) == sorted(theirs)


def test_one_length_for_stages_of_a_pipeline(run, alone):
    alone.at(0, DP)
    config = configure(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    most = read_planned(run / "plan").plan.decisions.packing.max_tokens
    with refused(PlanError, "seq_length", "variable_seq_lengths"):
        packs_of(run, config)
    for batch in itertools.islice(packs_of(run, config, seq_length=most + 8), 3):
        assert batch["input_ids"].shape == (1, most + 8)
        assert batch["cu_seqlens_q"][-1] == most + 8
        assert not batch["loss_mask"][0, batch["cu_seqlens_q"][-2] :].any()


class ThdAttention(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Stands in for Transformer Engine's kernel, which needs a GPU: Megatron-Core's own refuses THD."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.repeats = config.num_attention_heads // config.num_query_groups

    def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: PackedSeqParams, **__: Any) -> Any:
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        found = []
        for q, k, v in zip(*(x.split(sizes) for x in (query, key, value)), strict=True):
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            own = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            found.append(own[0].transpose(0, 1))
        return torch.cat(found)


def bridge(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Bridge's own Qwen2.5-VL and its step, without its packages' imports of every other model."""
    import megatron

    monkeypatch.setattr(typing, "override", getattr(typing, "override", lambda function: function), raising=False)
    root = next(str(Path(x) / "bridge") for x in megatron.__path__ if (Path(x) / "bridge").is_dir())  # the newest
    for name in ("", ".models", ".models.qwen_vl", ".training", ".training.utils", ".data", ".utils"):
        package = ModuleType(f"megatron.bridge{name}")
        package.__path__ = [root + name.replace(".", "/")]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    for name, parts in (
        ("models.gpt_provider", ("GPTModelProvider",)),
        ("training.config", ("ConfigContainer",)),
        ("training.state", ("GlobalState",)),
        ("training.utils.flop_utils", ("accumulate_flops_metadata", "get_model_chunk_vp_stage")),
    ):
        stub = ModuleType(f"megatron.bridge.{name}")
        for part in parts:
            setattr(stub, part, object)
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    from megatron.bridge.models.qwen_vl.modeling_qwen25_vl import Qwen25VLModel
    from megatron.bridge.training import vlm_step

    return Qwen25VLModel, vlm_step


def build(model_class: Any, config: Any, theirs: Any) -> Any:
    """Bridge's model around Megatron-Core's decoder, with the weights of Transformers' model."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = ThdAttention
    own, text = theirs.config, theirs.config.get_text_config()

    def decoder(**stages: Any) -> GPTModel:
        return GPTModel(
            config,
            spec,
            text.vocab_size,
            4096,
            position_embedding_type="mrope",
            rotary_base=10000,
            share_embeddings_and_output_weights=False,
            **stages,
        )

    vars(config).update(
        vision_config=own.vision_config,
        provide_language_model=decoder,
        share_embeddings_and_output_weights=False,
        image_token_id=own.image_token_id,
        video_token_id=own.video_token_id,
        return_dict=True,
    )
    model = model_class(config)
    model.visual.load_state_dict(theirs.model.visual.state_dict())
    model.language_model.load_state_dict(converted(theirs, config), strict=False)
    return model


def converted(theirs: Any, config: Any) -> dict[str, Any]:
    """The decoder's weights under Megatron-Core's names: queries stand next to the keys and values of their group."""
    language, groups = theirs.model.language_model, config.num_query_groups
    found = {
        "embedding.word_embeddings.weight": language.embed_tokens.weight,
        "decoder.final_layernorm.weight": language.norm.weight,
        "output_layer.weight": theirs.lm_head.weight,
    }
    for number, layer in enumerate(language.layers):
        at, attention, mlp = f"decoder.layers.{number}.", layer.self_attn, layer.mlp
        for kind in ("weight", "bias"):
            rows = [getattr(x, kind).chunk(groups) for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
            found[f"{at}self_attention.linear_qkv.{kind}"] = torch.cat(
                [x for group in zip(*rows, strict=True) for x in group]
            )
        found |= {
            f"{at}input_layernorm.weight": layer.input_layernorm.weight,
            f"{at}pre_mlp_layernorm.weight": layer.post_attention_layernorm.weight,
            f"{at}self_attention.linear_proj.weight": attention.o_proj.weight,
            f"{at}mlp.linear_fc1.weight": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            f"{at}mlp.linear_fc2.weight": mlp.down_proj.weight,
        }
    return found


def test_bridges_model_takes_steps_of_megatrons_optimizer_as_transformers_does(run, alone, monkeypatch):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model_class, step = bridge(monkeypatch)
    alone.at(0, DP)
    torch.manual_seed(0)
    settings = transformers.AutoConfig.from_pretrained(run / "model")
    theirs = transformers.Qwen2_5_VLForConditionalGeneration(settings).float()
    config = configure(layernorm_epsilon=settings.get_text_config().rms_norm_eps)
    model = build(model_class, config, theirs)
    ours = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    rates = {
        "lr": 1e-3,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "clip_grad": 0.0,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **rates), [ours])
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0)
    planned, samples = read_planned(run / "plan"), processed(run)
    batches, losses = packs_of(run, config), []
    for turn in range(STEPS):
        optimizer.zero_grad()
        ours.zero_grad_buffer()
        plain.zero_grad()
        batch = step.get_batch_from_iterator(batches, is_first_pp_stage=True, is_last_pp_stage=True)
        given = {x: batch[x] for x in ("input_ids", "position_ids", "labels", "loss_mask", "attention_mask")}
        packed = {name: batch[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        visual = batch["visual_inputs"]
        if visual is not None:
            given |= visual.normalized_for_model()
        costs = ours(**given, packed_seq_params=PackedSeqParams(qkv_format="thd", **packed, max_seqlen_q=4096))
        loss = (costs * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        loss.backward()
        assert optimizer.step()[0]

        expected, count = 0.0, 0
        for row in planned.rows(turn * DP):
            sample = samples[planned.samples.sample_id(row)]
            ids = sample["ids"][None]
            images = {x: torch.as_tensor(sample[x]) for x in ("pixel_values", "image_grid_thw") if sample["num"]}
            logits = theirs(input_ids=ids, position_ids=sample["positions"][:, None], **images).logits
            expected = expected + torch.nn.functional.cross_entropy(
                logits[0, :-1], sample["labels"][1:], reduction="sum"
            )
            count += len(sample["reply"])
        (expected / count).backward()
        plain.step()
        losses.append((float(loss.detach()), float(expected.detach()) / count))
    print(losses)
    assert all(abs(own / other - 1) < 1e-5 for own, other in losses)
    moved = converted(theirs, config)
    for name, value in model.language_model.state_dict().items():
        if name in moved:
            assert float((value - moved[name]).abs().max()) < 1e-4, name


OTHER = {
    "as planned": ({}, 4, ()),
    "tp": ({"tensor_model_parallel_size": 2}, 4, ("tp is 2", "4 ranks run")),
    "batch": ({}, 8, ("8 packs",)),
    "dtype": ({"bf16": True, "params_dtype": torch.bfloat16}, 4, ("bf16",)),
    "attention": ({"attention_backend": AttnBackend.flash}, 4, ("attention is flash",)),
    "recompute": (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        4,
        ("2 layers recompute, and should not",),
    ),
    "weights": ({"calculate_per_token_loss": False}, 4, ("calculate_per_token_loss",)),
}


@pytest.mark.parametrize("case", OTHER)
def test_the_first_pack_says_once_what_is_not_as_planned(run, alone, caplog, case):
    fields, batch, told = OTHER[case]
    alone.at(0, DP)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, batch, 1, DP)
    caplog.set_level(logging.WARNING, logger="trimtab")
    batches = packs_of(run, configure(**fields))
    next(batches), next(batches)
    found = [record.getMessage() for record in caplog.records if record.name.startswith("trimtab")]
    assert len(found) == len(told), found
    assert all(any(words in message for message in found) for words in told)


def test_packs_of_other_ranks_are_refused_and_a_restored_run_goes_on(run, alone):
    alone.at(0, 1)  # the shards hold the packs of rank 0 of 2 first
    with refused(PlanError, "out of turn"):
        list(itertools.islice(packs_of(run, configure()), 2))
    alone.at(1, DP)
    first = packs_of(run, configure(), num_workers=1)
    next(first)
    state, after = first.save_state(), next(first)
    second = packs_of(run, configure(), num_workers=1)
    second.restore_state(state)
    assert torch.equal(next(second)["input_ids"], after["input_ids"])
