"""How much host memory loading takes: run as `python load_memory.py FOLDER`, prints JSON. Needs torch and Linux.

Counts resident memory beyond what simulated devices hold, as theirs is not host memory, and beyond what is there first.
"""

import gc
import json
import sys
import threading
import time
import weakref
from pathlib import Path

import torch
import transformers
from simulated_devices import SimTensor, simulated

from trimtab.runtime.placing.load import load_placed

PAGE = 4096
_ALIVE: dict[int, weakref.ref[SimTensor]] = {}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def device_bytes() -> int:
    alive = [tensor for made in list(_ALIVE.values()) if (tensor := made()) is not None]
    return sum({x.value.untyped_storage().data_ptr(): x.value.untyped_storage().nbytes() for x in alive}.values())


def remember_devices_tensors() -> None:
    plain = SimTensor.wrap

    def wrap(value: torch.Tensor, device: torch.device) -> SimTensor:
        made = plain(value, device)
        _ALIVE[id(made)] = weakref.ref(made)
        return made

    SimTensor.wrap = staticmethod(wrap)


class Watch(threading.Thread):
    """The most host memory at any time, looked at every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before, self.peak, self._end = resident_bytes(), 0, threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            held = device_bytes()  # read first: a tensor that arrives in between counts against us
            self.peak = max(self.peak, resident_bytes() - held - self.before)
            time.sleep(0.002)

    def stop(self) -> int:
        self._end.set()
        self.join()
        return self.peak


def measure(folder: Path, home: str) -> dict[str, int]:
    layers = json.loads((folder / "config.json").read_text())["text_config"]["num_hidden_layers"]
    towers = ("model.vision_tower", "model.multi_modal_projector", "model.language_model.rotary_emb")
    outside = dict.fromkeys([*towers, "model.language_model.embed_tokens", "model.language_model.norm", "lm_head"], 0)
    inside = {f"model.language_model.layers.{i}": 0 if home == "gpu" else home for i in range(layers)}
    watch = Watch()
    watch.start()
    model = load_placed(folder, {**outside, **inside})
    peak = watch.stop()
    size = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if ".layers." in n)
    found = {"peak": peak, "layers": size, "devices": device_bytes()}
    del model
    gc.collect()
    return found


def main(folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    remember_devices_tensors()
    with simulated():
        load_placed(folder.parent / "small", {"": 0})  # imports all that loading needs
        print(json.dumps({home: measure(folder, home) for home in ("gpu", "disk", "cpu")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
