"""Writes the descriptions that come with trimtab from published configurations: `src/trimtab/models/zoo/models.jsonl`.

    python bench/ship_descriptions.py model_zoo.json [MORE.json ...]

A file holds {"models": {name: config.json, with its `source`s and how images are cut in `preprocess`}}. A model comes
along where every size was read in a source of its own (`status` read), or where sizes read of its parts give the
parameters of a published table; what stays unsure is a note of its description. The reason for each that is left out is
printed. The same files and the same versions of trimtab, torch and Transformers give the same bytes; layers of LLaVA
and Gemma 3 were written by hand when the shipped files were made.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.models.describe import describe
from trimtab.models.description import description_bytes
from trimtab.models.images.unsettled import UnsettledRule

ZOO = Path(__file__).parents[1] / "src" / "trimtab" / "models" / "zoo"
READ_BY_US = ("computed_params_b", "computed_vs_label", "size_label_b", "size_label_source")
KEPT_ALL_ALONG = ("InternVL-Chat-V1-5",)  # shipped since 0.1
MAX_DIFFERENCE = 0.01  # of parameters counted from parts, against a published table
ALSO = {
    "LLaVA-OneVision-0.5B": ["llava-onevision-qwen2-0.5b-ov-hf", "llava-onevision-qwen2-0.5b-si-hf"],
    "LLaVA-OneVision-7B": ["llava-onevision-qwen2-7b-ov-hf", "llava-onevision-qwen2-7b-si-hf"],
    "LLaVA-OneVision-72B": ["llava-onevision-qwen2-72b-ov-hf"],
    "LLaVA-1.6-34B": ["llava-v1.6-34b-hf", "llava-next-34b"],
    "LLaVA-1.6-vicuna-13B": ["llava-v1.6-vicuna-13b-hf"],
    "InternVL2-Llama3-76B": ["InternVL2-76B"],
    "GLM-4.5V": ["GLM-4.5V-106B"],
    "MiniCPM-V-2.6": ["MiniCPM-V-2_6"],
}
"""Names on the Hub that differ from ours in more than case, marks and an -Instruct."""


def main() -> None:
    shipped: dict[str, str] = {}
    for path in sys.argv[1:]:
        for label, entry in json.loads(Path(path).read_text(encoding="utf-8"))["models"].items():
            name = label.partition(" (")[0]
            if not _is_known(name, entry):
                print(f"left out {name}: sizes of its parts alone were read, and no table confirms their sum")
                continue
            config = {key: value for key, value in entry.items() if key not in READ_BY_US}
            try:
                model = describe(config, name=name)
            except ConfigError as error:
                print(f"left out {name}: {str(error).splitlines()[0][:160]}")
                continue
            if isinstance(model.image_rule, UnsettledRule):
                print(f"left out {name}: {model.image_rule.reason[:160]}")
                continue
            if entry.get("unsure"):
                note = f"Not confirmed for this very checkpoint: {'; '.join(entry['unsure'])}."
                model = replace(model, notes=(*model.notes, note))
            data = {**json.loads(description_bytes(model)), "config": config}
            shipped[name] = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    lines = "".join(f"{shipped[name]}\n" for name in sorted(shipped))
    (ZOO / "models.jsonl").write_text(lines, encoding="utf-8")
    also = {name: others for name, others in ALSO.items() if name in shipped}
    (ZOO / "names.json").write_text(json.dumps(also, indent=1) + "\n", encoding="utf-8")
    total = sum(x.stat().st_size for x in ZOO.iterdir())
    print(f"{len(shipped)} models, {total} bytes")


def _is_known(name: str, entry: dict[str, Any]) -> bool:
    table = "vision" in entry.get("size_label_b", {})  # parameters of each tower, and no size in a name
    summed = table and abs(entry["computed_vs_label"]) < MAX_DIFFERENCE
    return name in KEPT_ALL_ALONG or entry.get("status") == "read" or summed


if __name__ == "__main__":
    main()
