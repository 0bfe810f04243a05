"""Column: can data-parallel ranks share the model's images, each encoding some of them?

How a call of the tower divides is asked of the function that encodes images. A shrunk model in float64 encodes three
images, of different sizes where it takes such, in one call and one by one: features and gradients are the same.
Run as `PYTHONPATH=src python bench/columns/vision_dp.py [FAMILY ...]`.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests" / "torch")]

from drawn_images import draw_several_images  # noqa: E402
from family_check import check_family  # noqa: E402
from shrunk_models import make_shrunk  # noqa: E402

from columns.cell import Cell, sweep  # noqa: E402
from trimtab.runtime.vision.hooks import find_functions  # noqa: E402

CLOSE = 1e-6
"""Some towers compute positions or a norm in float32, whatever their own type; a neighbour that is seen gives 1e-2."""


def check(family: str) -> Cell:
    model = make_shrunk(family, attention="eager").double()
    function = next(x for x in find_functions(model) if x.kind == "image")
    images = draw_several_images(model, function.original)
    if images is None:
        return Cell(yes=False, note="no images in the conventions known here are taken")
    found = check_family(model, images)
    if found.num_atoms < 2:
        return Cell(yes=False, note="one call of the tower is one image")
    largest = max(found.features, found.gradients)
    if not largest <= CLOSE:
        return Cell(yes=False, note=f"images apart are encoded otherwise than together, by {largest:.1g}")
    return Cell(yes=True, note=f"{found.num_atoms} images, largest relative error {largest:.1g}")


if __name__ == "__main__":
    sweep(check, "vision_dp")
