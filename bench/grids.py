"""Published pairs of a tower's grid, decided again: `python bench/grids.py [--write docs/tables/grids.md]`.

With `--models FILE` eight models on three sizes of cluster instead, rows kept in FILE: docs/tables/grids-models.md.

A pair of data/grids.json trains one model: *a* with the tower on the decoder's grid, *b* with it shared among more
ranks, on every device of a replica, or on devices of its own. Of each: whether we put the pair in order, and the ratio
of seconds a sample. Settings were committed before their predictions were looked at; what a source does not print is
named as a stand-in, and such a row counts by its order alone.
"""

import argparse
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab import PlanOptions, SampleTable, describe, make_plan, parse_cluster
from trimtab.errors import TrimtabError
from trimtab.plan.options import VisionChoice
from trimtab.specs import ModelSpec

DATA = Path(__file__).resolve().parent / "data" / "grids.json"
STEPS = 2
MISSES = """
Where order is wrong, our count has the tower bound by kernel launches, which no share shortens. 005: at 2.2 ms of the
host a block its step takes 1,648 ms where 1,245 were measured (a: 1,637 and 1,354); without a host the ratio would be
1.11, that of 006 1.27. 031: its host encodes one micro-batch of four on each rank, a quarter of the launches, which
no plan with stages prices. 034 and 036: a step takes 3.95 s where we count 0.89: what their own tp of the tower
launches is not known.
"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One published pair, and our ratio; `problem`: why there is none."""

    row: Mapping[str, Any]
    ours: float | None
    problem: str = ""

    @property
    def in_order(self) -> bool:
        return self.ours is not None and (self.ours > 1) == (self.row["ratio"] > 1)


def model_of(name: str, configs: Mapping[str, Any]) -> ModelSpec:
    """A shipped model, or one of the printed size: a tower that makes a token of every patch, and a decoder."""
    if name not in configs:
        return describe(name)
    given = configs[name]
    vision = {"model_type": "siglip_vision_model", "image_size": 448, "patch_size": 14, **given["vision"]}
    text = {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 131072, **given["text"]}
    return describe(
        {
            "model_type": "llava",
            "image_token_index": 32000,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "vision_config": vision,
            "text_config": text,
        }
    )


_NOT_OPTIONS = ("group", "rule", "pooling", "devices", "cluster", "samples_a_pack", "host")


def seconds(model: ModelSpec, row: Mapping[str, Any], side: Mapping[str, Any]) -> float:
    """Predicted seconds of a sample."""
    images, per_pack = np.array(row["images"]), side.get("samples_a_pack", row.get("samples_a_pack", 1))
    rows_out = model.image_rule.count(896, 896)
    tokens = round(images.sum() * rows_out.tokens / rows_out.patches) + row["text"]
    n = STEPS * row["batch"]
    same = np.ones(n, np.int64)
    samples = SampleTable.of(
        images.sum() * same,
        tokens * same,
        num_images=len(images) * same,
        patches_sq=(images**2).sum() * same,
        patches_windowed=64 * images.sum() * same,
    )
    dp = side.get("dp", 1)
    options = PlanOptions(
        **{"dp": dp, "pp": 1, "tp": 1, "cp": 1, "zero_stage": 1}
        | {key: value for key, value in side.items() if key not in _NOT_OPTIONS},
        global_batch=row["batch"],
        num_microbatches=row["batch"] // dp // per_pack,
        max_patches=int(images.sum()) * per_pack,
        max_tokens=(tokens + 64) * per_pack,
        schedule="1F1B",
        recompute=row.get("recompute", "auto"),
        optimizer=row.get("optimizer", "adamw"),
        host=side.get("host", row["host"]),
        vision=VisionChoice(**{key: side[key] for key in ("group", "rule", "pooling", "devices") if key in side}),
    )
    return (
        make_plan(model, samples, parse_cluster(side.get("cluster", row["cluster"])), options).variants[-1].epoch_s / n
    )


