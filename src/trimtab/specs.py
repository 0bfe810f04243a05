"""The nouns that travel between folders: models, devices, samples, costs, packs, stages.

Rows are what a tower's matrices multiply: ViT patches (class token included) in the vision tower and the projector,
LLM tokens (image tokens included) in the language model. A *cut* `c` lies between `layers[c - 1]` and `layers[c]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from trimtab.errors import TrimtabError
from trimtab.lora import Lora
from trimtab.options import ParallelDims as ParallelDims
from trimtab.options import RecomputedTier as RecomputedTier
from trimtab.options import Tower as Tower
from trimtab.units import format_count, format_degrees, three_lines

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LayerKind = Literal["embed", "block", "norm", "projector", "head"]

WORK_TERMS = (
    "microbatches",  # 1 for each micro-batch: launch overhead, weights read once
    "patches",  # ViT rows, class tokens included
    "patches_sq",  # sum over images (tiles, frames) of rows squared: full ViT attention
    "patches_windowed",  # sum over attention windows of rows squared: windowed ViT attention
    "tokens",  # LLM rows
    "tokens_sq",  # sum over samples of tokens squared: full LLM attention
    "tokens_windowed",  # sum over samples of twice the pairs a sliding window leaves
)
"""What a micro-batch asks of a layer; every cost is linear in these, so costs of packs are one matrix product."""
NUM_WORK_TERMS = len(WORK_TERMS)
Terms = tuple[float, ...]
"""Coefficients of WORK_TERMS."""


# -- models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Heads of one attention layer, before tensor parallelism."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    causal: bool
    window: int | None = None  # rows a query sees at most, in rows of its own tower; None: all of its image or sample
    qk_norm: bool = False
    fused_qkv: bool = False  # one matrix makes q, k and v: v stays a view that keeps all three alive until backward
    cross: bool = False  # keys and values come from the vision tower's projected rows, not from the layer's own


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Feed-forward part of one block."""

    intermediate_size: int  # of one expert, where there are experts
    gated: bool  # SwiGLU / GeGLU: three matrices instead of two
    num_experts: int | None = None
    experts_per_token: int | None = None
    shared_intermediate_size: int = 0  # experts that every token visits, together
    quick_gelu: bool = False  # x * sigmoid(1.702 x) in separate operations (CLIP): one more tensor kept for backward


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWork:
    """Work of a layer that no formula knows, as one weightless forward pass in 16 bits counted it; one device whole.

    Coefficients of WORK_TERMS; both empty where it could not be run: such a layer has no price, and asking is an error.
    """

    forward_flops: tuple[float, ...] = ()  # 2 per multiply-add of matrix products; masked pairs left out
    kept_bytes: tuple[float, ...] = ()  # between forward and backward, nothing recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What a decoder layer keeps of a sequence while it generates, where keys and values of its heads are not that."""

    values_per_token: float = 0.0
    bytes_per_sequence: float = 0.0  # of any length: states of linear attention and of state-space layers, in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One `nn.Linear` of a layer: what an adapter is put next to."""

    name: str  # path inside its layer: "self_attn.q_proj"; empty: the layer itself
    in_width: int
    out_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One module that a pipeline stage holds whole."""

    name: str  # module path as Hugging Face spells it: "model.language_model.layers.0"
    tower: Tower
    kind: LayerKind
    hidden_size: int  # width of the rows that enter (for an embedding: that leave)
    output_size: int  # width of the rows that leave
    num_params: int  # weights and biases it owns; a tied head owns 0
    num_matmul_params: int  # weights each row is multiplied with: of an expert layer only those of the active experts
    rows_per_input: float = 1.0  # rows it multiplies, per patch (vision, projector) or per token (language)
    rows_out_per_input: float = 1.0  # rows that leave, per patch (vision, projector) or per token (language)
    attention: AttentionSpec | None = None
    mlp: MlpSpec | None = None
    # rms_norm_fp32: the weight multiplies before the cast
    norm: Literal["layer_norm", "rms_norm", "rms_norm_fp32"] | None = None
    num_norms: int = 2  # over the rows of a block, q and k norms aside; 4 with post-norms (Gemma 3)
    layer_scale: bool = False  # a learned vector scales what each half of a block adds (InternViT)
    unread: bool = False  # computed, but nothing reads the result: forward work, no gradient, nothing kept
    # in place of the formulas; left out of the repr, and so of plans' fingerprints
    measured: MeasuredWork | None = field(default=None, repr=False)
    # only for serving, and left out for the same reason
    cache: CacheSpec | None = field(default=None, repr=False)  # None: keys and values of `attention`
    extra_bytes: int = field(default=0, repr=False)  # buffers, and what parameters that stay in fp32 take past 16 bits
    companions: tuple[str, ...] = field(default=(), repr=False)  # modules that go to its device
    bare: bool = field(default=False, repr=False)  # a parameter without a module of its own
    # as Transformers builds them; None: not asked, so those that its shapes make (`costs.adapters`)
    linears: tuple[Linear, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def alike(self) -> tuple[object, ...]:
        """Return what is equal for two layers of the same cost, whatever their names."""
        unlike = ("name", "rows_out_per_input", "cache", "extra_bytes", "companions", "bare", "linears")
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in unlike)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCounts:
    """What one image costs the two towers."""

    patches: int  # rows of the vision tower, class tokens included
    tokens: int  # image tokens in the LLM, without start / end markers
    tiles: int  # separate images the tower sees (crops and thumbnail)
    patches_sq: int  # sum over the tower's full-attention segments of rows squared
    patches_windowed: int  # the same sum over windows, for towers with window attention; else equal to patches_sq
    # what its processor writes, each run of image tokens once; None: as for every image of the model
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMarkup:
    """How one image stands in the text: once as a placeholder, then as markers around its image tokens.

    A processor replaces every `placeholder` of the rendered chat by `before` + n x `soft` + `after`, n being the
    image rule's tokens, or by a text of the image's own (`ImageCounts.text`), and encodes the result. `soft` is an
    added token: the tokenizer cuts the text at it, so n copies are n tokens and change nothing to either side. So the
    count is exact with one copy encoded and n - 1 added. Use it in a `Family` of your own; docs/models.md shows it.
    """

    placeholder: str
    soft: str
    before: str = ""
    after: str = ""
    written: str | None = None  # by us, for a template that takes plain strings only; None: the placeholder
    crops: tuple[str, str] | None = None  # text before a cropped image, text between it and its crops


class ImageRule(Protocol):
    """A family's preprocessing as arithmetic: frozen settings and one function of the image size."""

    @property
    def name(self) -> str: ...

    def count(self, width: int, height: int) -> ImageCounts:
        """Count patches and tokens of a `width` x `height` image; `ImageError` where the processor raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What decides how a video is sampled and cut: frames of `width` x `height` pixels.

    Give it to a model's `clip_rule.count_clip`, as examples/video_samples.py does, to know what a video costs.
    """

    width: int
    height: int
    num_frames: int
    fps: float | None  # of the file; None: unknown, of frames that were given as images
    listed: bool = False  # the frames were given as images: all are taken, none is sampled
    own: tuple[tuple[str, float], ...] = ()  # what a content part asks for its own video (Qwen): fps, max_pixels, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCounts:
    """What one video costs the two towers, and how it stands in the text."""

    image: ImageCounts  # as of an image whose tiles are the inputs that the tower attends over; its text is never None
    placeholder: str  # what the chat template writes for a video
    soft: str  # the token that its features take the place of


