"""Where a pipeline may not cut a model that was asked: functions that more than one tensor crosses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.specs import LayerSpec

_TAPS = re.compile(r"deepstack|merger_list")


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where not to cut."""

    forbidden: frozenset[int]  # into pipeline stages
    reason: str | None
    joined: frozenset[int]  # into devices that serve: what crosses there meets outside of any layer


def find_cuts(model: Any, layers: Sequence[LayerSpec]) -> Cuts:
    """Forbidden cuts and why, in one sentence.

    DeepStack: from the first tap up to the decoder block that takes the last of them; where the decoder does not say
    how it takes them, up to its last block. Several hidden states of the tower: from the first that is read up to the
    projector. Cross-attention to the tower's rows: up to the last block that reads them. Encoder and decoder with
    cross-attention: in the decoder, for every block reads the encoder's rows. Where the model serves, only states that
    are joined, bare parameters and modules that it calls `_no_split_modules` stay together.
    """
    cuts: set[int] = set()
    joined: set[int] = set()
    reasons = []
    blocks = [i for i, x in enumerate(layers) if x.tower == "language" and x.kind == "block" and _numbered(x.name)]
    taps = [i for i, x in enumerate(layers) if x.tower == "projector" and _TAPS.search(x.name)]
    if taps and blocks:
        known = hasattr(model.get_decoder(), "_deepstack_process")
        last = blocks[min(len(taps), len(blocks)) - 1] if known else blocks[-1]
        cuts.update(range(taps[0] + 1, last + 1))
        reasons.append("DeepStack features of the vision tower would have to cross with the hidden states")
    vision = [i for i, x in enumerate(layers) if x.tower == "vision" and x.kind == "block"]
    states = _read_states(model.config, len(vision))
    if len(states) > 1 and vision:
        after = next(
            (i for i, x in enumerate(layers) if i > vision[-1] and x.tower != "vision" and not x.unread),
            len(layers) - 1,
        )
        joined.update(range(vision[max(min(states) - 1, 0)] + 1, after + 1))
        reasons.append("the projector joins several hidden states of the vision tower")
    crossing = [
        i for i, x in enumerate(layers) if x.attention is not None and x.attention.cross and x.tower == "language"
    ]
    crossing += [i for i, x in enumerate(layers) if x.tower == "language" and _joins_encoder(model, x)]
    if crossing:
        start = next((i for i, x in enumerate(layers) if x.tower == "language"), 0)
        cuts.update(range(max(start, 1), max(crossing) + 1))
        reasons.append("cross-attention blocks read other rows than the hidden states")
    for i, x in enumerate(layers):
        if x.bare:
            joined.update({i, i + 1} if x.tower == "vision" else {i})
            reasons.append(f"{x.name} is a bare parameter and cannot run without its neighbour")
    cuts |= joined
    for name, module in model.named_modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            inside = [i for i, x in enumerate(layers) if x.name.startswith(f"{name}.")]
            joined.update(range(min(inside) + 1, max(inside) + 1) if inside else ())
    return Cuts(
        forbidden=frozenset(x for x in cuts if 0 < x < len(layers)),
        reason="; ".join(reasons) or None,
        joined=frozenset(x for x in joined if 0 < x < len(layers)),
    )


def _numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _joins_encoder(model: Any, layer: LayerSpec) -> bool:
    if layer.kind != "block" or not _numbered(layer.name):
        return False
    module = model.get_submodule(layer.name)
    return any(re.search(r"cross_?att|encoder_attn|EncDecAttention", name) for name, _ in module.named_modules())


def _read_states(config: Any, depth: int) -> list[int]:
    """Numbers of hidden states, where several are read: 0 enters the first block."""
    for place in (config, getattr(config, "vision_config", None)):
        for name in ("vision_feature_layer", "vision_feature_layers", "vit_layers", "intermediate_layers_indices"):
            written = getattr(place, name, None)
            if isinstance(written, (list, tuple)) and all(isinstance(x, int) for x in written):
                return sorted({x if x >= 0 else depth + 1 + x for x in written})
    return []
