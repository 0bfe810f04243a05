"""`balanced`: one line puts a plan under a Transformers `Trainer`, TRL's among them, or under an Accelerate loop."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.utils import cached_file

from trimtab.errors import PlanError, UnsupportedPlanError, join_problems
from trimtab.plan.file.yaml import load_plan
from trimtab.plan.plan import Plan
from trimtab.runtime.data.collate import PackedCollator, attend_by_sample, loaded_attention, step_denominator
from trimtab.runtime.data.conversations import UnreadableSampleError, open_conversations
from trimtab.runtime.data.dataset import PlanBatchSampler, PlanDataLoader, PlanDataset
from trimtab.runtime.data.packing import collator_of, sharded, untouched, unwrap, verify_packing
from trimtab.runtime.data.tables import PlanTables, open_tables
from trimtab.runtime.recompute import applied_to
from trimtab.runtime.recompute import apply as apply_recompute
from trimtab.runtime.training.shared import OnlineBalancer, size_of_sample
from trimtab.runtime.training.trainer import Feed, PlannedTrainer
from trimtab.runtime.vision.apply import VisionDataParallelCallback, vision_dp_from_plan
from trimtab.units import unfold_modules

# A plan in a loop that is written around `model(**batch).loss` (Accelerate's examples): the loader brings the loss.
#
# Models of Transformers divide the sum of token losses by `num_items_in_batch` where a batch holds it. Here it is
# W / (R M): W labels in the step, R ranks, M micro-batches. The loop divides by M (`accelerator.backward` does) and
# gradients are averaged over R ranks, so that the step's loss is sum / W, whatever pack a token lies in.


class StepLoader(PlanDataLoader):
    """A `PlanDataLoader` that reads a step's micro-batches before it hands out the first, to know the labels in all."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        order = self._settle().order
        shares = order.num_microbatches * order.dp
        step: list[dict[str, Any]] = []
        for batch in DataLoader.__iter__(self):
            step.append(batch)
            if len(step) < order.num_microbatches:
                continue
            items = step_denominator(step).cpu() / shares
            for own in step:
                self._num_used += 1
                yield self._placed({**own, "num_items_in_batch": items})
            step = []
        self._settle()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("microbatches_done"):
            raise PlanError("the state was taken inside a step: take states between steps, after optimizer.step()")
        super().load_state_dict(state)


def refuse_loss_of_its_own(model: Any) -> None:
    """Asks the model: twice the items must give half the loss. Qwen3-VL of Transformers 4.57 to 5.12 reads none."""
    ids = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
    with untouched(model), torch.no_grad():
        once, twice = (
            float(model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=torch.tensor(float(items))).loss)
            for items in (1, 2)
        )
    if not math.isclose(once, 2 * twice, rel_tol=0.01):
        raise UnsupportedPlanError(f"{type(model).__name__} does not read num_items_in_batch: use packed_loss")


def step_loader(given: DataLoader[Any], sampler: PlanBatchSampler, collate: Any, device: torch.device) -> StepLoader:
    """The user's loader, of the plan's packs."""
    return StepLoader(
        given.dataset,
        sampler,
        device=device,
        collate_fn=collate,
        num_workers=given.num_workers,
        pin_memory=given.pin_memory,
        persistent_workers=given.persistent_workers,
        prefetch_factor=given.prefetch_factor,
    )


LOG = logging.getLogger("trimtab")

_HOSTS = ("transformers", "trl", "llamafactory", "swift", "axolotl")
"""Packages whose own `compute_loss` is the mean over tokens that `packed_loss` is, with more to log."""