class ClipRule(Protocol):
    """A family's preprocessing of videos: which frames are sampled, and what each becomes."""

    def prepare(self, clips: Iterable[Clip]) -> None:
        """Counts many at once; optional before `count_clip`."""
        ...

    def count_clip(self, clip: Clip) -> ClipCounts:
        """Return the patches, tokens and text of a video; `ImageError` where the processor raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrigin:
    """Where a model was described from: enough to describe it again."""

    config: str  # path of config.json or its folder, or the name of a shipped description
    preprocessor: str | None = None  # where it does not lie next to the config
    max_pixels: int | None = None  # the user's own limits of an image
    max_tiles: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A vision-language model as its configuration describes it, layers in forward order.

    Use `describe` to make one. `layers` are what stages are cut from; parameters are counted, bytes are not: those are
    in a `Profile`.

    >>> from trimtab import describe
    >>> model = describe("Qwen2.5-VL-7B")
    >>> model.layers[0].name, model.layers[-1].name
    ('model.visual.patch_embed', 'lm_head')
    """

    name: str
    family: str
    layers: tuple[LayerSpec, ...]
    image_rule: ImageRule
    vocab_size: int
    clip_rule: ClipRule | None = None  # None: no file of its processor is known
    image_markup: ImageMarkup | None = None  # asked of the processor; None: that of the family, or of the template
    tied: tuple[tuple[str, str], ...] = ()  # (owner, borrower) module paths that share one weight
    max_positions: int | None = None  # tokens of a sample that its positions reach; None: its configuration is silent
    stored_as: str | None = None  # format of quantised weights, as `placement.machine.QUANTS` names it; None: 16 bits
    forbidden_cuts: frozenset[int] = frozenset()
    forbidden_cut_reason: str | None = None
    joined_cuts: frozenset[int] | None = None  # cuts that a device map does not make either; None: all forbidden ones
    config_blake2b: str = ""
    notes: tuple[str, ...] = ()  # assumptions made while describing, in sentences
    asked_of: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # (package, version) that answered
    origin: ModelOrigin | None = field(default=None, compare=False)  # None: described from a mapping, not from a file

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        assert len(set(names)) == len(names), "layer names repeat"
        assert all(0 < cut < len(names) for cut in self.forbidden_cuts), "a cut lies outside the model"

    def __repr__(self) -> str:
        towers = {tower: self.num_tower_params(tower) for tower in dict.fromkeys(x.tower for x in self.layers)}
        return three_lines(
            f"ModelSpec {self.name} ({self.family}), {len(self.layers)} layers",
            f"{format_count(self.num_params)} parameters: "
            + ", ".join(f"{tower} {format_count(count)}" for tower, count in towers.items()),
            f"images cut by {self.image_rule.name}",
        )

    @property
    def num_params(self) -> int:
        return sum(layer.num_params for layer in self.layers)

    def num_tower_params(self, tower: Tower) -> int:
        return sum(layer.num_params for layer in self.layers if layer.tower == tower)

    def indices(self, tower: Tower, kind: LayerKind | None = None) -> list[int]:
        """Return the positions of a tower's layers, in forward order."""
        return [i for i, x in enumerate(self.layers) if x.tower == tower and (kind is None or x.kind == kind)]

    @property
    def token_window(self) -> int | None:
        """Return the sliding window of the language model's windowed layers, in tokens."""
        found = (layer.attention for layer in self.layers if layer.tower == "language")
        return next((x.window for x in found if x is not None and x.window is not None), None)


