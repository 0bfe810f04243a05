"""Place a model on GPUs for inference, from Python: `python examples/place_a_model.py [CONFIG]`.

CONFIG is a config.json, its folder, or a shipped description (default: Qwen2.5-VL-7B). No GPU and no torch is needed.
Prints the map for four unlike GPUs, and what happens when the GPUs are too small: which weights leave them, and how
much each batch of requests then moves. `trimtab map --compare` shows the published maps next to it.
"""

from __future__ import annotations

import sys

import trimtab
from trimtab import place
from trimtab.errors import PartitionError
from trimtab.placement import Placement, Workload, parse_machine


def show(placement: Placement) -> None:
    for use in placement.uses:
        where = f"GPU {use.device}" if isinstance(use.device, int) else use.device
        print(f"{where}: {use.total_bytes / 2**30:.2f} GiB, {len(use.modules)} modules")
    print(
        f"fullest GPU {100 * placement.fullest:.1f} %, {placement.moved_bytes / 2**30:.2f} GiB moved for each batch\n"
    )


def main(config: str) -> None:
    model = trimtab.describe(config)
    workload = Workload(batch=4, seq_len=1024, max_new_tokens=256, images=((1024, 1024),) * 2)

    show(place(model, parse_machine("8GiB,16GiB,8GiB,6GiB"), workload))
    show(place(model, parse_machine("2x10GiB", cpu="32GiB"), workload))

    try:
        place(model, parse_machine("2x6GiB"), workload)
    except PartitionError as error:
        print(error)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Qwen2.5-VL-7B")
