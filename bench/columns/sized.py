"""The column `sized`: images of random sizes counted by trimtab, against the real processor on real pixels.

    TORCHVISION=FOLDER PYTHONPATH=src python bench/columns/sized.py [FAMILY ...]

The processor of each family is made from class defaults (fields that they leave open from the configuration's) and
saved as the Hub ships it; the image rule is that of these files. FOLDER holds an unpacked wheel of torchvision (0.28.0
with torch 2.13): there is no CPU build of its compiled operators, and processors call only its Python code. The process
that is asked never sees it.
"""
# ruff: noqa: E402 - where torchvision lies comes before what imports it

import importlib
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("TORCHVISION", ""))
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")  # of operators

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from transformers.processing_utils import _get_modality_for_attribute

sys.path.insert(0, str(Path(__file__).parent))

from cell import Cell, sweep

from trimtab import ask as asking
from trimtab.errors import ImageError
from trimtab.models.asking.inputs import first_int
from trimtab.models.asking.processors import NUM_BYTES, AnyTokenizer
from trimtab.models.describe import image_rule_by_processor
from trimtab.models.images import asked
from trimtab.models.images.rules import UnsettledRule, rule_in_sample

NUM_SIZES = 200
BOTH = "processor_config.json"
PARTS = {
    "image_processor": IMAGE_PROCESSOR_MAPPING,
    "video_processor": VIDEO_PROCESSOR_MAPPING,
    "feature_extractor": FEATURE_EXTRACTOR_MAPPING,
}


