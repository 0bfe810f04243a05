"""Tiny vision-language models, raw samples and a collator as examples of Trainers have them. Transformers 4.57 on.

No description is made and no other helper imported, so that older releases of Transformers can run this.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from trimtab.runtime.data.tables import PlanTables, hold_tables
from trimtab.specs import Packing, Schedule

IS_FIVE = int(transformers.__version__[0]) >= 5
IMAGE, VIDEO, START, END = 190, 191, 192, 193
PACKS = [[4, 1], [0], [3, 2, 5], [6]]  # two steps of two micro-batches
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 194,
    "max_position_embeddings": 512,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def make_model(family: str) -> Any:
    """Weights larger than at initialisation, so that attention is not uniform."""
    rope = {"rope_parameters": _ROPE} if IS_FIVE else {"rope_scaling": dict(_ROPE)}
    blocks = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    made: dict[str, dict[str, Any]] = {
        "qwen2_5_vl": {
            "text_config": {**_TEXT, **rope},
            "vision_config": {**blocks, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 112},
            **_TOKENS,
        },
        "qwen3_vl": {
            "text_config": {**_TEXT, **rope, "head_dim": 8},
            "vision_config": {
                **blocks,
                "out_hidden_size": 32,
                "patch_size": 14,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
            **_TOKENS,
        },
        "internvl": {
            "text_config": {"model_type": "qwen2", **_TEXT},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": [56, 56],
                "patch_size": [14, 14],
            },
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, tie_word_embeddings=False, **made[family])
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model


class Raw(torch.utils.data.Dataset[Any]):
    """Item i: the words before and behind an image of some size, or words alone."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, row: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(row)
        words = torch.randint(3, 180, (5 + row,), generator=draw).tolist()
        return {"prompt": words[:3], "answer": words[3:], "side": None if row in (1, 6) else 2 + row % 3, "row": row}


class Collator:
    """Pads to a rectangle and masks prompts, as the examples' own collators do."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.has_types = family.startswith("qwen") and IS_FIVE

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        rows, labels, images = [], [], []
        for item in items:
            front = list(item["prompt"])
            if item["side"] is not None:
                num, keys = self.image(item)
                front += [START] + [IMAGE] * num + [END]
                images.append(keys)
            rows.append(torch.tensor(front + item["answer"]))
            labels.append(torch.tensor([-100] * len(front) + item["answer"]))
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        width = -(-padded.shape[1] // 8) * 8  # to a multiple of eight
        padded = torch.nn.functional.pad(padded, (0, width - padded.shape[1]))
        masked = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        lengths = torch.tensor([len(row) for row in rows])
        types = {"mm_token_type_ids": (padded == IMAGE).long()} if self.has_types else {}  # as processors give them
        return {
            **types,
            "input_ids": padded,
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "labels": torch.nn.functional.pad(masked, (0, width - masked.shape[1]), value=-100),
            **{key: torch.cat([keys[key] for keys in images]) for key in (images[0] if images else ())},
        }

    def image(self, item: dict[str, Any]) -> tuple[int, dict[str, Tensor]]:
        """Tokens, and what the model is given."""
        draw, side = torch.Generator().manual_seed(100 + item["row"]), item["side"]
        if self.family == "internvl":
            return 4 * side, {"pixel_values": torch.randn(side, 3, 56, 56, generator=draw)}
        grid = torch.tensor([[1, 4, 2 * side]])
        pixels = torch.randn(int(grid.prod()), 3 * 2 * 14 * 14, generator=draw)
        return int(grid.prod()) // 4, {"pixel_values": pixels, "image_grid_thw": grid}


def tables_of(packs: Sequence[Sequence[int]] = PACKS, *, dp: int = 1, num_microbatches: int = 2) -> PlanTables:
    """A plan that runs `packs` in turn."""
    offsets = np.cumsum([0, *(len(pack) for pack in packs)])
    packing = Packing(offsets=offsets, indices=np.concatenate(packs), limits=(1000, 100))
    table = np.arange(len(packs)).reshape(-1, num_microbatches, dp).transpose(0, 2, 1)
    return hold_tables(packing, Schedule(table=np.ascontiguousarray(table)))


def plain_losses(model: Any, data: Any, collate: Any, *, num_epochs: int = 2, rate: float = 0.05) -> list[float]:
    """Every sample by itself through the model, without packs, collators of ours or a Trainer; SGD."""
    model.train()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=rate), []
    for step in [PACKS[:2], PACKS[2:]] * num_epochs:
        total, count = torch.zeros(()), 0
        for row in (row for pack in step for row in pack):
            batch = collate([dict(data[row])])
            targets = batch.pop("labels")[0, 1:]
            logits = model(**batch).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            count += int((targets != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(float(total.detach() / count))
    return found


def plain_of(family: str) -> list[float]:
    return plain_losses(make_model(family), Raw(), Collator(family))


def arguments(folder: Path, *, kind: Any = None, **more: Any) -> Any:
    """As an example sets them: eight samples a batch."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return (kind or transformers.TrainingArguments)(**{**given, **more})


