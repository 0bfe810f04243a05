"""What a host would run, read back from each export, has the plan's memory and step time within 1 %.

A reader knows its host's words and defaults, and nothing of the plan: what an export leaves out is what the host does
when nothing is said.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_cases import tile_samples

from trimtab import PlanOptions, describe, make_plan, parse_cluster, write_plan
from trimtab.adapters.frameworks import FRAMEWORKS, find_target
from trimtab.adapters.launch_files import from_megatron
from trimtab.adapters.megatron_check import flag_values
from trimtab.adapters.running import Exported, export_plan, fit_plan
from trimtab.balance.packing import PackResult
from trimtab.errors import UnsupportedPlanError
from trimtab.plan.decide.case import MemoryBudget, make_case
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.stages import mean_step_s, rank_bytes
from trimtab.plan.file.reload import ReloadedPlan, reload_plan

MODEL = describe("Qwen2.5-VL-3B")
Said = dict[str, Any]

# -- readers ----------------------------------------------------------------------------------------------------------


def megatron(exported: Exported) -> Said:
    """By trimtab's own reader of Megatron's flags, without recompute, which `runs` has."""
    run = from_megatron(re.sub(r"--recompute-\S+ [^\n]*", "", exported.text.replace("\\\n", "\n")), MODEL)
    names = ("dtype", "attention", "optimizer", "grad_dtype", "fused_kernels", "sequence_parallel", "tp_overlap")
    said = {name: getattr(run, name) for name in (*names, "zero_stage", "frozen_towers")}
    return said | {"attention": said["attention"] or "flash", "optimizer": said["optimizer"] or "adamw"}


def bridge(exported: Exported) -> Said:
    given = dict(line.split(" = ", 1) for line in exported.text.splitlines())
    made = re.compile(r"get_mixed_precision_config\((.*?)\)")  # an object, whose fields are set; else a recipe's name
    given = {name: made.sub(r"\1", value.partition("  # ")[0]) for name, value in given.items()}
    words = {name: ast.literal_eval(value) for name, value in given.items() if not value.startswith("cfg")}
    kind = words["cfg.mixed_precision"]
    grads = words["cfg.ddp.grad_reduce_in_fp32"]
    if kind is not None:  # the recipe's own is written over that of cfg.ddp
        grads = words.get("cfg.mixed_precision.grad_reduce_in_fp32", kind != "fp16_mixed")
    towers = {"language_model": "language", "vision_model": "vision", "vision_projection": "projector"}
    return {
        "dtype": {None: "fp32", "bf16_mixed": "bf16", "fp16_mixed": "fp16"}[kind],
        "attention": {"flash": "flash", "unfused": "eager"}[words.get("cfg.model.attention_backend", "flash")],
        "optimizer": {"adam": "adamw", "sgd": "sgd_momentum"}[words["cfg.optimizer.optimizer"]],
        "grad_dtype": "fp32" if grads else "bf16",
        "fused_kernels": words["cfg.model.transformer_impl"] == "transformer_engine",
        "sequence_parallel": words.get("cfg.model.sequence_parallel", False),
        "zero_stage": int(words.get("cfg.ddp.use_distributed_optimizer", False)),
        "frozen_towers": tuple(tower for name, tower in towers.items() if words[f"cfg.model.freeze_{name}"]),
    }


def swift(exported: Exported) -> Said:
    words = flag_values(exported.text.removeprefix("megatron sft"))
    towers = {"freeze_llm": "language", "freeze_vit": "vision", "freeze_aligner": "projector"}
    return {
        "dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[words.get("torch_dtype", "float32")],
        "attention": {"flash": "flash", "unfused": "eager"}[words.get("attention_backend", "flash")],
        "optimizer": {"adam": "adamw", "sgd": "sgd_momentum"}[words.get("optimizer", "adam")],
        "grad_dtype": "fp32" if words.get("accumulate_allreduce_grads_in_fp32") == "true" else "bf16",
        "fused_kernels": True,
        "sequence_parallel": words.get("sequence_parallel") == "true",
        "zero_stage": int(words.get("use_distributed_optimizer", "true") == "true"),
        "frozen_towers": tuple(tower for flag, tower in towers.items() if words.get(flag) == "true"),
    }


def pai(exported: Exported) -> Said:
    arguments: Any = exported.fields["arguments"]
    from trimtab.adapters.pai_megatron import SCRIPTS

    words = dict(zip(SCRIPTS[MODEL.family][1], arguments, strict=True))
    return {
        "dtype": words["PR"],
        "attention": "flash" if words["FL"] == "true" else "eager",
        "fused_kernels": True,
        "sequence_parallel": words["SP"] == "true",
        "zero_stage": int(words["DO"] == "true"),
    }


def mindspeed(exported: Exported) -> Said:
    words = flag_values(exported.text.partition("\n\n")[0].partition("\n")[2])
    encoder = json.loads(exported.text.splitlines()[-1])["image_encoder"]
    parts = {"vision": "vision_encoder", "projector": "vision_projector"}
    return {
        "dtype": "bf16" if "bf16" in words else "fp16" if "fp16" in words else "fp32",
        "attention": "flash" if "use_flash_attn" in words else "eager",
        "optimizer": {"adam": "adamw"}[words["optimizer"]],
        "sequence_parallel": "sequence_parallel" in words,
        "zero_stage": int("use_distributed_optimizer" in words),
        "frozen_towers": tuple(tower for tower, part in parts.items() if encoder[part].get("freeze", True)),
    }


def python(exported: Exported) -> Mapping[str, str]:
    """Keywords of every call and literals of every name in lines of Python, by name."""
    found = {}
    for node in ast.walk(ast.parse(exported.text)):
        if isinstance(node, ast.keyword) and node.arg:
            found[node.arg] = ast.unparse(node.value).strip("'\"")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.unparse(node.value)
    return found


def hugging_face(exported: Exported) -> Said:
    words = python(exported)
    implementation = ast.literal_eval(words["MODEL"])["attn_implementation"]
    autocast = words.get("mixed_precision") or next((x for x in ("bf16", "fp16") if words.get(x) == "True"), "no")
    formats = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    policy = formats.get(words.get("param_dtype", ""))
    optimizer = words.get("optim", words.get("optimizer", "torch.optim.SGD"))
    sharded = "fsdp" in words or "fsdp_plugin" in words or "mp_policy" in words
    return {
        "dtype": policy or {"no": "fp32"}.get(autocast, autocast),
        "attention": {"flash_attention_2": "flash"}.get(implementation, implementation),
        "optimizer": "adamw" if "adamw" in optimizer.lower() and "8bit" not in optimizer else "adamw_8bit",
        "fused_kernels": "use_liger_kernel" in words or "liger_kernel" in exported.text,
        "zero_stage": 3 if sharded else 0,
        "frozen_towers": ("vision",) if "requires_grad_(False)" in exported.text else (),
    }


def deepspeed(exported: Exported) -> Said:
    words = python(exported)
    config, attention = ast.literal_eval(words["CONFIG"]), ast.literal_eval(words["ATTENTION"])
    return {
        "dtype": "bf16" if config["bf16"]["enabled"] else "fp16" if config["fp16"]["enabled"] else "fp32",
        "attention": {"flash_attention_2": "flash"}.get(attention, attention),
        "optimizer": config["optimizer"]["type"].lower(),
        "grad_dtype": config["data_types"]["grad_accum_dtype"],
        "fused_kernels": ast.literal_eval(words["FUSED"]),
        "zero_stage": config["zero_optimization"]["stage"],
        "frozen_towers": tuple(ast.literal_eval(words["FROZEN"])),
    }


def recipe(exported: Exported) -> Said:
    words = yaml.safe_load(exported.text)
    attention = words.get("attn_implementation", words.get("flash_attn"))
    optimizer = words.get("optim", words.get("optimizer"))
    frozen = "vision" if words.get("freeze_vision_tower") or "unfrozen_parameters" in words else None
    return {
        "dtype": "bf16" if words["bf16"] else "fp16" if words["fp16"] else "fp32",
        "attention": {"fa2": "flash", "flash_attention_2": "flash", "disabled": "eager"}.get(attention, attention),
        "optimizer": {"adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"}[optimizer],
        "fused_kernels": bool(words.get("enable_liger_kernel") or words.get("liger_rms_norm")),
        "zero_stage": words.get("deepspeed", {"zero_optimization": {"stage": 0}})["zero_optimization"]["stage"],
        "frozen_towers": (frozen,) if frozen else (),
    }


READERS: Mapping[str, Callable[[Exported], Said]] = {
    "megatron": megatron,
    "megatron-bridge": bridge,
    "ms-swift": swift,
    "pai-megatron": pai,
    "mindspeed-mm": mindspeed,
    "deepspeed": deepspeed,
    **dict.fromkeys(("transformers", "accelerate", "fsdp2", "trl"), hugging_face),
    **dict.fromkeys(("llama-factory", "axolotl"), recipe),
}

# -- the gate ---------------------------------------------------------------------------------------------------------


def planned(name: str, folder: Path, device: str, **settings: Any) -> ReloadedPlan:
    """A plan that the framework runs as it is."""
    target = find_target(name)
    can = target.can(MODEL, 1).choices
    degrees = {"pp": 1, "tp": 1, "dp": 8} if can.get("pp") == (1,) else {"pp": 2, "tp": 1 if can.get("tp") else 2}
    stage = 3 if 3 in can["zero_stage"] else 1  # type: ignore[operator]
    given = {
        "schedule": "1F1B",
        "risk": 0.05,
        "max_patches": 6000,
        "max_tokens": 6000,
        "oversize": "skip",
        "num_microbatches": 4,
        "zero_stage": stage,
        "host": target.host,
        **degrees,
        **settings,
    }
    write_plan(make_plan(MODEL, tile_samples(120), parse_cluster(f"8x{device}"), PlanOptions(**given)), folder / "made")
    made = reload_plan(folder / "made")
    write_plan(fit_plan(made, target), folder / "fit")
    return reload_plan(folder / "fit")


def priced(found: ReloadedPlan, name: str, exported: Exported, device: str) -> tuple[float, list[float]]:
    """Seconds of a step and bytes of each rank, of what the host runs by the export's words alone."""
    case, target, cluster = found.case, find_target(name), parse_cluster(f"8x{device}")
    silent = {"grad_dtype": None, "fused_kernels": None, "sequence_parallel": None, "tp_overlap": None}
    said = {"dtype": "fp32", "optimizer": "adamw", "frozen_towers": (), **silent, **READERS[name](exported)}
    options = replace(case.options, host=target.host, **said)
    setting = replace(case.setting, profile=profile_setting(MODEL, cluster, options, case.setting.dims))
    packs = PackResult(packing=case.packing, schedule=case.schedule)
    again = make_case(MODEL, case.samples, cluster, options, MemoryBudget.of(cluster, options), setting, packs)
    return mean_step_s(again, exported.runs), rank_bytes(again, exported.runs)