def balanced(
    trainer: Any,
    plan: PlanTables | Path | str | None = None,
    *,
    model: Any = None,
    reshuffle: bool = True,
    verify: bool = True,
) -> Any:
    """Call this on a Trainer that you have made, before `train()`: its ranks then have even work. The same object.

    `trainer = trimtab.balanced(trainer)` is the whole change. Each optimizer step keeps exactly the samples that the
    Trainer draws for it; they are shared evenly among ranks and micro-batches and packed without padding. Sizes are
    asked of the trainer's own data set through its own collator, once a row.

    With a plan, `trimtab.balanced(trainer, "plan-folder")`, it trains as the plan says. The packs come in the plan's
    order, made of the samples that your own collator makes of `train_dataset`, whose row i is the plan's; the layers
    that the plan recomputes do, and nothing else; images are shared over the data-parallel ranks where the plan says
    so; the loss weighs every token of a step alike (or as the collator says); checkpoints know their place. Losses
    equal those of the plain loop (docs/howto-trainer.md) to five digits. Transformers 4.57 and later, on any number of
    ranks: DDP, FSDP, DeepSpeed.

    The Trainer's own checkpoints resume in the middle of any epoch, on any number of ranks whose steps hold as many
    packs. For another number the checkpoint's `trimtab_plan.json` is a state that `PlanDataLoader` resumes.

    In a loop of your own, around `model(**batch).loss` as in Accelerate's examples, give the training DataLoader and
    the model before `accelerator.prepare`: `loader = trimtab.balanced(loader, "plan-folder", model=model)`. What comes
    back is a `PlanDataLoader`; divide the loss by the number of micro-batches, as `accelerator.backward` does. Without
    a plan it is your loader, whose batches an `OnlineBalancer` shares among the ranks.

    `reshuffle`: epochs after the first run the plan's steps in another order. `verify`: before the first step the model
    is asked whether it keeps the samples of a pack apart (seconds). Raises `PlanError` or `UnsupportedPlanError` with a
    sentence for everything of the trainer that the plan does not fit.

    >>> import trimtab
    >>> trimtab.balanced("no trainer", "plan")
    Traceback (most recent call last):
    trimtab.errors.UnsupportedPlanError: a str is no transformers.Trainer and no DataLoader with its model
    """
    if isinstance(trainer, DataLoader):
        return _balanced_loader(trainer, plan, model, reshuffle=reshuffle, verify=verify)
    if not isinstance(trainer, Trainer):
        raise UnsupportedPlanError(
            f"a {type(trainer).__name__} is no transformers.Trainer and no DataLoader with its model"
        )
    if isinstance(trainer, PlannedTrainer):
        raise UnsupportedPlanError("this trainer is balanced already: call balanced once")
    tables = plan if plan is None or isinstance(plan, PlanTables) else open_tables(plan)
    decided = None if plan is None or isinstance(plan, PlanTables) else _plan_of(Path(plan))
    problems = [*_problems_of_trainer(trainer), *_problems_of_data(trainer.train_dataset, tables, decided)]
    if tables is not None:
        problems += _problems_of_steps(trainer, tables)
    if decided is not None:
        problems += _problems_of_plan(trainer.model, decided)
    if problems:
        raise PlanError(join_problems(problems))
    if tables is not None:
        _switch_on(trainer, decided)
    pack = _pack_of(trainer.data_collator, trainer.model, max(1, trainer.args.world_size))
    trainer._feed = _feed_of(tables, decided, pack, reshuffle=reshuffle, verify=verify)
    trainer.model_accepts_loss_kwargs = True  # before Transformers 5 this says that the loss is scaled
    kind = type(trainer)
    trainer.__class__ = type(f"Planned{kind.__name__}", (PlannedTrainer, kind), {})
    return trainer


def _plan_of(path: Path) -> Plan | None:
    """Return the plan; None: only tables (`trimtab pack`)."""
    file = path if path.is_file() else path / "plan.yaml"
    return load_plan(file) if file.is_file() else None


