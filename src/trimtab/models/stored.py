"""What a folder's weights say of a model: the format they lie in, and which tensors there are. No tensor is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError, quote

MAX_HEADER_BYTES = 2**25  # of one safetensors file; those of the largest shards take 1 MiB


def stored_format(quantised: object) -> str:
    """Return the name of the format that `quantization_config` describes, as `trimtab map --quant` has it.

    A method without a formula keeps its own name, which is refused where bytes are counted.
    """
    if not isinstance(quantised, Mapping):
        raise ConfigError(f"quantization_config is {quote(quantised)}: a JSON object is needed, or none")
    method = str(quantised.get("quant_method", "bitsandbytes" if _is_bitsandbytes(quantised) else "unknown"))
    if method == "bitsandbytes":
        if quantised.get("load_in_8bit"):
            return "bnb-int8"
        return "bnb-nf4-double" if quantised.get("bnb_4bit_use_double_quant") else "bnb-nf4"
    bits = quantised.get("bits", quantised.get("w_bit", 4))
    if method in ("awq", "gptq") and bits == 4:
        return "awq"
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    return f"{method}-{bits}" if method in ("awq", "gptq") else method


def _is_bitsandbytes(quantised: Mapping[str, Any]) -> bool:
    return any(name in quantised for name in ("load_in_4bit", "load_in_8bit"))


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in the folder's safetensors files; none where they are not there or torn."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return frozenset(json.loads(index.read_bytes())["weight_map"])
        with (folder / "model.safetensors").open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return frozenset(json.loads(file.read(size))) if size <= MAX_HEADER_BYTES else frozenset()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()