MEGATRONS = {"megatron", "megatron-bridge", "ms-swift", "pai-megatron", "mindspeed-mm"}
# a setting that no host has by itself, and the hosts that have no word for it
SETTINGS: Mapping[str, tuple[object, set[str]]] = {
    "dtype": ("fp32", {"pai-megatron"}),
    "frozen_towers": (("vision",), {"pai-megatron"}),
    "attention": ("eager", set()),
    "optimizer": ("adamw_8bit", MEGATRONS | {"deepspeed"}),
    "grad_dtype": ("bf16", set(FRAMEWORKS) - {"megatron", "megatron-bridge", "ms-swift", "deepspeed"}),
    "sequence_parallel": (False, set()),
    "fused_kernels": (False, {"ms-swift", "pai-megatron", "mindspeed-mm"}),
}
ROOM = {"dtype": "H200", "fused_kernels": "B300", "attention": "B300"}  # what needs more memory gets it


def compare(name: str, folder: Path, settings: dict[str, Any], device: str = "A100-80GB") -> None:
    found = planned(name, folder, device, **settings)
    exported = export_plan(found, find_target(name))
    step_s, held = priced(found, name, exported, device)
    assert step_s == pytest.approx(mean_step_s(found.case, found.stages), rel=0.01)
    assert held == pytest.approx(rank_bytes(found.case, found.stages), rel=0.01)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_export_read_back_has_the_plans_memory_and_time(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, {})


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_read_back_or_refused(name: str, setting: str, tmp_path: Path) -> None:
    value, refused = SETTINGS[setting]
    device, settings = ROOM.get(setting, "A100-80GB"), {setting: value}
    if setting == "attention":  # which keeps rows squared
        settings |= {"max_patches": 6000, "max_tokens": 6000, "oversize": "skip"}
    if name in refused:
        with pytest.raises(UnsupportedPlanError, match=setting.partition("_")[0]):
            compare(name, tmp_path, settings, device)
    else:
        compare(name, tmp_path, settings, device)