def _balanced_loader(
    loader: DataLoader[Any], plan: PlanTables | Path | str | None, model: Any, *, reshuffle: bool, verify: bool
) -> DataLoader[Any]:
    if model is None:
        raise UnsupportedPlanError("packs are made for a model: give model= too")
    tables = plan if plan is None or isinstance(plan, PlanTables) else open_tables(plan)
    decided = None if plan is None or isinstance(plan, PlanTables) else _plan_of(Path(plan))
    problems = [] if tables is None else list(_problems_of_data(loader.dataset, tables, decided))
    if decided is not None:
        problems += _problems_of_plan(model, decided)
    if getattr(loader.collate_fn, "loss_weighting", "token") != "token":
        problems.append("the collator weighs samples, and model(**batch).loss does not: use packed_loss in your loop")
    started = dist.is_available() and dist.is_initialized()
    dp, rank = (dist.get_world_size(), dist.get_rank()) if started else (1, 0)
    if tables is not None and (packs := tables.dp * tables.num_microbatches) % dp:
        problems.append(f"{dp} ranks do not divide the {packs} packs of a step: plan for {dp}")
    if problems:
        raise PlanError(join_problems(problems))
    pack = _pack_of(loader.collate_fn, model, dp)
    if verify and not sharded(model):
        refuse_loss_of_its_own(model)
        verify_packing(model, collator=pack)
    feed = _feed_of(tables, decided, pack, reshuffle=reshuffle, verify=verify)
    if tables is None:
        return _shared_loader(loader, model, feed)
    sampler = PlanBatchSampler(tables, dp=dp, rank=rank, reshuffle=reshuffle)
    _recompute(model, decided)
    if decided is not None and dp > 1:
        vision_dp_from_plan(model, None, decided)
    device = torch.device(next(model.parameters()).device.type)  # Accelerate may move the model later: same kind
    return step_loader(loader, sampler, feed.collate(loader.collate_fn), device)


def _shared_loader(loader: DataLoader[Any], model: Any, feed: Feed) -> DataLoader[Any]:
    """The user's loader, whose ranks share what they draw; its samples travel, so that no worker may make batches."""
    if loader.num_workers:
        LOG.warning("num_workers=%d is not used: ranks share samples where they train", loader.num_workers)
    ask = size_of_sample(model, feed.collate_alone(loader.collate_fn))
    share = OnlineBalancer(model, feed.collate(loader.collate_fn), size=lambda sample: ask([sample])[0])
    shared = copy.copy(loader)  # with its sampler, or none
    shared.__dict__ |= {"collate_fn": share, "num_workers": 0, "prefetch_factor": None}
    shared.__dict__ |= {"persistent_workers": False, "pin_memory": False}  # batches are on the device already
    return shared


def _pack_of(given: Any, model: Any, num_ranks: int) -> PackedCollator:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if hasattr(base, "config"):
        attend_by_sample(base)
    if isinstance(given, PackedCollator):
        return given
    alone = collator_of(base)
    assert alone.family is not None, "filled in when made"
    must = bool(alone.family.joined) and num_ranks > 1  # else the others would wait in the tower
    return replace(alone, vision_in_every_pack=alone.family.smallest is not None or must)


def _feed_of(
    tables: PlanTables | None, decided: Plan | None, pack: PackedCollator, *, reshuffle: bool, verify: bool
) -> Feed:
    return Feed(plan=tables, reshuffle=reshuffle, verify=verify, pack=pack, decided=decided)


def _switch_on(trainer: Any, decided: Plan | None) -> None:
    """Make a pack a batch, with the plan's recompute and shared images."""
    arguments = trainer.args
    before = arguments.per_device_train_batch_size
    arguments.per_device_train_batch_size = 1
    trainer._train_batch_size = 1  # what the Trainer logs and stores
    if before != 1:
        LOG.info("per_device_train_batch_size=%d is not used: a batch is one pack", before)
    if decided is None:
        return
    known = {field.name for field in fields(arguments)}
    for switch in known & {"gradient_checkpointing", "activation_checkpointing"}:  # older and newer name
        if getattr(arguments, switch):
            setattr(arguments, switch, False)
            LOG.warning("%s=True is switched off: the plan says which layers recompute", switch)
    _recompute(trainer.model, decided)
    if decided.decisions.vision_data_parallel is not None:
        trainer.add_callback(VisionDataParallelCallback(plan=decided))


def _recompute(given: Any, decided: Plan | None) -> None:
    """Recompute exactly the plan's layers; those for which the lines of an export have done it already stay."""
    if decided is None:
        return
    model: Any = unwrap(given) if decided.decisions.recompute else given
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        switch_off: Any = getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)
        switch_off()
    planned = {name: each.granularity for each in decided.decisions.recompute for name in unfold_modules(each.modules)}
    if planned and applied_to(model) != planned:
        apply_recompute(model, decided)


