"""Column "loaded": the shrunk model, saved, then loaded by two maps over simulated devices, answers as the plain one.

The first map is the solver's, on three unlike GPUs that are too small, with host memory and disk; in the second every
unit that a map may place lies elsewhere than its neighbours: on four GPUs, in host memory and on disk in turn. Logits
and eight greedy tokens are those of the plain model in one piece, for text and, where one can be drawn, for an image.
Run: python bench/columns/loaded.py [FAMILY ...]
"""

import inspect
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cell import Cell, sweep

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "torch"))

import transformers
from drawn_images import draw_image_samples
from rounding import distance
from shrunk_models import make_shrunk
from simulated_devices import simulated

from trimtab.errors import PartitionError
from trimtab.models.asking.inputs import image_token
from trimtab.models.asking.model import build, describe_model
from trimtab.placement.bytes import DeviceKey, modules_of, parts_of
from trimtab.placement.machine import Gpu, Machine, Workload
from trimtab.placement.place import place
from trimtab.placement.placed import Placement
from trimtab.runtime.data.formats import TOKEN_TYPE_KEYS
from trimtab.runtime.data.packing import text_ids
from trimtab.runtime.placing.load import load_placed
from trimtab.specs import ModelSpec

NEW_TOKENS = 8
GENERATE: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
BOUND = 1e-5  # of float32, as tests/torch/rounding.py has it
CHANGES = {
    **{name: {"image_token_index": 120} for name in ("blip-2", "instructblip", "instructblipvideo")},
    **{name: {"vision_start_token_id": 121} for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
}
"""Fields that processors or published configurations set."""
IN_TURN: tuple[DeviceKey, ...] = (0, "cpu", 1, 2, "disk", 3)


@dataclass(frozen=True)
class Case:
    """One call, and what the plain model answers."""

    kind: str  # "text" or "image"
    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor
    tokens: torch.Tensor | None  # None: it does not generate


@torch.no_grad()
def check(family: str) -> Cell:
    model = make_shrunk(family, changes=CHANGES.get(family))
    cases = list(_cases(model))
    if not cases:
        return Cell(yes=False, note="the shrunk model itself runs on no call that is tried")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            type(model).from_pretrained(folder)
        except Exception as error:  # its own conversion of names or its own configuration
            return Cell(yes=False, note=f"Transformers does not load what it saved: {_first_line(error)}")
        spec = describe_model(build(transformers.AutoConfig.from_pretrained(folder)))
        placements = (_solved(spec), _in_turn(spec))
        for number, placement in enumerate(placements):
            problem = _compare(folder, placement, cases)
            if problem:
                return Cell(yes=False, note=f"{('solved', 'in turn')[number]}: {problem}")
    return Cell(yes=True, note="; ".join(_remarks(cases)))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:150]


def _remarks(cases: list[Case]) -> Iterator[str]:
    if all(case.tokens is None for case in cases):
        yield "logits alone: it does not generate"
    if not any(case.kind == "image" for case in cases):
        yield "text alone"


# -- what the plain model answers -------------------------------------------------------------------------------------


def _cases(model: Any) -> Iterator[Case]:
    """The first call of each kind that runs."""
    for kind, calls in (("text", _text_calls(model)), ("image", _image_calls(model))):
        for inputs in calls:
            try:
                yield Case(kind, inputs, model(**_copied(inputs)).logits, _generate(model, inputs))
            except Exception:  # another family's convention
                continue
            break


