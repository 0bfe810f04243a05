"""Column "packed": packs of a family's small model are exact by logits and gradients; texts, or `--images` with images.

python bench/columns/packed.py [--images] [FAMILY ...]      # all: 90 CPU seconds; see bench/packing_exact.py
"""

import sys
from pathlib import Path

from cell import Cell, sweep

sys.path.insert(0, str(Path(__file__).parents[1]))
from packing_exact import check_family


def check(family: str) -> Cell:
    """Texts alone and in one pack."""
    row = check_family(family, with_images=False)
    return Cell(yes=row.packed_exact, note=row.reason)


def check_images(family: str) -> Cell:
    """The same with images inside and at the ends of samples."""
    row = check_family(family, with_images=True)
    return Cell(yes=bool(row.images_exact), note=row.reason)


if __name__ == "__main__":
    if "--images" in sys.argv:
        sys.argv.remove("--images")
        sweep(check_images, "packed_images")
    else:
        sweep(check, "packed")