def read_pairs(only: str | None = None) -> list[Pair]:
    """Predict every pair."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    found = []
    for row in data["rows"]:
        if only is not None and row["id"] not in only.split(","):
            continue
        model = model_of(row["model"], data["models"])
        try:
            ours = seconds(model, row, row["a"]) / seconds(model, row, row["b"])
            found.append(Pair(row=row, ours=ours))
        except TrimtabError as error:
            found.append(Pair(row=row, ours=None, problem=str(error).splitlines()[0][:90]))
    return found


def page(pairs: list[Pair]) -> str:
    """The table, the misses named."""
    right = sum(x.in_order for x in pairs)
    known = [x for x in pairs if x.ours is not None]
    exact = [x for x in known if x.row["exact"]]
    far = max((abs((x.ours or 0.0) / x.row["ratio"] - 1) for x in exact), default=0.0)
    lines = [
        "<!-- generated by bench/grids.py -->",
        "# A tower's grid: published pairs, decided again",
        "",
        f"{right} of {len(pairs)} pairs in order; {len(pairs) - len(known)} do not fit by our count, and stand as "
        f"wrong. Of {len(exact)} pairs whose layout is printed, ratios are within {far:.0%}. All models are stand-ins "
        "of the printed size.",
        "",
        "| pair | model | a | b | measured | predicted | order |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in pairs:
        ours = x.problem if x.ours is None else f"{x.ours:.3f}"
        sides = [" ".join(f"{key} {value}" for key, value in x.row[side].items()) for side in ("a", "b")]
        lines.append(
            f"| [{x.row['id']}]({x.row['link']}) | {x.row['model']} | {sides[0]} | {sides[1]} | {x.row['ratio']:.3f} | "
            f"{ours} | {'right' if x.in_order else 'wrong'} |"
        )
    return "\n".join(lines) + "\n" + MISSES


# -- eight models -----------------------------------------------------------------------------------------------------

MODELS = (
    *("InternVL3-8B", "InternVL3-78B", "Qwen2.5-VL-7B", "Qwen2.5-VL-72B"),
    *("Qwen3-VL-30B-A3B", "Qwen3.5-27B", "InternVL-Chat-V1-5", "Qwen2.5-Omni-7B"),
)
DEVICES = (32, 256, 2048)
# drawn evenly: images a sample, their sides, tokens of text; one text-heavy sample in three has an image
KINDS = {
    "images": ((1, 3), (400, 1200), (60, 500)),
    "long video": ((32, 64), (448, 448), (60, 300)),
    "text-heavy": ((0, 1), (300, 900), (500, 3000)),
    "64K tokens": ((16, 64), (400, 1000), (8_000, 40_000)),
}
_LEAST = re.compile(r"they would gain (-?[0-9.]+%)")


def described(name: str) -> ModelSpec:
    """A shipped model; the thinker of Qwen2.5-Omni is asked of Transformers, its audio tower unpriced."""
    if name != "Qwen2.5-Omni-7B":
        return describe(name)
    thinker = describe({"model_type": "qwen2_5_omni_thinker", "vision_start_token_id": 151652})
    return replace(thinker, name=name, image_rule=describe("Qwen2.5-VL-7B").image_rule)


def drawn(model: ModelSpec, kind: str, num: int, most_tokens: int = 65_536) -> SampleTable:
    """`num` samples of a kind, by the model's own image rule, sides rounded to 56 pixels."""
    draw, (images, sides, text) = np.random.default_rng(0), KINDS[kind]
    known: dict[tuple[int, int], Any] = {}
    columns = np.zeros((num, 5), np.int64)
    for row in columns:
        row[0] = draw.integers(text[0], text[1] + 1)
        count = draw.integers(images[0], images[1] + 1) if images[0] else int(draw.random() < 1 / 3)
        for height, width in draw.integers(sides[0], sides[1] + 1, (count, 2)) // 56 * 56:
            if (height, width) not in known:
                known[height, width] = model.image_rule.count(int(width), int(height))
            one = known[height, width]
            if row[0] + one.tokens <= most_tokens:
                row += one.tokens, one.patches, one.patches_sq, one.patches_windowed, 1
    tokens, patches, squares, windows, number = columns.T
    return SampleTable.of(patches, tokens, num_images=number, patches_sq=squares, patches_windowed=windows)


