"""Column: does the model run in pipeline stages, its tower whole on the first one and its decoder cut between blocks?

Two and three stages of a shrunk model, run one after the other in one process: loss and gradients of every parameter
are those of the whole model's own forward, for samples of text and, where the family's image can be drawn, of images.
Run as `PYTHONPATH=src python bench/columns/pipeline_whole_tower.py [FAMILY ...]`.
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
    layers = layers_of(model, batches[0])
    blocks = blocks_of(model, "language", layers)
    if len(blocks) < 2:
        return Cell(yes=False, note="the decoder has no list of blocks")
    largest = 0.0
    for firsts in ([blocks[1]], [blocks[len(blocks) // 2], layers[-1]]):
        if len(set(firsts)) == len(firsts):
            largest = max(largest, verify_pipeline(model, cut_at(layers, firsts), batches).largest)
    if not with_images:
        return Cell(yes=False, note="text alone: no image in the conventions known here is taken")
    return Cell(yes=True, note=f"largest relative error {largest:.1g}")


if __name__ == "__main__":
    sweep(check, "pipeline_whole_tower")
