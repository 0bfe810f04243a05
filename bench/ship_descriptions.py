"""Writes the descriptions that come with trimtab: `src/trimtab/models/zoo/models.jsonl`. Needs torch and Transformers.

    python bench/ship_descriptions.py [NAME ...]

With names only those are made anew, and the other lines stay.

`data/model_zoo.json` holds, by name, a model's published `config`, the `files` of its processor, and the `sources`
that both were read in; `names`: others that the Hub has for it; `open`: why it is not shipped. A line of the result is
a name, a tab, and a description file with two more fields: `config`, and `assumed`, what the class makes of the
fields that a config.json may leave out. The same file and versions of torch and Transformers give the same bytes.

InternVL has two forms. A name with `-HF` is the same checkpoint under Transformers' names.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, TrimtabError
from trimtab.models.asking.inputs import quietly
from trimtab.models.asking.internvl_chat import chat_config, published_fields
from trimtab.models.asking.model import complete, describe_fields
from trimtab.models.describe import TEXT_ONLY, find_positions, image_rule, image_rule_by_processor
from trimtab.models.description import description_bytes, flat_fields, nested_fields, read_shipped
from trimtab.models.families import REMOTE
from trimtab.models.images.rules import UnsettledRule
from trimtab.specs import LayerSpec

SOURCE = Path(__file__).parent / "data" / "model_zoo.json"
PORTED = ("InternVL2", "InternVL3")  # families with folders in Transformers' form
DEMO = Path(__file__).parents[1] / "src" / "trimtab" / "demo" / "tiny_model"
ZOO = Path(__file__).parents[1] / "src" / "trimtab" / "models" / "zoo"


def _fold(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write each layer as its differences from the earlier one that is most like it, where that is shorter."""
    folded = []
    for layer in layers:
        ways = [layer]
        for i, base in enumerate(layers[: len(folded)]):
            changed = {key: value for key, value in layer.items() if base.get(key) != value or key not in base}
            ways.append({"like": i, "without": [key for key in base if key not in layer], **changed})
        folded.append(min(ways, key=lambda way: len(json.dumps(way))))
    return folded


def main(only: Sequence[str]) -> None:
    lines: dict[str, Any] = {}
    names: dict[str, Any] = {}
    if only:
        kept = (ZOO / "models.jsonl").read_text(encoding="utf-8").splitlines()
        lines = {name: read_shipped(name) for name in (line.partition("\t")[0] for line in kept)}
        names = json.loads((ZOO / "names.json").read_text(encoding="utf-8"))
    for name, entry in sorted({**json.loads(SOURCE.read_text(encoding="utf-8")), **_demo()}.items()):
        if only and name not in only:
            continue
        if "open" in entry:
            print(f"left out {name}: {entry['open']}")
            continue
        try:
            lines[name] = describe_entry(name, entry)
        except (TrimtabError, AssertionError) as error:
            print(f"left out {name}: {str(error).splitlines()[0][:160]}")
            continue
        names[name] = entry.get("names", [])
        if entry["config"]["model_type"] == REMOTE and name.startswith(PORTED):
            lines[f"{name}-HF"] = _port(f"{name}-HF", entry)
    written = {name: {**x, "layers": _fold(x["layers"])} for name, x in sorted(lines.items())}
    text = "".join(f"{name}\t{json.dumps(x, separators=(',', ':'))}\n" for name, x in written.items())
    (ZOO / "models.jsonl").write_text(text, encoding="utf-8")
    also = {name: others for name, others in names.items() if others}
    (ZOO / "names.json").write_text(json.dumps(also, indent=1) + "\n", encoding="utf-8")
    print(f"{len(lines)} descriptions, {len(text)} bytes")