# -- hardware -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Published peaks of one accelerator.

    Use `find_device` to get one of the table; make one by hand, or a YAML file, for another device. Bytes, bytes/s and
    FLOP/s.

    >>> from trimtab import find_device
    >>> find_device("H200").memory_bytes >> 30  # GiB
    139
    """

    name: str
    memory_bytes: int
    peak_flops: float  # dense bf16 matrix flop/s, no sparsity
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to another device of the same node, one direction
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal devices; `parse_cluster` makes one from a few characters.

    Use it where `parse_cluster` cannot say what you have, as other links between nodes.

    >>> from trimtab import find_device
    >>> ClusterSpec(device=find_device("H20"), num_nodes=2, devices_per_node=8).latency_s
    1e-05
    """

    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    node_link_bytes_per_s: float = 25e9  # of one device to other nodes, one direction: its share of its node's ports
    latency_s: float = 10e-6  # of one message between devices

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise TrimtabError(f"{self.num_nodes} nodes x {self.devices_per_node} devices: give at least 1 x 1")

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def slowest_link_bytes_per_s(self) -> float:
        """Return the rate between devices of different nodes, where there are several; else within the node."""
        return self.node_link_bytes_per_s if self.num_nodes > 1 else self.device.link_bytes_per_s

    def ring_bytes_per_s(self, degree: int, *, stride: int = 1) -> float:
        """Return what each rank of a group sends in a ring: `degree` ranks, each `stride` devices after the one before.

        A group within a node has the device's own link. One over several nodes enters and leaves a node by the ports of
        all its members there, as communication libraries use them, and no faster than a device's own link.

        >>> from trimtab import parse_cluster
        >>> cluster = parse_cluster("32xA100-80GB")  # ports of 25 GB/s, links of 300
        >>> [cluster.ring_bytes_per_s(n, stride=tp) / 1e9 for n, tp in [(8, 1), (32, 1), (16, 2), (4, 8)]]
        [300.0, 200.0, 100.0, 25.0]
        """
        if degree * stride <= self.devices_per_node:
            return self.device.link_bytes_per_s
        members = max(1, self.devices_per_node // stride)
        return min(self.device.link_bytes_per_s, members * self.node_link_bytes_per_s)


# -- data -----------------------------------------------------------------------------------------------------------


_LARGEST_ROOT = 3_037_000_499  # whose square int64 holds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTable:
    """Sizes of every sample of a data set, one column each; row i is sample i of the data set's own order.

    Use it for lengths that you have already; `size_samples` makes one of a data set. Every column is an integer array
    of shape (samples,).

    `num_patches` counts ViT patches, or tiles where a file of ready-made lengths knows only tiles (`patch_unit`).

    >>> import numpy as np
    >>> tiles = np.array([1, 5, 3, 0, 2, 5, 1, 4])
    >>> samples = SampleTable.of(tiles, 256 * tiles + 90, patch_unit="tiles")
    >>> len(samples), samples.sample_id(2)
    (8, '2')
    """

    num_images: IntArray
    num_patches: IntArray
    num_tokens: IntArray
    patches_sq: IntArray  # per sample: sum over its images of ImageCounts.patches_sq
    patches_windowed: IntArray  # per sample: sum over its images of ImageCounts.patches_windowed
    image_patches: IntArray | None = None  # of every image, sample after sample; None: not known, or one a sample
    ids: tuple[str, ...] | None = None  # None: the row number is the id
    source: npt.NDArray[np.int32]  # data set each sample came from, an index into source_names
    source_names: tuple[str, ...] = ("data",)
    patch_unit: Literal["patches", "tiles"] = "patches"
    tokens_exact: bool = True  # False: estimated without a tokenizer
    # of num_tokens those of a second sequence: a pair of answers is trained as two; None: each sample is one sequence
    second_tokens: IntArray | None = None
    # where each sample's record is: file of the data set, from 0, and line or record number in it, from 1
    file_index: npt.NDArray[np.int32] | None = None  # None: all are in the first file
    line: IntArray | None = None  # None: row i is record i + 1, none was left out and no line is blank
    num_files: int = 1

    def __post_init__(self) -> None:
        columns = ["num_images", "num_patches", "patches_sq", "patches_windowed", "source", "ids", "file_index", "line"]
        columns.append("second_tokens")
        lengths = {name: len(getattr(self, name)) for name in columns if getattr(self, name) is not None}
        assert set(lengths.values()) == {len(self)}, f"columns of unequal lengths: {lengths}, {len(self)} tokens"
        assert self.image_patches is None or len(self.image_patches) == self.num_images.sum(), "images without a size"

    @classmethod
    def of(cls, num_patches: npt.ArrayLike, num_tokens: npt.ArrayLike, **columns: Any) -> SampleTable:
        """Use it where sizes are at hand already. Not given, a sample with patches holds one image, whole in attention.

        `columns` are the other fields. Samples without images: `SampleTable.of(0 * tokens, tokens)`.
        """
        patches = np.asarray(num_patches, np.int64)
        follow = {"num_images": np.minimum(patches, 1), "patches_sq": np.minimum(patches, _LARGEST_ROOT) ** 2}
        columns = follow | {"source": np.zeros(len(patches), np.int32)} | columns
        columns.setdefault("patches_windowed", columns["patches_sq"])
        return cls(num_patches=patches, num_tokens=np.asarray(num_tokens, np.int64), **columns)

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __repr__(self) -> str:
        def summed(unit: str, column: IntArray) -> str:
            most = int(column.max()) if len(column) else 0
            return f"{unit}: {int(column.sum()):,} in all, {most:,} the most of a sample"

        return three_lines(
            f"SampleTable of {len(self):,} samples from {len(self.source_names)} sources",
            summed(self.patch_unit, self.num_patches),
            summed("tokens" if self.tokens_exact else "tokens, estimated", self.num_tokens),
        )

    def sample_id(self, row: int) -> str:
        return self.ids[row] if self.ids is not None else str(row)

    def images_of(self, rows: IntArray) -> IntArray | None:
        """Return `image_patches` of samples `rows`, in their order."""
        if self.image_patches is None:
            return None
        count = self.num_images[rows]
        first = (np.cumsum(self.num_images) - self.num_images)[rows] - (np.cumsum(count) - count)
        found: IntArray = self.image_patches[np.repeat(first, count) + np.arange(int(count.sum()))]
        return found

    def work(self, *, token_window: int | None = None) -> FloatArray:
        """Return what each sample asks of the layers, (num_samples, len(WORK_TERMS)); the first column is 0."""
        w = np.zeros((len(self), NUM_WORK_TERMS))
        w[:, 1], w[:, 2], w[:, 3] = self.num_patches, self.patches_sq, self.patches_windowed
        w[:, 4] = self.num_tokens
        for t in self.sequences():
            w[:, 5] += t * t
            # causal pairs under a window W: W(W+1)/2 + (t - W) W  ~ tW - W^2/2; twice that, to be of one unit with t^2
            window = np.inf if token_window is None else float(token_window)
            w[:, 6] += t * t if token_window is None else np.where(t <= window, t * t, 2.0 * t * window - window**2)
        return w

    def sequences(self, rows: IntArray | slice = slice(None)) -> list[FloatArray]:
        """Return tokens of each sample's sequence; and, where samples are pairs of answers, of its second."""
        tokens = self.num_tokens[rows].astype(np.float64)
        if self.second_tokens is None:
            return [tokens]
        second = np.minimum(self.second_tokens[rows].astype(np.float64), tokens)
        return [tokens - second, second]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Samples grouped into packs (micro-batches): pack p holds `indices[offsets[p]:offsets[p + 1]]`.

    Use `pack_samples` to make one. `offsets` has one entry more than there are packs, `indices` the rows of the
    samples.

    >>> import numpy as np
    >>> packing = Packing(offsets=np.array([0, 2, 3]), indices=np.array([4, 0, 2]), limits=(9, 4096))
    >>> packing.num_packs, packing.sums(np.array([5, 1, 7, 1, 2])).tolist()
    (2, [7, 7])
    """

    offsets: IntArray  # (num_packs + 1,)
    indices: IntArray  # rows of the SampleTable, each at most once; in a mixture as often as it is drawn
    limits: tuple[int, ...]  # (max_patches, max_tokens)
    oversize: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # rows left out by the user's own choice
    method: str = "balanced"
    seed: int = 0

    def __repr__(self) -> str:
        return three_lines(
            f"Packing of {len(self.indices):,} samples in {self.num_packs:,} packs",
            f"at most {' and '.join(f'{limit:,}' for limit in self.limits)} (patches and tokens) a pack",
            f"method {self.method}, seed {self.seed}, {len(self.oversize):,} samples left out as too large",
        )

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    def sums(self, columns: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Sum per-sample `columns`, (num_samples,) or (num_samples, k), over each pack."""
        gathered = columns.take(self.indices, axis=0)
        if self.num_packs == 0:
            return gathered[:0]
        # reduceat cannot sum empty packs, and no packer makes one
        result: npt.NDArray[np.generic] = np.add.reduceat(gathered, self.offsets[:-1], axis=0)
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Which pack each rank runs when: `table[step, rank, microbatch]` is a pack, -1 an empty slot of the last step.

    Use it to know what each rank runs; `pack_samples` returns one.

    >>> import numpy as np
    >>> Schedule(table=np.arange(8).reshape(2, 4, 1)).num_steps
    2
    """

    table: IntArray  # (num_steps, dp, num_microbatches)
    order: str = "random"

    def __repr__(self) -> str:
        steps, dp, num_microbatches = self.table.shape
        return three_lines(
            f"Schedule of {steps:,} steps, {self.order} order",
            f"{dp} ranks x {num_microbatches} micro-batches a step",
            f"{int((self.table < 0).sum()):,} empty slots",
        )

    @property
    def num_steps(self) -> int:
        return int(self.table.shape[0])


# -- costs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeTier:
    """One way to hold a layer's activations between forward and backward."""

    name: Literal["none", "selective", "full"]
    extra_backward_s: tuple[float, ...]  # per WORK_TERMS, added to the layer's backward
    saved_bytes: tuple[float, ...]  # per WORK_TERMS, held per micro-batch in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs one device; tuples are coefficients of WORK_TERMS."""

    name: str  # module path as Hugging Face spells it: "model.language_model.layers.0"
    tower: Tower
    kind: LayerKind
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # without recompute
    output_bytes: tuple[float, ...]  # sent to the next stage if the model is cut after this layer
    state_bytes: float  # parameters, gradients and optimizer state on this device
    num_params: float  # on this device
    tiers: tuple[RecomputeTier, ...]  # the first is "none"; a layer that cannot recompute has no other
    # live at once inside the layer's backward next to what it keeps: gradients of rows and of a weight, fp32 logits
    transient_bytes: tuple[float, ...]
    group: int  # layers of one group cost the same
    step_s: float = 0.0  # once a step: its gradients exchanged over the dp ranks, its parameters updated
    weight_s: tuple[float, ...] = ()  # the part of backward_s that only weight gradients need; empty: not known
    other_transient_bytes: tuple[float, ...] = ()  # as transient_bytes, at another moment: the larger counts
    # of a micro-batch in flight, more on a stage that begins with this layer: tables and masks of its tower, which
    # every tier of an earlier layer counts; empty: none
    entry_bytes: tuple[float, ...] = ()
    # the host's, for a micro-batch of any size: a pass lasts as long as the slower of device and host
    host_forward_s: float = 0.0  # once more where the layer recomputes
    host_backward_s: float = 0.0

    def tier(self, name: str) -> RecomputeTier | None:
        return next((tier for tier in self.tiers if tier.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds and bytes of every layer on one device: the table every solver reads.

    Use `profile_model` to make one. Seconds and bytes are of one micro-batch and depend on its work, see `LayerCost`.

    >>> from trimtab import describe, find_device, profile_model
    >>> profile = profile_model(describe("Qwen2.5-VL-7B"), find_device("H200"))
    >>> len(profile.layers), profile.method
    (65, 'analytic')
    """

    layers: tuple[LayerCost, ...]
    method: Literal["analytic", "traced", "timed", "logged", "probed"]
    device: DeviceSpec
    dims: ParallelDims
    dtype: str
    time_error: float  # relative half-width of the error band
    memory_error: float
    assumptions: tuple[str, ...] = ()
    attention: Literal["flash", "sdpa", "eager"] = "flash"
    fused_kernels: bool = False
    frozen_towers: tuple[Tower, ...] = ()
    lora: Lora | None = None  # None: weights are trained themselves
    layers_blake2b: str = ""  # of the model's layers; empty: of none in particular
    optimizer: str | None = None  # whose state was measured; None: state follows the plan's
    zero_stage: int | None = None  # at which it was measured
    send_wait_bytes_per_s: float | None = None  # of sends that both stages wait for; None: they wait for none

    def __repr__(self) -> str:
        return three_lines(
            f"Profile of {len(self.layers)} layers on {self.device.name}, {self.method}, {self.dtype}",
            f"{format_degrees(self.dims)}, attention {self.attention}",
            f"seconds within ± {100 * self.time_error:.0f} %, bytes within ± {100 * self.memory_error:.0f} %",
        )

    def matrix(self, term: Literal["forward_s", "backward_s", "output_bytes"]) -> FloatArray:
        """Return (num_layers, len(WORK_TERMS)) coefficients."""
        return np.array([getattr(layer, term) for layer in self.layers], dtype=np.float64).reshape(-1, NUM_WORK_TERMS)

    def transients(self, work: FloatArray) -> FloatArray:
        """Return (num_layers,) bytes that each layer's backward needs at `work` next to what it keeps; not below 0."""
        moments = [(x.transient_bytes, x.other_transient_bytes or x.transient_bytes) for x in self.layers]
        both = np.array(moments, dtype=np.float64).reshape(-1, 2, NUM_WORK_TERMS) @ work
        most: FloatArray = both.max(axis=1, initial=0.0)
        return most


# -- pipeline -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """Layers of the model, by number, that hold their activations by `tier`.

    Use it in `Stage(recompute=...)`.

    >>> RecomputeChoice(tier="full", layers=(3, 4)).layers
    (3, 4)
    """

    tier: RecomputedTier
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers `start <= i < stop`, on one pipeline rank (or one virtual stage of it).

    Use it to say a split by hand; `split_stages` returns a tuple of them.

    >>> Stage(index=0, start=0, stop=12).num_recomputed()
    0
    """

    index: int
    start: int
    stop: int
    recompute: tuple[RecomputeChoice, ...] = ()

    def num_recomputed(self) -> int:
        return sum(len(choice.layers) for choice in self.recompute)


def stages_between(cuts: Iterable[int]) -> tuple[Stage, ...]:
    """Return stages, nothing recomputed, between cuts 0, ..., the number of layers."""
    return tuple(Stage(index=i, start=a, stop=b) for i, (a, b) in enumerate(itertools.pairwise(cuts)))


def tiers_of(stage: Stage) -> dict[int, RecomputedTier]:
    """The tier of each layer that the stage recomputes."""
    return {i: choice.tier for choice in stage.recompute for i in choice.layers}


def recomputing(stage: Stage, tiers: Mapping[int, RecomputedTier]) -> Stage:
    """The stage with recompute of those of these layers that it holds, each by its tier, and of no other.

    >>> recomputing(Stage(index=1, start=4, stop=8), {3: "full", 5: "full", 6: "selective"}).recompute[0]
    RecomputeChoice(tier='selective', layers=(6,))
    """
    own = range(stage.start, stage.stop)
    layers = {tier: tuple(i for i in own if tiers.get(i) == tier) for tier in get_args(RecomputedTier)}
    chosen = tuple(RecomputeChoice(tier=tier, layers=found) for tier, found in layers.items() if found)
    return replace(stage, recompute=chosen)


def evaluate(coefficients: FloatArray | Sequence[float], work: FloatArray) -> FloatArray:
    """Return the coefficients (..., T) times work (n, T): costs (n, ...)."""
    result: FloatArray = np.asarray(work, np.float64) @ np.asarray(coefficients, np.float64).T
    return result