def in_seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def model_row(name: str, devices: int, kind: str) -> str:
    """One line: the single grid and the best other form, each with its bound."""
    model = described(name)
    samples = drawn(model, kind, max(2048, 4 * devices))
    options = PlanOptions(vision=VisionChoice(group="auto"))
    start = f"| {name} | {devices:,} | {kind} |"
    try:
        made = make_plan(model, samples, parse_cluster(f"{devices}xH100-80GB"), options)
    except TrimtabError as error:
        return f"{start} {str(error).splitlines()[0][:80]} | | | | | |"
    plan = made.plan
    if not plan.estimates.forms:
        dims = plan.decisions.parallel
        least = next((x[1] for said in plan.assumptions if (x := _LEAST.search(said))), None)
        about = "none" if least is None else f"none simulated: the least bound gains {least}"
        setting = f"dp {dims.dp} x pp {dims.pp} x tp {dims.tp}" + (f" x cp {dims.cp}" if dims.cp > 1 else "")
        return f"{start} {setting} | {in_seconds(plan.estimates.epoch_s)} | | {about} | | | |"
    grid, *forms = plan.estimates.forms
    best = min(forms, key=lambda x: x.epoch_s)
    gain = grid.epoch_s / best.epoch_s
    taken = plan.decisions.vision_data_parallel
    name_of = f"{best.form}: {best.setting}" + ("" if taken is not None else ", not taken")
    setting = grid.setting.removesuffix(", not shared")
    figures = [(in_seconds(x.epoch_s), in_seconds(x.bound_s)) for x in (grid, best) if x.bound_s is not None]
    return f"{start} {setting} | {' | '.join(figures[0])} | {name_of} | {' | '.join(figures[1])} | {gain:.3f} |"


def models_page(known: Path) -> str:
    """The table; rows that `known` holds are not planned again, and new ones are kept there."""
    rows = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    done = {tuple(row.split(" | ")[:3]) for row in rows}
    for kind, devices, name in order_of_cases():
        if (f"| {name}", f"{devices:,}", kind) not in done:
            rows.append(model_row(name, devices, kind))
            known.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return models_text(rows)


def models_text(rows: list[str]) -> str:
    """The page of these rows, by model; says how many cases of all they are."""
    order = {name: i for i, name in enumerate((*MODELS, *(f"{x:,}" for x in DEVICES), *KINDS))}
    rows = sorted(rows, key=lambda row: [order[x] for x in row.removeprefix("| ").split(" | ")[:3]])
    taken = [row for row in rows if row.count("|") == 11 and "not taken" not in row and "none" not in row]
    said = f"{len(rows)} of {len(order_of_cases())} cases were planned; in {len(taken)} a form is taken."
    head = _MODELS_HEAD.strip().replace("Nothing was measured.", f"Nothing was measured. {said}")
    return "\n".join([*head.splitlines(), *rows, ""])


def order_of_cases() -> list[tuple[str, int, str]]:
    """Every case, its kind first."""
    return list(itertools.product(KINDS, DEVICES, MODELS))


_MODELS_HEAD = """
<!-- generated by bench/grids.py --models -->
# A tower's grid: eight models, three sizes of cluster, four kinds of data

`towers=auto` against our own best single grid, whose cuts may lie inside the tower; H100-80GB, formulas, epochs of
samples drawn evenly. Seconds of an epoch stand next to a bound: equal packs, even shares that wait for nothing. A form
is taken where it gains 2 %. The audio tower of the omni model is not priced, and its audio is not in the data; its
images are counted by the rule of Qwen2.5-VL. Nothing was measured.

| model | devices | data | best single grid | seconds | bound | best other form | seconds | bound | gain |
|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", help="ids, with commas")
    parser.add_argument("--models", type=Path, help="file of rows that are done")
    given = parser.parse_args()
    text = page(read_pairs(given.only)) if given.models is None else models_page(given.models)
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