def noted(kind: Any) -> Any:
    """A user's own subclass of a Trainer, which writes down the loss of each step."""

    class Noted(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            self.__dict__.setdefault("parts", []).append(float(loss))
            return loss

        @property
        def losses(self) -> list[float]:
            return [sum(self.parts[i : i + 2]) for i in range(0, len(self.parts), 2)]

    return Noted


def run_accelerate_example(family: str) -> list[float]:
    """A loop as Accelerate's examples have it, with one line more; the loss of each step."""
    from accelerate import Accelerator

    from trimtab.runtime.training.balanced import balanced

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader: Any = torch.utils.data.DataLoader(Raw(), batch_size=8, shuffle=True, collate_fn=Collator(family))
    loader = balanced(loader, tables_of(), model=model, reshuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    model.train()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()) / 2)
    return [sum(found[i : i + 2]) for i in range(0, len(found), 2)]


def train_sharing_images(rank: int, folder: Path) -> None:
    """A balanced Trainer on two ranks that share their images: the losses and weights of the plain loop."""
    import pytest

    from trimtab.runtime.training.balanced import balanced
    from trimtab.runtime.vision.apply import VisionDataParallelCallback

    for family in ("qwen2_5_vl", "qwen3_vl", "internvl"):
        sharing = VisionDataParallelCallback(timeout_s=60)
        trainer = noted(transformers.Trainer)(
            model=make_model(family),
            args=arguments(folder / family, gradient_accumulation_steps=1),
            train_dataset=Raw(),
            data_collator=Collator(family),
            callbacks=[sharing],
        )
        balanced(trainer, tables_of(dp=2, num_microbatches=1), reshuffle=False, verify=False).train()
        parts = torch.tensor(trainer.parts)
        torch.distributed.all_reduce(parts)
        assert (parts / 2).tolist() == pytest.approx(plain_of(family), rel=1e-5), family
        assert sharing.handle is not None
        assert 0 < sharing.handle.load.share < 1
        assert not any("get_image_features" in module.__dict__ for module in trainer.model.modules())


def train_without_plan(rank: int, folder: Path) -> None:
    """Two ranks, two micro-batches: the Trainer's own batches, and so its weights."""
    from rounding import assert_close

    from trimtab.runtime.training.balanced import balanced

    made = []
    for name in ("plain", "shared"):
        trainer = transformers.Trainer(
            model=make_model("internvl"),
            args=arguments(folder / name, per_device_train_batch_size=1),
            train_dataset=Raw(),
            data_collator=Collator("internvl"),
        )
        (balanced(trainer, verify=False) if name == "shared" else trainer).train()
        made.append(dict(trainer.model.named_parameters()))
    for name, own in made[1].items():
        assert_close(own, made[0][name], name)


def resume_in_pieces(rank: int, folder: Path, settings: dict[str, Any], fsdp_version: int | None = None) -> None:
    """A run under FSDP or DeepSpeed; another, of other weights, resumes it, and a third whose weights stay its own."""
    import pytest
    from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState

    from trimtab.errors import PlanError
    from trimtab.runtime.training import restore as ours
    from trimtab.runtime.training.balanced import balanced

    if "deepspeed" in settings:
        os.environ.update(ACCELERATE_USE_CPU="false", DS_ACCELERATOR="cpu")
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)  # which knows no such pair

    def make(factor: float) -> Any:
        model = make_model("qwen2_5_vl")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        made = noted(transformers.Trainer)(
            model=model,
            args=arguments(folder, gradient_accumulation_steps=1, save_strategy="steps", save_steps=1, **settings),
            train_dataset=Raw(),
            data_collator=Collator("qwen2_5_vl"),
        )
        if fsdp_version is not None:  # which Accelerate gives to accelerators alone
            made.accelerator.state.distributed_type = DistributedType.FSDP
            made.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=fsdp_version, use_orig_params=True if fsdp_version == 1 else None
            )
            made.accelerator.state.device = torch.device("cpu")
            made.is_fsdp_enabled = True
        return balanced(made, tables_of(dp=2, num_microbatches=1), verify=False)

    whole = make(1.0)
    whole.train()
    again = make(1.5)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert again.parts == pytest.approx(whole.parts[2:], rel=1e-5)
    before = ours.weigh(again.model, torch.device("cpu"))
    with torch.no_grad():
        for parameter in again.model.parameters():
            getattr(parameter, "ds_tensor", parameter).mul_(1.5)
    with pytest.raises(PlanError, match="differ"):
        ours.check_weights(again.model, before, folder, torch.device("cpu"))
    if rank == 0:
        _take_states(folder / "checkpoint-2")
    torch.distributed.barrier()
    with pytest.raises(PlanError, match="optimizer"):
        make(1.5).train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def _take_states(checkpoint: Path) -> None:
    """The optimizer's states, out of a checkpoint that says nothing of them: hosts go on with fresh ones."""
    for path in checkpoint.rglob("optimizer*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in checkpoint.rglob("*optim_states.pt"):  # DeepSpeed's
        content = torch.load(path, weights_only=False)
        held = content["optimizer_state_dict"]
        for state in held.get("base_optimizer_state", held.get("optimizer_state_dict"))["state"].values():
            state["exp_avg"].zero_()
        torch.save(content, path)
    state = json.loads((checkpoint / "trimtab_plan.json").read_text())
    state["files"] = {x: (checkpoint / x).stat().st_size for x in state["files"] if (checkpoint / x).is_file()}
    (checkpoint / "trimtab_plan.json").write_text(json.dumps(state))
