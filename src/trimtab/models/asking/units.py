"""A model's modules -> units: what a pipeline stage holds whole, each parameter in exactly one, by tower."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimtab.specs import LayerSpec, Tower

_AUDIO = re.compile(r"audio|speech|sound|whisper")
_PROJECTOR = re.compile(
    r"project|merge|connect|adapt|resampl|qformer|q_former|align|abstractor|deepstack|embed_vision|newline|separator"
    r"|query_tokens|vision_embed|visual_embed|bridge|downsample|image_token_embed|latent|perceiver"
)
_VISION = re.compile(r"vis|image|patch|vq|pixel")
_RANK: dict[Tower, int] = {"audio": 0, "vision": 1, "projector": 1, "language": 2}
_BEHIND = re.compile(r"newline|separator")


@dataclass(frozen=True, eq=False, kw_only=True)
class Unit:
    """A module, or one parameter that lies next to modules."""

    path: str
    tower: Tower
    module: Any  # None: a bare parameter
    parameters: dict[str, nn.Parameter]  # all of them, shared ones too
    num_params: int  # those that no earlier unit holds
    list_path: str | None  # of the list of blocks it is an element of


def split_units(model: Any) -> list[Unit]:
    """List units in module order; `num_params` sum up to the model's, a shared weight counts where it comes first."""
    roots = _Roots.of(model)
    found: list[Unit] = []
    counted: set[int] = set()
    for path, module, list_path in _walk(model, "", None, roots.head):
        if isinstance(module, nn.Parameter):
            parameters, unit_module = {"": module}, None
        else:
            parameters, unit_module = dict(module.named_parameters()), module
        own = {id(x): x.numel() for x in parameters.values() if id(x) not in counted}
        counted.update(own)
        found.append(
            Unit(
                path=path,
                tower=roots.tower_of(path, unit_module),
                module=unit_module,
                parameters=parameters,
                num_params=sum(own.values()),
                list_path=list_path,
            )
        )
    assert sum(x.num_params for x in found) == sum(p.numel() for p in model.parameters()), "a parameter is in no unit"
    return found


def forward_order(units: Sequence[Unit], times: Mapping[str, float]) -> list[int]:
    """Return positions in forward order: audio, vision with its projectors, language; in a tower as they were entered.

    `times`: when each was entered first, by path. A unit that was not (its weights are read by another) follows its
    neighbour in module order.
    """
    keys, last = [], dict.fromkeys(_RANK.values(), -1.0)
    for i, unit in enumerate(units):
        rank = _RANK[unit.tower]
        time = float(times.get(unit.path, last[rank]))
        if unit.tower == "language" and hasattr(unit.module, "num_embeddings"):
            time = -1.0  # text is embedded next to the images
        elif unit.module is None and unit.tower == "projector" and _BEHIND.search(unit.path):
            time = float("inf")  # put between features that are there
        else:
            last[rank] = time
        keys.append((rank, time, i))
    return sorted(range(len(units)), key=lambda i: keys[i])


def find_head(model: Any) -> Any:
    """The module that makes logits, as the model names it or as is usual; None without one."""
    head = model.get_output_embeddings()
    if head is not None:
        return head
    named = [x for name, x in model.named_modules() if name.rpartition(".")[2] == "lm_head"]
    return next((x for x in named if isinstance(getattr(x, "weight", None), nn.Parameter)), None)


def _walk(module: Any, path: str, list_path: str | None, head: Any) -> Iterator[tuple[str, Any, str | None]]:
    if not _has_parameters(module):
        return
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    is_shelf = type(module) is nn.Module  # holds parts, and cannot be run itself
    inner = any(_is_block_list(x) or x is head for x in module.modules() if x is not module)
    if path and not is_shelf and not _is_block_list(module) and ((list_path is not None and not is_list) or not inner):
        yield path, module, list_path
        return
    prefix = f"{path}." if path else ""
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter, None
    for name, child in module.named_children():
        yield from _walk(child, prefix + name, path if is_list else None, head)