def _generate(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    given = {key: value for key, value in _copied(inputs).items() if key != "decoder_input_ids"}
    if not hasattr(model, "generate") or not model.can_generate():
        return None
    tokens: torch.Tensor = model.generate(**given, **GENERATE)
    return tokens


def _copied(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some families write into their input ids."""
    return {key: value.clone() for key, value in inputs.items()}


def _text_calls(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    ids = text_ids(model)[5:21][None]
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    yield text
    for key in _type_keys(model):
        yield {**text, key: torch.zeros_like(ids)}
    yield {**text, "decoder_input_ids": ids[:, :4]}


def _image_calls(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    samples = draw_image_samples(model) or []
    token = image_token(model.config)
    for sample in samples[:1]:
        ids = sample["input_ids"][None]
        image = {key: value for key, value in sample.items() if key not in ("input_ids", "labels")}
        both = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **image}
        for key in _type_keys(model):
            yield {**both, key: (ids == token).long()}
        yield both
        yield {**both, "decoder_input_ids": ids[:, :4]}
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "encoder", model.config)
    side = getattr(vision, "image_size", 56)
    side = side if isinstance(side, int) else side[0]
    pixels = torch.randn(1, getattr(vision, "num_channels", 3), side, side, generator=torch.Generator().manual_seed(0))
    ids = text_ids(model)[5:13][None]
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    yield {"pixel_values": pixels, **text}
    yield {"pixel_values": pixels, "decoder_input_ids": ids}
    yield {"pixel_values": pixels[None], **text, "image_attention_mask": torch.ones(1, ids.shape[1], 1)}
    yield {"pixel_values": pixels, **text, "image_embeds_position_mask": (torch.arange(ids.shape[1]) < 4).long()[None]}
    boxes = torch.zeros(1, ids.shape[1], 4)
    yield {"pixel_values": pixels, **text, "bbox": boxes, "decoder_input_ids": ids[:, :4]}
    token = getattr(model.config, "image_token_index", None)
    num_queries = getattr(model.config, "num_query_tokens", 1)
    if isinstance(token, int):  # Q-formers that read the question
        ids = torch.tensor([[*[token] * num_queries, *ids[0].tolist()]])
        text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for shape in (pixels, pixels[None]):
            yield {"pixel_values": shape, **text, "qformer_input_ids": ids[:, -8:]}


def _type_keys(model: Any) -> list[str]:
    taken = inspect.signature(model.forward).parameters
    return [key for key in TOKEN_TYPE_KEYS if key in taken]


# -- maps -------------------------------------------------------------------------------------------------------------


def _solved(spec: ModelSpec) -> Placement:
    """On the smallest GPUs of three unlike sizes on which the solver spills and all still runs."""
    workload = Workload(seq_len=24, max_new_tokens=NEW_TOKENS, dtype="fp32")
    size = 4 * spec.num_params
    three, one = (0.5, 0.3, 0.4), (1.0,)  # one where a single layer is most of the model
    for shares, scale in ((shares, x / 20) for shares in (three, one) for x in range(8, 60)):
        gpus = tuple(Gpu(index=i, free_bytes=int(scale * share * size)) for i, share in enumerate(shares))
        machine = Machine(gpus=gpus, cpu_bytes=size // 3, disk=True, context_bytes=0)
        try:
            placement = place(spec, machine, workload)
        except PartitionError:
            continue
        if placement.spilled:
            return placement
    raise PartitionError("no small machine was found on which it spills and runs")


def _in_turn(spec: ModelSpec) -> dict[str, DeviceKey]:
    parts = parts_of(spec)
    ends = [parts.embed + parts.head] if parts.tied else [parts.embed, parts.head]
    placed: dict[str, DeviceKey] = {}
    for number, unit in enumerate((*parts.vision, *ends, *parts.blocks)):
        home = IN_TURN[number % len(IN_TURN)]
        for layer in unit.layers:
            stays = spec.layers[layer].bare and isinstance(home, str)  # nothing would bring it
            placed.update(dict.fromkeys(modules_of(spec, layer), 0 if stays else home))
    return placed


# -- what the loaded model answers ------------------------------------------------------------------------------------


def _compare(folder: str, placement: Placement | Mapping[str, DeviceKey], cases: list[Case]) -> str | None:
    with simulated():
        try:
            model = load_placed(folder, placement)
        except PartitionError as error:
            if "cannot stay on disk" not in str(error):
                raise
            model = load_placed(folder, placement, offload_folder=Path(folder) / "offload")
        for case in cases:
            logits = model(**_copied(case.inputs)).logits.cpu()
            apart = distance(logits, case.logits)
            if not apart <= BOUND:
                return f"logits of the {case.kind} are {apart:.2g} apart"
            if case.tokens is not None and not torch.equal(_generate(model, case.inputs).cpu(), case.tokens):
                return f"other tokens for the {case.kind}"
    return None


def main() -> None:
    sweep(check, "loaded")


if __name__ == "__main__":
    main()