def _problems_of_trainer(trainer: Any) -> Iterator[str]:
    """Yield the settings under which the plan's packs would not be what is trained."""
    arguments, kind = trainer.args, type(trainer).__name__
    if getattr(arguments, "n_gpu", 1) > 1:
        yield f"one process holds {arguments.n_gpu} GPUs: start a process a GPU (torchrun)"
    if getattr(arguments, "auto_find_batch_size", False):
        yield "auto_find_batch_size would change the packs: leave it out"
    for name in ("packing", "padding_free"):
        if getattr(arguments, name, False):
            yield f"{name}=True packs again: leave it out"
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        yield "label smoothing and compute_loss_func replace the loss of packs: leave both out"
    if (own := type(trainer).compute_loss).__module__.partition(".")[0] not in _HOSTS:
        yield f"{own.__qualname__} replaces the loss of packs: leave it out, or train {kind} on a PlanDataLoader"
    if getattr(trainer.model.config.get_text_config(), "output_router_logits", False):
        yield "output_router_logits adds a loss over a whole micro-batch: set it to False"


def _problems_of_data(data: Any, tables: PlanTables | None, decided: Plan | None) -> Iterator[str]:
    if data is None or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        what = "no train_dataset" if data is None else f"a train_dataset without rows ({type(data).__name__})"
        yield f"there is {what}: give a data set with len() and [row]"
        return
    if tables is None:
        return
    last = int(tables.indices.max(initial=-1))  # a mixture may draw rows several times, or not at all
    if len(data) <= last:
        yield f"train_dataset has {len(data)} samples, and the plan row {last}: give the data that was sized"
    elif decided is not None and len(data) != decided.inputs.data.num_samples:
        sized = decided.inputs.data
        skipped = f" and {sized.num_skipped} bad ones left out" if sized.num_skipped else ""
        yield f"train_dataset has {len(data)} samples, {sized.num_samples} were sized{skipped}: give that data"


def _problems_of_steps(trainer: Any, tables: PlanTables) -> Iterator[str]:
    """The plan's steps hold dp x micro-batches packs, on however many ranks."""
    ranks, accumulated = max(1, trainer.args.world_size), trainer.args.gradient_accumulation_steps
    packs = tables.dp * tables.num_microbatches
    if ranks * accumulated == packs:
        return
    advice = (
        f"set gradient_accumulation_steps={packs // ranks}, or plan with --set num_microbatches={accumulated}"
        if packs % ranks == 0
        else f"start as many ranks as divide {packs}, or plan for {ranks}"
    )
    yield f"steps have {ranks} x gradient_accumulation_steps={accumulated} packs, the plan's {packs}: {advice}"


def _problems_of_plan(own_model: Any, decided: Plan) -> Iterator[str]:
    parallel, model = decided.decisions.parallel, decided.inputs.model
    for name in ("pp", "tp", "cp"):
        if (degree := getattr(parallel, name)) > 1:
            yield f"{name} {degree} was planned: plan with --for transformers, or train by `trimtab train`"
    own = own_model.config.model_type
    if own != model.family:
        yield f"the plan is for {model.name} ({model.family}), and the model is a {own}: plan for it"
    elif not _is_changed(own_model):
        found = sum(p.numel() for p in own_model.parameters())
        if abs(found - model.num_params) > 0.02 * model.num_params:
            yield (
                f"the model has {found:,} parameters, the plan's {model.name} {model.num_params:,}: plan for its "
                "configuration"
            )


def _is_changed(model: nn.Module) -> bool:
    """Return whether adapters, packed weights or shards change parameters, so that they differ from the config's."""
    return sharded(model) or hasattr(model, "peft_config") or getattr(model, "is_quantized", False)


# A plan in launchers that make a Trainer of Transformers themselves: LLaMA-Factory, axolotl.


def planned_samples(plan: Path | str, model: str) -> PlanDataset:
    """The plan's samples for the model of this name or folder, tokenized when asked for; unreadable ones are filled."""
    rows = open_conversations(plan, Path(str(cached_file(model, "config.json"))).parent)
    return PlanDataset(rows, rows.records.samples, on_error="filler", fill_for=UnreadableSampleError)


def run_as_planned(trainer: Any, plan: Path | str) -> None:
    """Have a Trainer that was made with `planned_samples` train as the plan says, its collator set aside."""
    config = trainer.model.config
    trainer.data_collator = PackedCollator(config, attention=loaded_attention(config))
    balanced(trainer, plan)
