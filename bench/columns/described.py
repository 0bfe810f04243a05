"""Column "described": each parameter of a family's default model in exactly one layer, a tied weight once.

python bench/columns/described.py                  # all, about two minutes of CPU time
python bench/columns/described.py qwen3_5 aria     # some, printed alone
"""

from cell import Cell, sweep

from trimtab.errors import ConfigError
from trimtab.models.asking.model import build, complete, describe_fields
from trimtab.specs import ModelSpec


def check(family: str) -> Cell:
    """The description of a family's default configuration, held against its own modules on the meta device."""
    fields = {"model_type": family}
    try:
        spec = describe_fields(fields)
    except ConfigError as error:
        return Cell(yes=False, note=str(error))
    real = build(complete(fields))
    counted = dict.fromkeys((x.name for x in spec.layers), 0)
    for name, parameter in real.named_parameters():  # a tied weight comes once
        parts = name.split(".")
        owners = [x for i in range(len(parts)) if (x := ".".join(parts[: i + 1])) in counted]
        if len(owners) != 1:
            return Cell(yes=False, note=f"{name} lies in {len(owners)} layers")
        counted[owners[0]] += parameter.numel()
    unlike = [x.name for x in spec.layers if x.num_params != counted[x.name]]
    if unlike or spec.num_params != sum(p.numel() for p in real.parameters()):
        return Cell(yes=False, note=f"parameters of {', '.join(unlike[:3])} differ")
    return Cell(yes=True, note=f"{len(spec.layers)} layers; {spec.num_params:,}; {_price(spec)}; {_order(spec)}")


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


if __name__ == "__main__":
    sweep(check, "described")
