"""Published fine-tuning scripts under `balanced` without a plan, on four gloo ranks. TRL's needs trl and datasets.

Two lines of each are changed. Its plain run counts labels as the Trainer does where the model's class allows it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL", reason="pillow is not installed")
pytest.importorskip("fastapi", reason="the scripts load a processor as `trimtab serve` does")

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
from gloo_ranks import on_ranks  # noqa: E402

from trimtab.demo import draw_dataset, write_model  # noqa: E402

SCRIPTS = Path(__file__).parents[1] / "hosts" / "examples"
TRAIN = "trainer.train()"
PREPARE = "model, optimizer, train_dataloader = accelerator.prepare("
COUNTED = 'num_items_in_batch=accelerator.reduce((batch["labels"][:, 1:] != -100).sum().float(), "mean")'
CHANGES = {  # (old, new): of the plain run, and the two lines
    "sft_vlm": ((TRAIN, f"trainer.model_accepts_loss_kwargs = True\n{TRAIN}"), TRAIN, "trainer = balanced(trainer)"),
    "finetune_vlm": (
        (TRAIN, f"trainer.model_accepts_loss_kwargs = True\n{TRAIN}"), TRAIN, "trainer = balanced(trainer)",
    ),
    "accelerate_loop": (
        ("model(**batch)", f"model(**batch, {COUNTED})"),
        PREPARE, "train_dataloader = balanced(train_dataloader, model=model)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data and tiny model."""
    folder = tmp_path_factory.mktemp("demo")
    write_model(folder / "model", draw_dataset(folder / "data", num_samples=2000))
    return folder


@pytest.mark.parametrize("name", list(CHANGES))
def test_two_lines_share_the_work_evenly_and_keep_the_losses(name: str, demo: Path) -> None:
    if name == "sft_vlm":
        pytest.importorskip("trl", reason="needs trl 1.16.0: pip install --no-deps trl==1.16.0")
        pytest.importorskip("datasets", reason="needs datasets 5.2.0")
    plain, behind, line = CHANGES[name]
    losses = {}
    for way, change in {"plain": plain, "shared": (behind, f"from trimtab import balanced\n{line}\n{behind}")}.items():
        on_ranks(run_script, name, demo, change, num_ranks=4)
        losses[way], shares = json.loads((demo / "run.json").read_text())
    assert losses["shared"] == pytest.approx(losses["plain"], rel=1e-5)
    for slowest, mean, largest in shares:  # a sample above a rank's share bounds a step of few samples
        assert slowest <= 1.05 * max(mean, largest)
    within = [slowest <= 1.05 * mean for slowest, mean, _ in shares]
    assert all(within) if name != "accelerate_loop" else np.mean(within) >= 0.5


def run_script(rank: int, name: str, folder: Path, change: tuple[str, str]) -> None:
    """Run one script with one place changed; rank 0 writes its losses, and what the ranks of each step cost."""
    from trimtab.runtime.training import shared

    share, shares = shared.share_step, []

    def noted(sizes: Any, cost: Any, **given: Any) -> Any:
        found = share(sizes, cost, **given)
        load = [sum(cost[pack].sum() for pack in found.of_rank(r)) for r in range(given["dp"])]
        shares.append([max(load), sum(load) / len(load), float(cost.max())])
        return found

    shared.share_step = noted
    path = SCRIPTS / f"{name}.py"
    source = path.read_text()
    assert source.count(change[0]) == 1
    sys.argv, space = [str(path), str(folder)], {"__name__": "__main__"}
    exec(compile(source.replace(*change), str(path), "exec"), space)
    losses: Any = space.get("losses") or [x["loss"] for x in space["trainer"].state.log_history if "loss" in x]
    if rank == 0:
        (folder / "run.json").write_text(json.dumps([losses, shares]))
