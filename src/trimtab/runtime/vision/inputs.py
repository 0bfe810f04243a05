"""What a call of the vision tower is given, divided into atoms that any rank can encode alone, and what it returns.

It returns one matrix of rows, which goes back into the shape that its caller reads. Understood: an output object with
`pooler_output` and perhaps `deepstack_features` (Transformers 5), the features themselves, or the features and a list
of those of DeepStack layers (4.57). Each of these holds one piece for each image, in a tuple or stacked, or the rows of
all.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trimtab.balance.cost import LinearCost
from trimtab.errors import TrimtabError
from trimtab.models.asking.inputs import first_int, vision_config
from trimtab.specs import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionPart:
    """One tensor argument whose first dimension belongs to the atoms: `lengths[i]` rows to atom i."""

    name: str
    rows: Tensor
    lengths: IntArray

    def take(self, atoms: IntArray) -> Tensor:
        starts = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[atoms]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        index = torch.from_numpy(np.repeat(starts[atoms], lengths) + within)
        return self.rows.index_select(0, index.to(self.rows.device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionInputs:
    """The arguments of one call: `parts` are divided, `fixed` goes to every rank as it is."""

    parts: tuple[VisionPart, ...]
    patches: IntArray  # (n,) rows of the tower, by atom
    windowed: IntArray | None = None  # (n,) sum over attention windows of rows squared; None: no windows
    entries: IntArray  # atoms of each image or clip of the output
    rows: IntArray | None  # (n,) rows that leave, where the family's rule says so beforehand
    fixed: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.patches)

    def to(self, device: torch.device) -> VisionInputs:
        parts = tuple(replace(part, rows=part.rows.to(device, non_blocking=True)) for part in self.parts)
        return replace(self, parts=parts)

    def take(self, atoms: IntArray) -> VisionInputs:
        """Return only these atoms, each as an image of its own."""
        return VisionInputs(
            parts=tuple(VisionPart(name=x.name, rows=x.take(atoms), lengths=x.lengths[atoms]) for x in self.parts),
            patches=self.patches[atoms],
            windowed=None if self.windowed is None else self.windowed[atoms],
            entries=np.ones(len(atoms), np.int64),
            rows=None if self.rows is None else self.rows[atoms],
            fixed=self.fixed,
        )

    def cheapest(self) -> VisionInputs:
        return self.take(np.array([int(np.argmin(self.patches))]))

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that encode these atoms."""
        return {**self.fixed, **{part.name: part.rows for part in self.parts}}


def join_inputs(inputs: Sequence[VisionInputs]) -> VisionInputs | None:
    """Return one call's arguments from those of several, in their order; None of none."""
    if len(inputs) < 2:
        return inputs[0] if inputs else None
    first = inputs[0]
    parts = tuple(
        VisionPart(
            name=part.name,
            rows=torch.cat([x.parts[i].rows for x in inputs]),
            lengths=np.concatenate([x.parts[i].lengths for x in inputs]),
        )
        for i, part in enumerate(first.parts)
    )
    known = [name for name in ("patches", "windowed", "entries", "rows") if getattr(first, name) is not None]
    joined: dict[str, Any] = {name: np.concatenate([getattr(x, name) for x in inputs]) for name in known}
    return replace(first, parts=parts, **joined)


# How a call of the vision tower divides into atoms: asked of the function that is called.
#
# That is `get_image_features` or `get_video_features` of the model, or the tower's own `forward`. Its arguments tell,
# by the conventions of Transformers: a table `image_grid_thw` counts the patches of each image, which stand in one
# tensor; without it the first dimension is images. A test of every
# family shows that encoding atoms apart gives what encoding them together gives, features and gradients.


Kind = Literal["image", "video", "tower"]

