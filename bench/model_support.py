"""Every image-text family of the installed Transformers through trimtab: writes docs/model-support.md.

    python bench/model_support.py                    # all, about two minutes of CPU time
    python bench/model_support.py qwen3_5 aria       # some, printed alone

Each family's default configuration is built on the meta device. "Described" means: each parameter of the model lies in
exactly one layer, a tied weight once, and each layer's count is that of the model's own modules. An empty cell has its
reason beside it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from trimtab.errors import ConfigError
from trimtab.models.asking.build import build, complete
from trimtab.models.asking.model import describe_fields
from trimtab.models.describe import FAMILIES
from trimtab.specs import ModelSpec

PAGE = Path(__file__).parents[1] / "docs" / "model-support.md"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    family: str
    described: bool
    by_hand: bool
    num_params: int
    num_layers: int
    price: str  # of all layers by formula, of some by measuring, or not of all
    order: str  # seen in a pass of text, of text and an image, or of modules
    reason: str


def check(family: str) -> Row:
    """The description of a family's default configuration, held against its own modules."""
    fields = {"model_type": family}
    try:
        spec = describe_fields(fields)
    except ConfigError as error:
        return _missed(family, str(error))
    real = build(complete(fields))
    counted = dict.fromkeys((x.name for x in spec.layers), 0)
    for name, parameter in real.named_parameters():  # a tied weight comes once
        parts = name.split(".")
        owners = [x for i in range(len(parts)) if (x := ".".join(parts[: i + 1])) in counted]
        if len(owners) != 1:
            return _missed(family, f"{name} lies in {len(owners)} layers")
        counted[owners[0]] += parameter.numel()
    unlike = [x.name for x in spec.layers if x.num_params != counted[x.name]]
    if unlike or spec.num_params != sum(p.numel() for p in real.parameters()):
        return _missed(family, f"parameters of {', '.join(unlike[:3])} differ")
    return Row(
        family=family,
        described=True,
        by_hand=family in FAMILIES,
        num_params=spec.num_params,
        num_layers=len(spec.layers),
        price=_price(spec),
        order=_order(spec),
        reason="",
    )


def _missed(family: str, reason: str) -> Row:
    return Row(
        family=family, described=False, by_hand=False, num_params=0, num_layers=0, price="", order="", reason=reason
    )


def _price(spec: ModelSpec) -> str:
    measured = [x for x in spec.layers if x.measured is not None]
    unknown = sum(not x.measured.forward_flops for x in measured if x.measured is not None)
    crossing = sum(x.attention is not None and x.attention.cross for x in spec.layers if x.measured is None)
    if unknown + crossing:
        return f"not of {unknown + crossing} layers"
    return f"{len(measured)} layers measured" if measured else "formulas"


def _order(spec: ModelSpec) -> str:
    said = " ".join(spec.notes)
    if "no forward pass could be made" in said:
        return "of modules"
    text, image = "decoder cannot be run" not in said, "No image could be passed" not in said
    return "seen" if text and image else "decoder seen" if text else "tower seen"


def page(rows: list[Row]) -> str:
    """docs/model-support.md."""
    described = [x for x in rows if x.described]
    lines = [
        "# Which models are described",
        "",
        "Written by `bench/model_support.py`; not by hand.",
        "",
        f"Transformers {transformers.__version__} maps {len(rows)} families to image-text-to-text. Of their default "
        f"configurations {len(described)} are described: each",
        "parameter in exactly one layer, tied weights once, equal to the model's own to the parameter.",
        "",
        "- *By hand*: described without torch, from the configuration alone ([models](models.md)).",
        "- *Price*: by formulas; by counting on the library's own code where a layer is of another make; or not known.",
        "- *Order*: seen in a forward pass without weights of a text and an image, of one of them, or that of modules.",
        "  Some default configurations do not fit together (an image of one size, positions of another): the",
        "  configuration of a real checkpoint does.",
        "",
        "| family | described | by hand | layers | parameters | price | order | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in rows:
        if x.described:
            hand = "yes" if x.by_hand else ""
            size = f"{x.num_params:,}"
            lines.append(f"| `{x.family}` | yes | {hand} | {x.num_layers} | {size} | {x.price} | {x.order} | |")
        else:
            reason = x.reason.replace("|", "/").replace("<", "&lt;")
            lines.append(f"| `{x.family}` | | | | | | | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """All families, or those that are named."""
    chosen = sys.argv[1:]
    rows = [check(family) for family in chosen or sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)]
    if chosen:
        print(page(rows))
        return
    PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{PAGE}: {sum(x.described for x in rows)} of {len(rows)} described, with torch {torch.__version__}")


if __name__ == "__main__":
    main()
