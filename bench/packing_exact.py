"""Which families of the installed Transformers compute packs exactly. Run: python bench/packing_exact.py [FAMILY ...]

Every family of AutoModelForImageTextToText, built small from its default configuration (tests/torch/shrunk_models.py:
one layer of each kind), goes through `verify_packing`: texts, and images where one can be made by the rules there.
    packed: texts are exact, by logits and gradients.  images: the same with images inside and at the ends of samples.
    apart: layers with a state that run each sample by itself, for want of their fused kernels on this machine.
--json FILE writes the rows as a list of objects; --no-images leaves them out. No weights, no network; 90 CPU seconds.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "torch"))
from drawn_images import draw_image_samples  # noqa: E402
from shrunk_models import make_shrunk  # noqa: E402

from trimtab.errors import TrimtabError  # noqa: E402
from trimtab.runtime.data.packing import verify_packing  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One family; `reason` is empty where all that was tried is exact."""

    family: str
    packed_exact: bool
    images_exact: bool | None = None  # None: not tried
    leak: float | None = None
    logits_error: float | None = None
    gradient_error: float | None = None
    seconds: float | None = None
    reason: str = ""


def check_family(family: str, *, with_images: bool) -> Row:
    try:
        model = make_shrunk(family)
    except Exception as error:  # whatever another library raises of a default configuration is the reason
        return Row(family=family, packed_exact=False, reason=f"not built small: {_sentence(error)}")
    begin = time.perf_counter()
    try:
        proof = verify_packing(model)
    except TrimtabError as error:
        return Row(family=family, packed_exact=False, reason=_sentence(error))
    seconds = time.perf_counter() - begin
    exact, reason = None, ""
    if with_images:
        exact, reason = _check_images(model)
    return Row(
        family=family,
        packed_exact=True,
        images_exact=exact,
        leak=proof.leak,
        logits_error=proof.logits_error,
        gradient_error=proof.gradient_error,
        seconds=seconds,
        reason=reason,
    )


def _check_images(model: torch.nn.Module) -> tuple[bool | None, str]:
    samples = draw_image_samples(model)
    if samples is None:
        return None, "images: none that its tower takes was made by the rules"
    try:
        verify_packing(model, samples, max_tokens=64)
    except TrimtabError as error:
        return False, f"images: {_sentence(error)}"
    return True, ""


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TrimtabError) else f"{type(error).__name__}: {text[:160]}"


def print_rows(rows: list[Row]) -> None:
    print("| family | packed | images | logits off by | gradients off by | s | reason |")
    print("|---|---|---|---|---|---|---|")
    words = {True: "exact", False: "no", None: "-"}
    for row in rows:
        figures = [
            "-" if x is None else f"{x:.1e}" if x < 1e-2 else f"{x:.2f}"
            for x in (row.logits_error, row.gradient_error, row.seconds)
        ]
        cells = [row.family, words[row.packed_exact], words[row.images_exact], *figures, row.reason]
        print(f"| {' | '.join(cells)} |")
    packed, images = sum(row.packed_exact for row in rows), sum(bool(row.images_exact) for row in rows)
    slowest = max((row.seconds for row in rows if row.seconds is not None), default=0.0)
    print(f"\n{packed} of {len(rows)} packed exact, {images} of them with images; slowest check {slowest:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; without any, all")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--no-images", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("trimtab").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    chosen = arguments.families or sorted(FAMILIES)
    rows = [check_family(family, with_images=not arguments.no_images) for family in chosen]
    print_rows(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