GRIDS: dict[Kind, str] = {"image": "image_grid_thw", "video": "video_grid_thw", "tower": "grid_thw"}
PIXELS: dict[Kind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
_TEXT_ONLY = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # of the packed text
_DERIVED = {"vit_metadata"}
"""Lengths and indices of the whole batch that a host (VeOmni) computes beforehand and a tower makes itself without."""
_OTHER: dict[Kind, tuple[str, ...]] = {"image": ("video_", "audio_"), "video": ("image_", "audio_"), "tower": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GridFamily:
    """Patches of all images in one tensor, and a table of (frames, height, width) in patches.

    `frames`: attention, positions and merging stay inside a frame, so that a clip is as many atoms as it has frames.
    """

    frames: bool = True
    merge: str | None = "spatial_merge_size"  # field of the vision configuration: side of the block that one row leaves
    more: Mapping[Kind, tuple[str, ...]] | None = None  # further tensors with one row for each image or clip

    def read(self, kind: Kind, given: dict[str, Any], config: Any) -> VisionInputs:
        pixels, grid_name = _pixels(kind, given), GRIDS[kind]
        grid = given.pop(grid_name, None)
        if not isinstance(grid, Tensor):
            raise TrimtabError(f"{grid_name} is missing: pass what the processor returned")
        table = grid.detach().cpu().numpy().astype(np.int64)
        # an atom is what attention stays inside: a frame, or a whole clip
        clips = table[:, 0] if self.frames else np.ones(len(table), np.int64)
        atoms = np.repeat(table, clips, axis=0)
        if self.frames:
            atoms[:, 0] = 1
        patches = atoms.prod(axis=1)
        if int(patches.sum()) != len(pixels.rows):
            raise TrimtabError(
                f"{grid_name} counts {int(patches.sum())} patches, {pixels.name} has {len(pixels.rows)}: pass both of "
                "the same images"
            )
        # what is said of a clip is said of each of its frames
        own = np.ones(len(atoms), np.int64)
        more = [
            VisionPart(
                name=name,
                rows=torch.as_tensor(given.pop(name)).repeat_interleave(torch.from_numpy(clips), 0),
                lengths=own,
            )
            for name in (self.more or {}).get(kind, ())
            if given.get(name) is not None
        ]
        # the merger makes one row of a block of side x side patches
        side = self.block_side(config)
        return VisionInputs(
            parts=(
                VisionPart(name=pixels.name, rows=pixels.rows, lengths=patches),
                VisionPart(name=grid_name, rows=torch.from_numpy(atoms).to(grid), lengths=own),
                *more,
            ),
            patches=patches,
            windowed=_windowed(atoms, config),
            entries=clips,
            rows=patches // side**2 if side else None,
            fixed=_fixed(kind, given),
        )

    def smallest(self, inputs: VisionInputs, config: Any) -> VisionInputs:
        """Return one block of zeros, where the family has blocks; else the cheapest image at hand."""
        cheapest, side = inputs.cheapest(), self.block_side(config)
        pixels, grid, *more = cheapest.parts
        if side is None or (not self.frames and int(grid.rows[0, 0]) > 1):
            return cheapest
        patches = np.array([side * side])
        rows = pixels.rows.new_zeros(side**2, *pixels.rows.shape[1:])
        block = VisionPart(name=pixels.name, rows=rows, lengths=patches)
        return replace(
            cheapest,
            parts=(block, replace(grid, rows=grid.rows.new_tensor([[1, side, side]])), *more),
            patches=patches,
            windowed=None if cheapest.windowed is None else patches**2,
            rows=None if cheapest.rows is None else np.ones(1, np.int64),
        )

    def block_side(self, config: Any) -> int | None:
        if self.merge is None:
            return None
        side = getattr(vision_config(config), self.merge)
        return int(side if isinstance(side, int) else side[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFamily:
    """A batch of images of one shape: (images, ...), or (samples, images, ...) padded with images of zeros."""

    more: tuple[str, ...] = ()  # further tensors with one row for each image
    padded: bool = False  # the second dimension counts images; all-zero ones are not encoded
    tiles: Callable[[Any, Any], IntArray] | None = None  # (image_sizes, config) -> tiles of each image

    def read(self, kind: Kind, given: dict[str, Any], config: Any) -> VisionInputs:
        pixels = _pixels(kind, given)
        more = [(name, torch.as_tensor(given.pop(name))) for name in self.more if given.get(name) is not None]
        # images of zeros fill a padded batch up; nobody encodes them
        rows, entries = pixels.rows, None
        if self.padded:
            real = (rows.flatten(2) != 0).any(-1)
            real.view(-1)[0] |= ~real.any()  # as the models have it: only black images leave one
            entries = real.sum(1).cpu().numpy().astype(np.int64)
            more = [(name, tensor[real][:, None]) for name, tensor in more]
            rows = rows[real][:, None]
        # tiles of one image stay on one rank: the model joins them
        lengths, tiles = np.ones(len(rows), np.int64), np.ones(len(rows), np.int64)
        if self.tiles is not None:
            tiles = self.tiles(dict(more)["image_sizes"], config)
            if rows.ndim == 4:  # tiles of all images in a row
                lengths = tiles
        own = np.ones(len(tiles), np.int64)
        _refuse_unequal_samples(given)
        return VisionInputs(
            parts=(
                VisionPart(name=pixels.name, rows=rows, lengths=lengths),
                *(VisionPart(name=name, rows=tensor, lengths=own) for name, tensor in more),
            ),
            patches=tiles * _patches_of_one(rows, config),
            entries=own if entries is None else entries,
            rows=None,
            fixed=_fixed(kind, given),
        )

    def smallest(self, inputs: VisionInputs, config: Any) -> VisionInputs:  # noqa: ARG002
        return inputs.cheapest()


Family = GridFamily | BatchFamily


def _count_next_tiles(image_sizes: Tensor, config: Any) -> IntArray:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    side = config.vision_config.image_size
    counts = [
        image_size_to_num_patches(image_size=size, grid_pinpoints=config.image_grid_pinpoints, patch_size=side)
        for size in image_sizes.tolist()
    ]
    return np.array(counts, np.int64)


_BESIDE = re.compile(r"(image|video|pixel|high_res|tile|spatial|target|merge)_|num_frames")
"""Arguments with a row for each image or clip, by their names; others describe the whole batch."""


def find_family(config: Any, encode: Callable[..., Any] | None = None) -> Family:
    """Find the family of `encode`, the function's function; None: that of the configuration's model class."""
    try:
        return ask_family(config, encode or _encoder_of(config))
    except TrimtabError as error:
        model_type = getattr(config, "model_type", None)
        raise TrimtabError(
            f"calls of the {model_type!r} tower are not divided ({error}): give family=GridFamily(...)"
        ) from error


def ask_family(config: Any, encode: Callable[..., Any]) -> Family:
    """Return what the arguments of the function that encodes images say."""
    names = list(inspect.signature(inspect.unwrap(encode)).parameters)
    if not set(GRIDS.values()).isdisjoint(names):
        # a table of grids: patches of all images stand in one tensor
        if any(name.endswith("merge_sizes") for name in names):  # a side of its own for each image
            more: dict[Kind, tuple[str, ...]] = {
                "image": ("image_merge_sizes",),
                "video": ("video_merge_sizes",),
                "tower": ("merge_sizes",),
            }
            return GridFamily(merge=None, more=more)
        vision, fields = vision_config(config), ("spatial_merge_size", "merge_kernel_size")
        return GridFamily(
            frames=getattr(vision, "temporal_merge_size", 1) == 1,  # else several frames become one
            merge=next((x for x in fields if hasattr(vision, x)), None),
        )
    # no table: the first dimension counts images
    if not any("pixel_values" in name for name in names):
        raise TrimtabError("it takes neither pixel_values nor a table of grids")
    more_names = tuple(x for x in names if _BESIDE.match(x) and x not in PIXELS.values())
    tiled = "image_sizes" in names and getattr(config, "image_grid_pinpoints", None)
    return BatchFamily(
        more=more_names,
        padded="pixel_attention_mask" in names and "spatial_shapes" not in names,
        tiles=_count_next_tiles if tiled else None,
    )


def _encoder_of(config: Any) -> Callable[..., Any]:
    from trimtab.runtime.data.formats import model_classes

    core, outer = model_classes(config)
    found = getattr(core, "get_image_features", None) or getattr(outer, "get_image_features", None)
    if found is None:
        raise TrimtabError("its class has no get_image_features")
    return found  # type: ignore[no-any-return]


def tower_flops(config: Any) -> LinearCost:
    """Return the forward multiply-adds of the tower from the widths in its configuration; where no profile is at hand.

    2 (4 d^2 + k d f) per patch and layer, 4 d per pair of patches that attend to one another; k = 2 or, gated, 3.
    Not counted: patch embedding, merger, projector.
    """
    vision = vision_config(config)
    # widths have several names among the families; what none gives is that of a ViT-L
    d = first_int(vision, "hidden_size", "embed_dim", "d_model") or 1024
    if hasattr(vision, "embed_dim") and hasattr(vision, "mlp_ratio"):  # there hidden_size is the language model's
        d = int(vision.embed_dim)
    f = first_int(vision, "intermediate_size") or int(d * getattr(vision, "mlp_ratio", 4))
    layers = first_int(vision, "depth", "num_hidden_layers") or 24
    matrices = 3 if str(getattr(vision, "hidden_act", "")) in ("silu", "swish") else 2
    # layers with windows attend inside them
    whole = getattr(vision, "fullatt_block_indexes", None)
    num_whole = layers if whole is None else len(whole)
    return LinearCost(
        patches=2.0 * layers * (4 * d * d + matrices * d * f),
        patches_sq=4.0 * d * num_whole,
        patches_windowed=4.0 * d * (layers - num_whole),
    )


def _windowed(atoms: IntArray, config: Any) -> IntArray | None:
    """Sum over attention windows of squared rows, for towers that have windows of `window_size` pixels."""
    vision = vision_config(config)
    if not getattr(vision, "window_size", None) or not hasattr(vision, "fullatt_block_indexes"):
        return None
    side = int(vision.window_size // vision.patch_size)

    def squares(lengths: IntArray) -> IntArray:
        return lengths // side * side**2 + (lengths % side) ** 2

    return atoms[:, 0] * squares(atoms[:, 1]) * squares(atoms[:, 2])


def _patches_of_one(rows: Tensor, config: Any) -> int:
    size = getattr(vision_config(config), "patch_size", 14)
    side = int(size if isinstance(size, int) else size[0])
    if rows.ndim < 4:  # patches already
        return int(rows.shape[1])
    return max(1, int(rows.shape[-2] // side) * int(rows.shape[-1] // side))


def _pixels(kind: Kind, given: dict[str, Any]) -> VisionPart:
    """The tensor of pixels, taken out of `given`; at the tower it is the first argument, whatever its name."""
    name = PIXELS.get(kind) or next(iter(given))
    pixels = given.pop(name, None)
    if not isinstance(pixels, Tensor):
        raise TrimtabError(f"{name} is {type(pixels).__name__}, no tensor: give return_tensors='pt'")
    return VisionPart(name=name, rows=pixels, lengths=np.empty(0, np.int64))


def _refuse_unequal_samples(given: dict[str, Any]) -> None:
    counts = given.pop("batch_num_images", None)
    if counts is not None and any(int(count) != 1 for count in counts):
        raise TrimtabError("batch_num_images has samples of several images, which are not encoded apart: leave it out")


def _fixed(kind: Kind, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that go to every rank as they are; refuses what describes or returns the whole batch."""
    fixed = {
        name: value
        for name, value in given.items()
        if value is not None and name not in _TEXT_ONLY | _DERIVED and not name.startswith(_OTHER[kind])
    }
    # one rank's hidden states are not those of the batch
    if captured := sorted(name for name in ("output_hidden_states", "output_attentions") if fixed.get(name)):
        raise TrimtabError(f"ranks have only their images for {' and '.join(captured)}: use handle.paused()")
    if whole := sorted(name for name, value in fixed.items() if isinstance(value, Tensor)):
        raise TrimtabError(f"{', '.join(whole)} describes all images: leave it out, the tower computes its own")
    return fixed


# -- what it returns --------------------------------------------------------------------------------------------------

_LOCAL = ("last_hidden_state", "hidden_states", "attentions")
"""Of a rank's own images only, and nobody reads them after the features: not returned."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """Rows of some atoms: features and DeepStack features side by side."""

    rows: Tensor  # (sum(num_rows), D)
    num_rows: IntArray  # by atom
    widths: tuple[int, ...]  # of the features and of each DeepStack layer; sums to D
    sample: Any  # what the tower returned: the shape to return in

    def without_rows(self) -> Features:
        """The same of no image: for a share that is empty, and encoded another one to know its form."""
        return replace(self, rows=self.rows[:0], num_rows=np.zeros(0, np.int64))


def read_features(output: Any, inputs: VisionInputs) -> Features:
    """Return `output` of a call that encoded `inputs`, all of their atoms."""
    first, *others = columns_of(output)
    # DeepStack's features have as many rows as the features: one matrix, so one exchange for all
    pieces = [_pieces(first, len(inputs), inputs.rows)]
    num_rows = np.array([len(piece) for piece in pieces[0]], np.int64)
    pieces += [_pieces(column, len(inputs), num_rows) for column in others]
    joined = [torch.cat(list(column)) for column in pieces]
    return Features(
        rows=joined[0] if len(joined) == 1 else torch.cat(joined, dim=-1),
        num_rows=num_rows,
        widths=tuple(column.shape[-1] for column in joined),
        sample=output,
    )


def write_features(features: Features, rows: Tensor, num_rows: IntArray) -> Any:
    """Return an output like `features.sample` that holds `rows`, of which `num_rows[i]` are entry i's."""
    return fill_features(features.sample, torch.split(rows, list(features.widths), dim=-1), num_rows)


def fill_features(sample: Any, columns: Sequence[Tensor], num_rows: IntArray) -> Any:
    """Return an output like `sample` that holds these columns, the features and those of DeepStack layers, as rows."""
    filled = [_fill(like, x, num_rows) for like, x in zip(columns_of(sample), columns, strict=True)]
    return _with_columns(sample, filled)


def _with_columns(sample: Any, columns: list[Any]) -> Any:
    """Return an output like `sample` that holds these columns, as `columns_of` gives them."""
    # the three shapes that models return
    if _has_layers(sample):
        return columns[0], columns[1:]
    if isinstance(sample, (Tensor, tuple, list)):
        return columns[0]
    known = {field.name for field in fields(sample)}  # an output may carry more that was captured on the way
    values = {name: value for name, value in sample.items() if name in known and name not in _LOCAL}
    values["pooler_output"] = columns[0]
    if len(columns) > 1:
        values["deepstack_features"] = type(sample.deepstack_features)(columns[1:])
    return type(sample)(**values)


def touch(output: Any, zero: Tensor) -> Any:
    """Return `output` with a zero added, so that what computed the zero takes part in the backward."""
    if isinstance(output, Tensor):
        return output + zero.to(output)
    if isinstance(output, tuple):
        return (touch(output[0], zero), *output[1:])
    if isinstance(output, list):
        return [touch(output[0], zero), *output[1:]]
    output.pooler_output = touch(output.pooler_output, zero)
    return output


def each_tensor(output: Any, start: int, end: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output of entries `start` to `end` alone, every tensor of features changed."""
    return _with_columns(output, [type(x)(change(piece) for piece in x[start:end]) for x in columns_of(output)])


def columns_of(output: Any) -> list[Any]:
    """The features, then those of each DeepStack layer."""
    if _has_layers(output):
        return [output[0], *output[1]]
    if isinstance(output, Tensor) or (isinstance(output, (tuple, list)) and all(isinstance(x, Tensor) for x in output)):
        return [output]
    if getattr(output, "pooler_output", None) is not None:
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    raise TrimtabError(f"features came as {type(output).__name__}: put vision_dp at get_image_features of the model")


def _has_layers(output: Any) -> bool:
    """The features and a list of those of DeepStack layers."""
    return isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], list)


def rows_of(output: Any) -> list[Tensor]:
    """The features, and those of each DeepStack layer, each as one matrix of rows."""
    pieces = [list(x) if isinstance(x, (list, tuple)) else [x] for x in columns_of(output)]
    return [torch.cat([x.reshape(-1, x.shape[-1]) for x in column]) for column in pieces]


def _pieces(column: Any, num_atoms: int, expected: IntArray | None) -> Sequence[Tensor]:
    """Return the rows of each atom."""
    # a piece for each image; images of equal size stacked; or the rows of all in one matrix
    if isinstance(column, (tuple, list)):
        if len(column) == num_atoms:
            return [piece.reshape(-1, piece.shape[-1]) for piece in column]
        problem = f"{len(column)} pieces"
    elif column.ndim >= 3 and len(column) == num_atoms:
        return list(column.reshape(num_atoms, -1, column.shape[-1]).unbind())
    elif column.ndim == 2 and expected is not None and len(column) == int(expected.sum()):
        return list(torch.split(column, expected.tolist()))
    elif column.ndim == 2 and expected is None and num_atoms == 1:
        return [column]
    else:
        problem = f"shape {tuple(column.shape)}"
    raise TrimtabError(f"features of {num_atoms} images came as {problem}: give a family= that fits the model")


def _fill(like: Any, rows: Tensor, num_rows: IntArray) -> Any:
    if isinstance(like, (tuple, list)):
        return type(like)(torch.split(rows, num_rows.tolist()))
    per_entry = math.prod(like.shape[1:-1])
    if like.ndim < 3 or (num_rows % per_entry).any():  # of some images only a part of the rows
        return rows
    return rows.reshape(-1, *like.shape[1:])
