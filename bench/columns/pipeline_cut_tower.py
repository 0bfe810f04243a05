"""Column: does the model run in pipeline stages that cut its vision tower between two of its blocks?

A shrunk model in three stages, one after the other in one process, cut inside the tower and inside the decoder: loss
and gradients of every parameter are those of the whole model's own forward, for samples of text and of images.
Run as `PYTHONPATH=src python bench/columns/pipeline_cut_tower.py [FAMILY ...]`.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "torch")]

from cut_models import blocks_of, cut_at, draw_batches  # noqa: E402
from shrunk_models import make_shrunk  # noqa: E402

from columns.cell import Cell, sweep  # noqa: E402
from trimtab.runtime.pipeline.build import layers_of, verify_pipeline  # noqa: E402


def check(family: str) -> Cell:
    model = make_shrunk(family)
    batches, with_images = draw_batches(model)
    if not with_images:
        return Cell(yes=False, note="no image in the conventions known here is taken")
    layers = layers_of(model, batches[0])
    vision, text = (blocks_of(model, tower, layers) for tower in ("vision", "language"))
    if len(vision) < 2 or len(text) < 2:
        return Cell(yes=False, note="the tower or the decoder has no list of blocks")
    found = verify_pipeline(model, cut_at(layers, [vision[len(vision) // 2], text[1]]), batches)
    return Cell(yes=True, note=f"largest relative error {found.largest:.1g}")


if __name__ == "__main__":
    sweep(check, "pipeline_cut_tower")
