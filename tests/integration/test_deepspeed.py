"""Our PipelineModule against DeepSpeed's own class, on two CPU processes; needs torch and DeepSpeed 0.19.8.

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8    # needs setuptools and wheel beforehand

A plan with a cut inside the vision tower, an uneven one inside the language model, and recompute of single layers: each
process must hold the plan's layers, train them as one process would, and recompute those that the plan names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.adapters.deepspeed import export
from trimtab.adapters.running import Decided
from trimtab.models.describe import describe
from trimtab.specs import ParallelDims, RecomputeChoice, Stage, stages_between

pytestmark = pytest.mark.integration

pytest.importorskip("torch", reason="DeepSpeed needs torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed==0.19.8", allow_module_level=True)


WORKER = """
import json, os, sys
import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from planned import LAYERS, PlannedPipelineModule

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a shortcut beside gloo that would be compiled
deepspeed.init_distributed("gloo", verbose=False)
rank, WIDTH, M = int(os.environ["RANK"]), 8, 4


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return 0.1 * torch.tanh(x @ self.weight) + x


def batch(m):
    generator = torch.Generator().manual_seed(1000 + m)
    rows = 2 + m  # micro-batches differ in length
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def loss_fn(x, y):
    return ((x - y) ** 2).sum()


module = PlannedPipelineModule([LayerSpec(Layer, i) for i in range(len(LAYERS))], loss_fn=loss_fn)
held = [int(name) for name, _ in module.named_children() if name.isdigit()]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": M,
    "zero_optimization": {"stage": 0},
    "gradient_clipping": 0.0,  # 1.0 by default
}
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
loss = float(engine.train_batch(data_iter=iter([batch(m) for m in range(M)])))

reference = [Layer(i) for i in range(len(LAYERS))]
total = 0.0
for m in range(M):
    x, y = batch(m)
    for layer in reference:
        x = layer(x)
    part = loss_fn(x, y) / M
    part.backward()
    total += float(part.detach())
error = 0.0
for number, layer in zip(held, module.forward_funcs):
    weight = reference[number].weight.detach() - 0.1 * reference[number].weight.grad
    error = max(error, float((layer.weight.detach() - weight).abs().max() / weight.abs().max()))
result = {
    "parts": list(module.parts),
    "held": held,
    "recomputed": [n for n, layer in zip(held, module.forward_funcs) if layer.forwards == 2 * M],
    "once": [n for n, layer in zip(held, module.forward_funcs) if layer.forwards == M],
    "loss": loss,
    "expected_loss": total,
    "error": error,
}
with open(f"result{rank}.json", "w") as file:
    json.dump(result, file)
"""

MODEL = describe("Qwen2.5-VL-7B")  # its layers' names and number; the layers themselves are tiny
INSIDE_THE_TOWER = 20
BLOCK = MODEL.indices("language", "block")[0]


def run(folder: Path, stages: tuple[Stage, ...]) -> list[dict[str, object]]:
    dims = ParallelDims(pp=len(stages))
    plan = Decided(model=MODEL, stages=stages, dims=dims, schedule="1F1B", num_microbatches=4, zero_stage=0)
    (folder / "planned.py").write_text(export(plan).text, encoding="utf-8")
    (folder / "worker.py").write_text(WORKER, encoding="utf-8")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29500 + os.getpid() % 2000),
        "WORLD_SIZE": str(len(stages)),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "worker.py"],
            cwd=folder,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(stages))
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(stages), "\n".join(outputs)
    return [json.loads((folder / f"result{rank}.json").read_text(encoding="utf-8")) for rank in range(len(stages))]


@pytest.mark.parametrize("recompute", [(), (0, 2, 25, BLOCK + 3)], ids=["none", "four layers"])
def test_deepspeed_holds_trains_and_recomputes_what_the_plan_says(tmp_path: Path, recompute: tuple[int, ...]) -> None:
    stages = stages_between((0, INSIDE_THE_TOWER, len(MODEL.layers)))
    chosen = [tuple(i for i in recompute if stage.start <= i < stage.stop) for stage in stages]
    stages = tuple(
        Stage(
            index=stage.index,
            start=stage.start,
            stop=stage.stop,
            recompute=(RecomputeChoice(tier="full", layers=layers),) if layers else (),
        )
        for stage, layers in zip(stages, chosen, strict=True)
    )
    for stage, found in zip(stages, run(tmp_path, stages), strict=True):
        assert found["parts"] == [0, INSIDE_THE_TOWER, len(MODEL.layers)]
        assert found["held"] == list(range(stage.start, stage.stop))
        assert found["recomputed"] == [i for i in recompute if stage.start <= i < stage.stop]
        assert sorted([*found["recomputed"], *found["once"]]) == found["held"]
        assert found["loss"] == pytest.approx(found["expected_loss"], rel=1e-5)
        assert found["error"] < 1e-5


def test_the_module_refuses_other_layers_and_other_stages(tmp_path: Path) -> None:
    plan = Decided(
        model=MODEL,
        stages=stages_between((0, INSIDE_THE_TOWER, len(MODEL.layers))),
        dims=ParallelDims(pp=2),
        schedule="1F1B",
        num_microbatches=4,
    )
    (tmp_path / "planned.py").write_text(export(plan).text, encoding="utf-8")
    script = """
import deepspeed, torch
from planned import LAYERS, PlannedPipelineModule
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
for count, options in ((2, {}), (len(LAYERS), {"num_stages": 1})):
    try:
        PlannedPipelineModule([torch.nn.Identity() for _ in range(count)], **options)
    except ValueError as error:
        print("REFUSED", error)
"""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0"}
    environment |= {"MASTER_PORT": str(31500 + os.getpid() % 2000), "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert f"REFUSED 2 layers were given, and the plan has {len(MODEL.layers)}: give one a name" in done.stdout, done
    assert "REFUSED 1 stages were asked for, and the plan has 2" in done.stdout
