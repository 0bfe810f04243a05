"""docs/schemas: of the dataclasses as they are; the golden files of every version are what they describe."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.models.describe import describe
from trimtab.models.description import description_bytes, shipped_models
from trimtab.typed_json import parse_yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from bench.schemas import schemas  # noqa: E402

FIT = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def fits(schema: dict[str, Any], value: Any) -> bool:
    """The few words of JSON Schema that ours use."""
    if "anyOf" in schema:
        return any(fits(one, value) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if schema["type"] == "null":
        return value is None
    if not isinstance(value, FIT[schema["type"]]) or isinstance(value, bool) != (schema["type"] == "boolean"):
        return False
    if schema["type"] == "object":
        known = schema.get("properties")
        if known is None:
            return True
        return set(schema["required"]) <= set(value) <= set(known) and all(fits(known[k], v) for k, v in value.items())
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]] * len(value)
        return len(items) == len(value) and all(map(fits, items, value))
    return True


def test_the_published_schemas_are_those_of_the_dataclasses() -> None:
    published = {path.name: json.loads(path.read_text()) for path in (ROOT / "docs" / "schemas").glob("*.json")}
    assert published == json.loads(json.dumps(schemas())), "python -m bench.schemas writes them"


@pytest.mark.parametrize("name", shipped_models())
def test_a_description_fits_its_schema_and_a_damaged_one_does_not(name: str) -> None:
    content = json.loads(description_bytes(describe(name)))
    schema = schemas()["description.schema.json"]
    assert fits(schema, content)
    for key in schema["required"]:
        assert not fits(schema, {name: value for name, value in content.items() if name != key})
    rule = content["image_rule"]
    assert not fits(schema, content | {"image_rule": rule | {"settings": rule["settings"] | {"unknown": 1}}})
    assert not fits(schema, content | {"layers": [content["layers"][0] | {"num_alike": "two"}]})


@pytest.mark.parametrize("golden", sorted((ROOT / "tests" / "golden").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_golden_file_fits_its_schema_and_a_damaged_one_does_not(golden: Path) -> None:
    content = parse_yaml(golden.read_text(encoding="utf-8"))
    schema = schemas()[f"{golden.stem.partition('_')[0]}.schema.json"]
    assert fits(schema, content)
    for key in ("decisions", "summary"):
        assert not fits(schema, content | {key: 5})
        assert not fits(schema, {name: value for name, value in content.items() if name != key})
    assert not fits(schema, content | {"unknown": 1})
