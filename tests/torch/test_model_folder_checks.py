"""A config.json from outside: what never reaches a loader. Needs torch and Transformers."""

from __future__ import annotations

import json
from pathlib import Path

from trimtab.runtime.placing.folder import check_folder


def test_a_config_of_a_large_model_is_taken(tmp_path: Path) -> None:
    large = {"hidden_size": 16384, "vocab_size": 262_208, "max_position_embeddings": 10_485_760}
    text = {**large, "dtype": "float8_e4m3fn", "_attn_implementation": "sdpa"}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": text, "torch_dtype": None}))
    check_folder(tmp_path)