def _is_block_list(module: Any) -> bool:
    """Return whether the elements are modules of parts; of a sequence they must be alike, too."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    parted = [x for x in module if any(_has_parameters(y) for y in x.children())]
    if isinstance(module, nn.Sequential):
        return len(parted) > 1 and len(parted) == len(module) and len({type(x) for x in parted}) == 1
    return bool(parted)


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


# -- towers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Roots:
    """Module paths of the towers, as the model names them itself."""

    decoder: str | None
    vision: tuple[str, ...]
    audio: tuple[str, ...]
    head: Any

    @staticmethod
    def of(model: Any) -> _Roots:
        names = {id(module): name for name, module in model.named_modules()}

        def path_of(module: Any) -> str | None:
            name = names.get(id(module))
            return name or None  # the model itself is no tower

        decoder = path_of(model.get_decoder())
        vision = {path_of(model.get_encoder(modality=x)) for x in ("image", "video")}
        vision |= {  # a second tower, or one that has an unusual name
            name
            for name, module in model.named_modules()
            if getattr(module, "main_input_name", "") in ("pixel_values", "flattened_patches")
        }
        outer = {x for x in vision if x and x != decoder and not f"{decoder}.".startswith(f"{x}.")}
        inner = sorted(x for x in outer if not any(y != x and y.startswith(f"{x}.") for y in outer))
        audio = path_of(model.get_encoder(modality="audio"))
        return _Roots(
            decoder=decoder,
            vision=tuple(inner),
            audio=(audio,) if audio and _AUDIO.search(audio) else (),
            head=find_head(model),
        )

    def tower_of(self, path: str, module: Any) -> Tower:
        """Return the tower of the innermost root that holds the path; outside of all, that of its name."""
        if module is not None and module is self.head:
            return "language"
        kinds: list[tuple[str, Tower]] = [(x, "vision") for x in self.vision] + [(x, "audio") for x in self.audio]
        if self.decoder is not None:
            kinds.append((self.decoder, "language"))
        inside = [(len(root), tower, root) for root, tower in kinds if f"{path}.".startswith(f"{root}.")]
        if not inside:
            return _by_name(path)
        _, tower, root = max(inside)
        rest = path[len(root) :]
        if tower == "vision":
            return (
                "projector" if re.search(r"merge|project(or|ion)$|connector|adapter|resampl|deepstack", rest) else tower
            )
        if tower == "language" and _by_name(rest) in ("vision", "audio"):  # a decoder that holds its own encoder
            return _by_name(rest)
        return tower


def _by_name(path: str) -> Tower:
    if _AUDIO.search(path):
        return "audio"
    if _PROJECTOR.search(path) and "vqmodel." not in path:  # which steps down inside
        return "projector"
    return "vision" if _VISION.search(path) else "language"


# -- where a pipeline may not cut: more than one tensor would cross ---------------------------------------------------


_TAPS = re.compile(r"deepstack|merger_list")


@dataclass(frozen=True, slots=True)
class ModelCuts:
    """Where not to cut."""

    forbidden: frozenset[int]  # into pipeline stages
    reason: str | None
    joined: frozenset[int]  # into devices that serve: what crosses there meets outside of any layer


def find_cuts(model: Any, layers: Sequence[LayerSpec]) -> ModelCuts:
    """Return the forbidden cuts and why, in one sentence.

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
    return ModelCuts(
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
    """Return the numbers of hidden states, where several are read: 0 enters the first block."""
    for place in (config, getattr(config, "vision_config", None)):
        for name in ("vision_feature_layer", "vision_feature_layers", "vit_layers", "intermediate_layers_indices"):
            written = getattr(place, name, None)
            if isinstance(written, (list, tuple)) and all(isinstance(x, int) for x in written):
                return sorted({x if x >= 0 else depth + 1 + x for x in written})
    return []
