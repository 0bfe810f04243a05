"""Column: does the model run in pipeline stages? With --cut-tower: stages that cut its vision tower too.

Stages of a shrunk model run one after the other in one process: loss and gradients of every parameter are those of the
whole model's own forward, for samples of text and, where the family's image can be drawn, of images. Two and three
stages have the tower whole on the first one and the decoder cut between blocks; with --cut-tower three are cut inside
the tower, between two of its blocks, and inside the decoder.
Run as `PYTHONPATH=src python bench/columns/pipeline_stages.py [--cut-tower] [FAMILY ...]`.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "torch")]

from cut_models import blocks_of, cut_at, draw_batches  # noqa: E402
from shrunk_models import make_shrunk  # noqa: E402

from columns.cell import Cell, sweep  # noqa: E402
from trimtab.runtime.pipeline.build import layers_of, verify_pipeline  # noqa: E402


def check(family: str, *, cuts_tower: bool = False) -> Cell:
    model = make_shrunk(family)
    batches, with_images = draw_batches(model)
    if cuts_tower and not with_images:
        return Cell(yes=False, note="no image in the conventions known here is taken")
    layers = layers_of(model, batches[0])
    text = blocks_of(model, "language", layers)
    vision = blocks_of(model, "vision", layers) if cuts_tower else []
    if len(text) < 2 or (cuts_tower and len(vision) < 2):
        return Cell(yes=False, note=f"{'the tower or ' if cuts_tower else ''}the decoder has no list of blocks")
    ways = [[vision[len(vision) // 2], text[1]]] if cuts_tower else [[text[1]], [text[len(text) // 2], layers[-1]]]
    distinct = [firsts for firsts in ways if len(set(firsts)) == len(firsts)]
    largest = max(verify_pipeline(model, cut_at(layers, firsts), batches).largest for firsts in distinct)
    if not with_images:
        return Cell(yes=False, note="text alone: no image in the conventions known here is taken")
    return Cell(yes=True, note=f"largest relative error {largest:.1g}")


def check_cut_tower(family: str) -> Cell:
    return check(family, cuts_tower=True)


if __name__ == "__main__":
    if "--cut-tower" in sys.argv:
        sys.argv.remove("--cut-tower")
        sweep(check_cut_tower, "pipeline_cut_tower")
    else:
        sweep(check, "pipeline_whole_tower")
