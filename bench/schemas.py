"""JSON Schemas of the files that people and programs write, from the dataclasses they are read as.

`python -m bench.schemas` writes docs/schemas; `typed_json.read_typed`, which `check` reads with, takes what they say.
"""

import json
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trimtab.costs.profile import FORMAT
from trimtab.models.description import RULES, VERSION, DescriptionFile
from trimtab.models.images.asked import AskedClips
from trimtab.plan.file.placement import PlacementFile
from trimtab.plan.plan import Plan
from trimtab.specs import LayerSpec, Profile
from trimtab.typed_json import has_default

_PLAIN = {float: "number", int: "integer", str: "string", bool: "boolean"}


def schema_of(kind: Any, *, optional: Callable[[Field[Any]], bool] = has_default) -> dict[str, Any]:
    """The schema of `kind`, as an editor or another program takes it; `optional` as `read_typed` has it.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     width: int
    ...     name: str | None = None
    >>> sorted(schema_of(Size)["properties"]), schema_of(Size)["required"]
    (['name', 'width'], ['width'])
    """
    if hasattr(kind, "__dataclass_fields__"):
        hints, own = get_type_hints(kind), [field for field in fields(kind) if field.init]
        return {
            "type": "object",
            "properties": {field.name: schema_of(hints[field.name], optional=optional) for field in own},
            "required": [field.name for field in own if not optional(field)],
            "additionalProperties": False,
        }
    if get_origin(kind) in (UnionType, Union):
        return {"anyOf": [schema_of(one, optional=optional) for one in get_args(kind)]}
    if kind is NoneType:
        return {"type": "null"}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        items = get_args(kind)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": schema_of(items[0], optional=optional)}
        each = [schema_of(one, optional=optional) for one in items]
        return {"type": "array", "prefixItems": each, "minItems": len(each), "maxItems": len(each)}
    return {"type": _PLAIN[kind]}


def description_schema() -> dict[str, Any]:
    """Of a description, whose image rule is one of several and whose layers in a row are written once."""
    schema, layer = schema_of(DescriptionFile), schema_of(LayerSpec)
    layer["properties"]["num_alike"] = {"type": "integer"}
    rules = [schema_of(rule) | {"title": name} for name, rule in RULES.items()]
    of_rule = {"kind": {"enum": list(RULES)}, "settings": {"anyOf": rules}}
    schema["properties"] |= {
        "description_version": {"const": VERSION},
        "config": {"type": "object"},
        "image_rule": {"type": "object", "properties": of_rule, "required": [*of_rule], "additionalProperties": False},
        "clip_rule": {"anyOf": [schema_of(AskedClips), {"type": "null"}]},
        "layers": {"type": "array", "items": layer},
    }
    schema["required"] += ["description_version", "image_rule", "layers"]
    return schema


def schemas() -> dict[str, dict[str, Any]]:
    """By file name; a profile carries its format too."""
    profile = schema_of(Profile)
    profile["properties"] = {"format": {"const": FORMAT}, **profile["properties"]}
    found = {"plan": schema_of(Plan), "placement": schema_of(PlacementFile), "profile": profile}
    found["description"] = description_schema()
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {f"{name}.schema.json": {"$schema": draft, "title": name, **schema} for name, schema in found.items()}


def main() -> None:
    folder = Path(__file__).parents[1] / "docs" / "schemas"
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / name).write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
