"""A model's modules -> units: what a pipeline stage holds whole, each parameter in exactly one, by tower."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimtab.specs import Tower

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
    """A module, or one parameter that lies beside modules."""

    path: str
    tower: Tower
    module: Any  # None: a bare parameter
    parameters: dict[str, nn.Parameter]  # all of them, shared ones too
    num_params: int  # those that no earlier unit holds
    list_path: str | None  # of the list of blocks it is an element of


def split_units(model: Any) -> list[Unit]:
    """Units in module order; `num_params` sum up to the model's, a shared weight counted once, where it comes first."""
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
    """Positions in forward order: audio, vision with its projectors, language; in a tower as they were entered.

    `times`: when each was entered first, by path. A unit that was not (its weights are read by another) follows its
    neighbour in module order.
    """
    keys, last = [], dict.fromkeys(_RANK.values(), -1.0)
    for i, unit in enumerate(units):
        rank = _RANK[unit.tower]
        time = float(times.get(unit.path, last[rank]))
        if unit.tower == "language" and hasattr(unit.module, "num_embeddings"):
            time = -1.0  # text is embedded beside the images
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
    """Whether the elements are modules of parts; of a sequence they must be alike, too."""
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
        """By the innermost root that holds the path; outside of all of them by its name."""
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
