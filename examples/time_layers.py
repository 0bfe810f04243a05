"""Time a model's layers and plan with the seconds: `python examples/time_layers.py [CONFIG [DEVICE]]`.

CONFIG is a config.json as a model ships it (default: a small InternVL made here), DEVICE is cpu or cuda (default: cpu).
Prints what each kind of layer takes, forward and backward, next to what the formulas expect of the same device, then
which split of four stages each of the two would choose. Needs torch and Transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from trimtab import Profile, SplitProblem, describe, profile_model, split_stages
from trimtab.models import read_config
from trimtab.torch import TimingOptions, open_device, profile_timed

SMALL: dict[str, Any] = {
    "model_type": "internvl",
    "vision_config": {
        "model_type": "internvl_vision",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "image_size": [112, 112],
        "patch_size": [14, 14],
        "num_channels": 3,
        "norm_type": "layer_norm",
        "use_qk_norm": False,
        "attention_bias": True,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "hidden_act": "gelu",
    },
    "text_config": {
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    },
    "downsample_ratio": 0.5,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "image_token_id": 9,
    "tie_word_embeddings": False,
}
SIZES = (64, 128, 256)
PACK = np.array([1.0, 260, 4 * 65.0**2, 4 * 65.0**2, 256, 256.0**2, 256.0**2])  # four tiles, one sample of 256 tokens


def stage_sizes(profile: Profile) -> list[int]:
    """Layers of each of four stages, for eight micro-batches like PACK."""
    problem = SplitProblem(
        profile=profile,
        num_stages=4,
        work_mean=PACK,
        work_max=PACK,
        memory_bytes=1e12,
        num_microbatches=8,
        overhead_bytes=0.0,
    )
    return [stage.stop - stage.start for stage in split_stages(problem).stages]


def main(source: str | None, device_name: str) -> None:
    config = SMALL if source is None else read_config(source)
    model, device = describe(config), open_device(device_name)
    options = TimingOptions(dtype="fp32", attention="sdpa", sizes=SIZES, repeats=5)
    timed = profile_timed(config, model, device, options)
    profile = timed.profile
    formulas = profile_model(model, profile.device, dtype="fp32", attention="sdpa")
    print(f"{'layer':36}{'timed ms':>10}{'formula ms':>12}{'band':>8}")
    for kind in timed.kinds:
        ours, theirs = (
            1e3 * float(PACK @ np.add(p.layers[kind.layer].forward_s, p.layers[kind.layer].backward_s))
            for p in (profile, formulas)
        )
        print(f"{model.layers[kind.layer].name:36}{ours:10.3f}{theirs:12.3f}{kind.error:8.0%}")
    print(f"layers of four stages: timed {stage_sizes(profile)}, by formula {stage_sizes(formulas)}")
    print("\n".join(profile.assumptions))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2] if len(sys.argv) > 2 else "cpu")