def describe_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shipped description of one entry of `data/model_zoo.json`."""
    config, files = entry["config"], entry["files"]
    model = describe_fields(config)
    layers = model.layers
    settings = next(iter(files.values()), None)
    whole = config
    if model.family != REMOTE:
        with quietly():
            whole = json.loads(json.dumps(complete(config).to_dict(), default=str))
        whole.pop("image_seq_length", None)  # of the class's own image size
    try:
        rule, markup = image_rule(whole, settings), None
    except ConfigError:  # a family without a formula
        rule, markup = image_rule_by_processor(whole, files, settings)
    if model.indices("vision"):
        assert not isinstance(rule, UnsettledRule), rule.reason
    else:
        rule = UnsettledRule(reason=TEXT_ONLY)
    model = replace(model, name=name, image_rule=rule, image_markup=markup, asked_of=(), clip_rule=None)
    model = replace(model, max_positions=find_positions(config))
    model = replace(model, notes=(*model.notes[1:], *entry.get("notes", ())))  # the first says the versions
    made = {**json.loads(description_bytes(model)), "config": config, "sources": entry["sources"]}
    return {**made, "assumed": dict(_assumed(config, layers))}


def _port(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The same checkpoint as Transformers' `internvl`; its files say in the text section alone that nothing is tied."""
    fields = entry["config"]
    whole = json.loads(json.dumps(chat_config(fields).to_dict(), default=str)) | {"model_type": "internvl"}
    del whole["published"]
    size = dict.fromkeys(("height", "width"), fields["force_image_size"])
    limits = {f"{x}_patches": fields[f"{x}_dynamic_patch"] for x in ("min", "max")}
    files = {"preprocessor_config.json": {"size": size, **limits}}
    made = describe_entry(name, {**entry, "config": whole, "files": files})
    assumed = made["assumed"] | {k: whole[k] for k in ("tie_word_embeddings",)}
    kept = {k: v for k, v in flat_fields(whole).items() if k not in assumed or k.endswith("tie_word_embeddings")}
    kept |= {"model_type": "internvl", "text_config.model_type": whole["text_config"]["model_type"]}
    kept.pop("tie_word_embeddings", None)
    return {**made, "config": nested_fields(kept), "assumed": assumed}


def _assumed(config: Mapping[str, Any], layers: Sequence[LayerSpec]) -> Iterator[tuple[str, Any]]:
    """Fields with the value that Transformers' class gives them where config.json is silent, or spells otherwise."""
    whole = _completed(config)
    published = flat_fields(config)
    for name, value in {**published, **whole}.items():
        if published.get(name) != value or _is_silent(config, name, whole, layers):
            yield name, value


def _is_silent(config: Mapping[str, Any], name: str, whole: Mapping[str, Any], layers: Sequence[LayerSpec]) -> bool:
    """Whether a config.json without this field says the same; what no class declares may still size a layer."""
    try:
        rest = _without(config, name)
        return _completed(rest) == whole and (name in whole or describe_fields(rest).layers == layers)
    except Exception:  # of any class that the library likes
        return False


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    with quietly():
        if config["model_type"] == REMOTE:
            declared = made = {**published_fields(chat_config(config)), "model_type": REMOTE}
        else:
            made = complete(config).to_dict()
            kinds = {k: v.get("model_type") for k, v in made.items() if isinstance(v, dict)}
            sections = {k: {"model_type": kind} for k, kind in kinds.items() if kind}
            declared = complete({"model_type": config["model_type"], **sections}).to_dict()
    known = flat_fields(declared)  # of others the class makes attributes that nothing reads
    return {k: v for k, v in flat_fields(json.loads(json.dumps(made, default=str))).items() if k in known}


def _without(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy without the field of this dotted name."""
    first, _, rest = name.partition(".")
    if not rest:
        return {k: v for k, v in config.items() if k != first}
    return {**config, first: _without(config[first], rest)}


def _demo() -> dict[str, Any]:
    """The small model that `trimtab.demo` writes."""
    files = {"preprocessor_config.json": json.loads((DEMO / "preprocessor_config.json").read_text())}
    config = json.loads((DEMO / "config.json").read_text())
    return {"demo-1M": {"sources": ["trimtab.demo"], "config": config, "files": files}}


if __name__ == "__main__":
    main(sys.argv[1:])