def make_processor(family: str) -> Any:
    """Of class defaults, around a tokenizer that knows every token."""
    kind = transformers.CONFIG_MAPPING[family]
    config, own = kind(), _processor_class(kind, family)
    parts = [_make_part(kind, family, own, name) for name in own.get_attributes()]
    given = {}
    for name, parameter in inspect.signature(own.__init__).parameters.items():
        if parameter.default is None and name not in own.get_attributes():
            value = _field(config, name)
            if value is None and name == "num_image_tokens":
                value = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
            if value is not None:
                given[name] = value
    processor = own(*parts, **given)
    images = getattr(processor, "image_processor", None)
    vision = getattr(config, "vision_config", None)
    if getattr(images, "image_seq_length", 0) is None and hasattr(vision, "image_size"):
        side, patch = first_int(vision, "image_size"), first_int(vision, "patch_size")
        images.image_seq_length = (side // patch) ** 2  # as the Hub's files of such models
    return processor


def _processor_class(kind: Any, family: str) -> Any:
    if kind in PROCESSOR_MAPPING:
        return PROCESSOR_MAPPING[kind]
    package = kind.__module__.split(".")[-2]
    try:
        module = importlib.import_module(f"transformers.models.{package}.processing_{package}")
    except ModuleNotFoundError:
        raise ValueError(f"Transformers has no processor of {family}") from None
    return next(getattr(module, x) for x in module.__all__ if x.endswith("Processor"))


def _make_part(kind: Any, family: str, own: Any, name: str) -> Any:
    """A part of its processor: that of the family, else of another family with the same processor."""
    modality = _get_modality_for_attribute(name)
    if modality == "tokenizer":
        return AnyTokenizer()
    alike = [x for x, named in PROCESSOR_MAPPING_NAMES.items() if named == own.__name__ and x != family]
    for config in [kind, *(transformers.CONFIG_MAPPING[x] for x in alike if x in transformers.CONFIG_MAPPING)]:
        if config not in PARTS[modality]:
            continue
        found = PARTS[modality][config]
        options = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else [found]
        classes = [x for x in options if x is not None]
        classes.sort(key=lambda x: x.__name__.endswith("Pil"))  # the default one: torchvision's
        for option in classes:
            part = option()
            if hasattr(part, "draw_on_frames"):
                part.draw_on_frames = False  # in a font that is a file of the model's folder
            return part
    raise ValueError(f"Transformers names no {name} of {family}")


def _field(config: Any, name: str) -> Any:
    for section in (config, getattr(config, "vision_config", None), config.get_text_config()):
        value = getattr(section, name, None)
        if value is not None:
            return value
    return None


def save_folder(family: str, folder: Path) -> dict[str, dict[str, Any]]:
    """A model folder as the Hub ships it, weights aside; the processor's files."""
    make_processor(family).save_pretrained(folder)
    config = transformers.CONFIG_MAPPING[family]()
    (folder / "config.json").write_text(config.to_json_string(use_diff=True), encoding="utf-8")
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    return {name: json.loads((folder / name).read_text()) for name in names if (folder / name).is_file()}


# -- what the processor makes ---------------------------------------------------------------------------------------


class Real:
    """The processor itself, on real images."""

    def __init__(self, family: str, files: dict[str, dict[str, Any]]) -> None:
        from trimtab.models.asking.images import Looker

        self.looker = Looker(family, files, None)
        self.random = random.Random(0)

    def images(self, sizes: list[tuple[int, int]]) -> tuple[int, int]:
        """Image tokens in its ids, numbers in its pixels."""
        output, _ = self.looker.call("images", len(sizes), sizes, lambda _, w, h: Image.new("RGB", (w, h), "red"))
        return self.measure(output)

    def measure(self, output: Any) -> tuple[int, int]:
        ids = torch.as_tensor(output["input_ids"]).flatten().tolist()
        special = set(self.looker.processor.tokenizer.all_special_ids[:7])
        most = Counter(x for x in ids if x >= NUM_BYTES and x not in special).most_common(1)
        return (most[0][1] if most else 0), sum(
            _numel(v) for k, v in output.items() if "pixel_values" in k or k == "patches"
        )


def _numel(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, (list, tuple)):
        return sum(map(_numel, value))
    return int(getattr(value, "size", 0))


# -- comparing ------------------------------------------------------------------------------------------------------


def check(family: str) -> Cell:
    """Tokens equal, and as many numbers of pixels for each patch, on every size; refusals in common."""
    if family not in transformers.CONFIG_MAPPING:
        return Cell(yes=False, note="no configuration class")
    with tempfile.TemporaryDirectory() as name:
        files = save_folder(family, Path(name))
        config = json.loads((Path(name) / "config.json").read_text())
    rule, _ = image_rule_by_processor(config, files, files.get("preprocessor_config.json", files.get(BOTH)))
    if isinstance(rule, UnsettledRule):
        return Cell(yes=False, note=rule.reason[:160])
    return _compare(rule, Real(family, files))


class Child:
    """The process that `trimtab.ask` starts for one question, kept for all: the same code, the same stand-in."""

    def __init__(self) -> None:
        code = (
            "import json, sys\nfrom trimtab.models.asking import find_work\nfind_work('images')\n"
            "for line in sys.stdin:\n    question, config = json.loads(line)\n"
            "    try:\n        print('\\n@' + json.dumps(find_work(question)(config)), flush=True)\n"
            "    except ValueError as error:\n        print('\\n!' + str(error), flush=True)"
        )
        environment = {key: value for key, value in os.environ.items() if key != "TORCHVISION"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, config: Any, question: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([question, config], default=dict) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@"):
                return asking._answer_of(line[1:].encode(), config)
            if line.startswith("!"):
                raise ValueError(line[1:])
        raise RuntimeError("the child ended")


def _compare(rule: Any, real: Real) -> Cell:
    sizes = _sizes(real.random)
    if hasattr(rule, "prepare"):
        rule.prepare(sizes)
    found: list[tuple[Any, int]] = []
    for width, height in sizes:
        try:
            counts = rule.count(width, height)
        except ImageError:
            counts = None
        try:
            tokens, pixels = real.images([(width, height)])
            if not tokens:
                raise ValueError("no token for it")  # as good as a refusal
        except Exception as error:  # the processor refuses it: so must the rule
            if counts is not None:
                return Cell(yes=False, note=f"{width} x {height}: its processor refuses it ({error})"[:160])
            continue
        if counts is None or counts.tokens != tokens:
            own = None if counts is None else counts.tokens
            return Cell(yes=False, note=f"{width} x {height}: {own} tokens, its processor writes {tokens}")
        found.append((counts, pixels))
    if len(found) < NUM_SIZES // 2:
        return Cell(yes=False, note="its processor refuses most sizes")
    if not _in_proportion(found):
        return Cell(yes=False, note="its patches do not follow its pixels")
    for a, b in zip(sizes[:8], sizes[8:16], strict=True):
        try:
            together = real.images([a, b])[0]
        except Exception:  # it takes one image a sample
            continue
        own = sum(rule_in_sample(rule, 2).count(*x).tokens for x in (a, b))
        if own != together:
            return Cell(yes=False, note=f"{a} and {b} in one sample: {own} tokens, its processor writes {together}")
    return Cell(yes=True, note=rule.name)


def _sizes(draw: random.Random) -> list[tuple[int, int]]:
    return [(int(2 ** draw.uniform(4, 9.5)), int(2 ** draw.uniform(4, 9.5))) for _ in range(NUM_SIZES)]


def _in_proportion(found: list[tuple[Any, int]]) -> bool:
    """As many numbers a patch on every size; rows that inputs have beside their patches (class tokens) aside."""
    for extra in range(6):
        rows = [counts.patches - extra * counts.tiles for counts, _ in found]
        if min(rows) > 0 and len({pixels / own for own, (_, pixels) in zip(rows, found, strict=True)}) == 1:
            return True
    return False


if __name__ == "__main__":
    assert set(sys.argv[1:]) <= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES), "names families"
    asked.ask = Child().ask
    sweep(check, "sized")
