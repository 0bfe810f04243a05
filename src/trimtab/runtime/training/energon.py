"""The packs of `trimtab export energon-packs` as batches of Megatron, by Megatron-Energon's own loader.

    from trimtab.runtime.training.energon import PlannedPacks
    batches = PlannedPacks("plan", "packs", "model-folder", config)

A batch is one pack, its samples end to end (THD), as `vlm_step` of Megatron-Bridge takes it. Where the host must have
one length, or a multiple, tokens without a label fill up. Written for megatron-energon 7.4.1, megatron-core 0.19.2 and
megatron-bridge 0.6.2; docs/howto-megatron.md shows both hosts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from megatron import energon
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from trimtab.errors import PlanError, SampleError, UnsupportedPlanError
from trimtab.models.asking.model import complete
from trimtab.models.describe import describe, read_config
from trimtab.options import ReadingOptions
from trimtab.plan.file.reload import read_samples
from trimtab.plan.file.yaml import open_plan
from trimtab.plan.plan import Plan
from trimtab.runtime.data.collate import TEXT_TOKEN, PackedCollator, filler_sample, label_weights
from trimtab.runtime.data.conversations import IGNORED, LoadedConversation, open_reader
from trimtab.runtime.training.in_force import Ran, differences
from trimtab.samples.media import MediaFolders
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import read_conversation
from trimtab.specs import ModelSpec
from trimtab.units import unfold_modules

LOG = logging.getLogger("trimtab")


class PictureInputs(SimpleNamespace):
    """What the tower reads of a pack, under the names of the model's forward; as Bridge's `GenericVisualInputs`."""

    def normalized_for_model(self) -> dict[str, Tensor]:
        """Return what there is, as keywords of the model."""
        return {name: value for name, value in vars(self).items() if value is not None}


@energon.stateless  # type: ignore[untyped-decorator]  # Energon's
def _as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


class PackEncoder(energon.DefaultTaskEncoder):  # type: ignore[misc]  # a class of Energon, which has no types
    """Energon's task encoder of planned packs.

    `multiple`: tokens of a sample are filled up to a multiple of it, as context parallelism asks; `total`: tokens of a
    pack to a multiple of that, as sequence parallelism does; `length`: to exactly so many, as a pipeline of one length
    needs. What fills a pack up is a sample of its own, so attention never crosses a border.
    """

    cookers: ClassVar = [energon.Cooker(_as_it_is)]
    decoder = None  # images are decoded and cut as they were sized

    def __init__(
        self,
        plan: Path,
        model: Path,
        *,
        multiple: int = 1,
        total: int = 1,
        length: int | None = None,
        options: ReadingOptions | None = None,
    ) -> None:
        super().__init__()
        given, folder = open_plan(plan)
        self.multiple, self.total, self.length = multiple, total, length
        self._samples = read_samples(given, folder)
        self._reader = open_reader(given.inputs.model, model, options or ReadingOptions())
        self._config = complete(read_config(model))
        # lengths say where borders are, and a tower without gradients need not run in every pack
        self._collate = PackedCollator(self._config, attention="flash_attention_2", vision_in_every_pack=False)
        frozen = given.inputs.training.frozen_towers
        self._fills_tower = not {"vision", "projector"} <= {*frozen}

    @energon.stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch of one pack; its number stands under `pack`."""
        content = json.loads(sample["json"])
        if "rows" not in content:
            raise PlanError("these packs say no rows: write them again with `trimtab export energon-packs`")
        numbered = {int(name[3:].partition(".")[0]): name for name in sample if name.startswith("img")}
        images = iter([sample[numbered[number]] for number in sorted(numbered)])
        samples = [
            self._encode(row, record, images) for row, record in zip(content["rows"], content["samples"], strict=True)
        ]
        used = sum(len(x["input_ids"]) for x in samples)
        return {"pack": content["pack"], "used": used, **self._lay_out(samples)}

    def batch(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the only one: a pack is a micro-batch."""
        (pack,) = samples
        return pack

    def _encode(self, row: int, record: Mapping[str, Any], images: Iterator[bytes]) -> dict[str, Any]:
        def load(folders: MediaFolders) -> LoadedConversation:
            conversation = read_conversation(record, columns=self._reader.columns)
            if conversation.videos:
                raise BadRecordError("video", "these packs carry only images")
            return LoadedConversation(conversation, [next(images) for _ in conversation.images], folders.of(Path()))

        name, expected = self._samples.sample_id(row), int(self._samples.num_tokens[row])
        return self._reader.encode(name, f"row {row} of the plan", expected, load)

    def _lay_out(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        family = self._collate.family
        assert family is not None, "filled in when made"
        if self._fills_tower and family.smallest is not None and not any("pixel_values" in x for x in samples):
            samples.append(filler_sample(self._config, with_image=True, family=family))
        samples = [_filled_up(sample, self.multiple) for sample in samples]
        used = sum(len(sample["input_ids"]) for sample in samples)
        room = -used % self.total if self.length is None else self.length - used
        if room < 0:
            raise SampleError(
                f"a pack takes {used} tokens, and the host has a sequence length of {self.length}: give it {used}"
            )
        if room:
            ids = torch.full((room,), TEXT_TOKEN)
            samples.append({"input_ids": ids, "labels": torch.full_like(ids, IGNORED)})
        batch = self._collate(samples)
        if batch.get("attention_mask") is not None:
            raise UnsupportedPlanError(f"packs of {self._config.model_type} need masks, and THD has none")
        positions, offsets = batch["position_ids"], batch["cu_seq_lens_q"]
        longest = torch.tensor(batch["max_length_q"], dtype=torch.int32)
        visual = {name: batch[name] for name in family.joined if name in batch}
        return {
            "input_ids": batch["input_ids"],
            "position_ids": positions[int(family.text_row) :] if positions.dim() == 3 else positions,
            "labels": _next_token(batch["labels"], IGNORED),
            "loss_mask": _next_token(label_weights(batch), 0.0),
            "attention_mask": None,
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
            "visual_inputs": PictureInputs(**visual) if visual else None,
        }


def _filled_up(sample: dict[str, Any], multiple: int) -> dict[str, Any]:
    """Return a sample with tokens behind it that no other one sees and nothing learns."""
    missing = -len(sample["input_ids"]) % multiple
    fills = {"input_ids": TEXT_TOKEN, "labels": IGNORED}
    added = {name: torch.nn.functional.pad(sample[name], (0, missing), value=x) for name, x in fills.items()}
    return sample | added if missing else sample


def _next_token(row: Tensor, last: float) -> Tensor:
    """Return what belongs to the token behind each one: Megatron's labels stand where they are predicted."""
    return torch.nn.functional.pad(row[:, 1:], (0, 1), value=last)


class PlannedPacks:
    """This rank's packs in the order of the plan, without end; each is checked to be the one whose turn it is.

    `config` is Megatron's configuration of the model, and says how the run is divided; `seq_length` is needed where
    pipeline stages exchange one length (`--seq-length`). Before the first pack, rank 0 logs where what runs is not
    what was planned.
    """

    def __init__(
        self,
        plan: Path | str,
        packs: Path | str,
        model: Path | str,
        config: Any,
        *,
        seq_length: int | None = None,
        num_workers: int = 1,
        options: ReadingOptions | None = None,
    ) -> None:
        self._plan, _ = open_plan(Path(plan))
        self._config, self._spec = config, describe(Path(model))
        self.rank, self.dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        fixed = config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths
        if fixed and seq_length is None:
            raise PlanError("stages of a pipeline exchange one length here: give seq_length, or variable_seq_lengths")
        cp = config.context_parallel_size
        multiple = 2 * cp if cp > 1 else 1
        encoder = PackEncoder(
            Path(plan),
            Path(model),
            multiple=multiple,
            total=multiple * (config.tensor_model_parallel_size if config.sequence_parallel else 1),
            length=seq_length if fixed else None,
            options=options,
        )
        workers = energon.WorkerConfig(
            rank=self.rank, world_size=self.dp, num_workers=num_workers, global_error_handler=energon.reraise_exception
        )
        data = energon.get_train_dataset(
            packs,
            worker_config=workers,
            batch_size=1,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            shuffle_over_epochs_multiplier=None,
            parallel_shard_iters=1,
            task_encoder=encoder,
        )
        self._loader = energon.get_savable_loader(data)
        self._batches: Iterator[dict[str, Any]] | None = None
        self._last: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        pack, used, num_packs = batch.pop("pack"), batch.pop("used"), self._plan.decisions.packing.num_packs
        if self._last is None and pack % self.dp == self.rank:  # the first, or the first behind a checkpoint
            self._say_differences(used)
        elif self._last is None or pack != (self._last + self.dp) % num_packs:
            raise PlanError(
                f"pack {pack} came out of turn on rank {self.rank} of {self.dp}: write the packs for {self.dp} ranks, "
                "and index them again"
            )
        self._last = pack
        return batch

    def save_state(self) -> Any:
        """Return where this rank stands, as Bridge and Megatron-LM's examples keep it in a checkpoint."""
        return self._loader.save_state_rank()

    def restore_state(self, state: Any) -> None:
        """Continue there."""
        self._loader.restore_state_rank(state)
        self._batches = self._last = None

    def _say_differences(self, tokens: int) -> None:
        if torch.distributed.get_rank() == 0:
            for sentence in find_differences(self._plan, self._spec, self._config, tokens=tokens, dp=self.dp):
                LOG.warning("not as planned: %s", sentence)


def find_differences(plan: Plan, model: ModelSpec, config: Any, *, tokens: int, dp: int) -> Iterator[str]:
    """Yield a sentence for each place where a run of `config` is not what was planned."""
    degrees = {
        "dp": dp,
        "pp": config.pipeline_model_parallel_size,
        "tp": config.tensor_model_parallel_size,
        "cp": config.context_parallel_size,
    }
    world = 1
    for name, degree in degrees.items():
        world *= degree
        if degree != (planned := getattr(plan.decisions.parallel, name)):
            yield f"{name} is {degree}, and {planned} was planned"
    attention = getattr(config.attention_backend, "name", str(config.attention_backend))
    ran = Ran(
        ranks=world,
        num_packs=dp * get_num_microbatches(),
        most_tokens=tokens,
        dtype=torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else config.params_dtype,
        attention={"unfused": "eager"}.get(attention, attention),
        recomputed=_recomputed(plan, model, config),
    )
    yield from differences(plan, ran)
    if not config.calculate_per_token_loss:
        yield "calculate_per_token_loss is off: a token weighs more in a pack with few labels"


def _recomputed(plan: Plan, model: ModelSpec, config: Any) -> dict[str, str]:
    """Return the blocks of the language model that recompute, by name; other layers as planned, for nothing tells."""
    blocks = {model.layers[index].name for index in model.indices("language", "block")}
    planned = {name: x.granularity for x in plan.decisions.recompute for name in unfold_modules(x.modules)}
    found: dict[str, str] = {name: how for name, how in planned.items() if name not in blocks}
    if config.recompute_granularity is None:
        return found
    full = config.recompute_granularity == "full"
    for stage in plan.decisions.stages:
        own = [name for name in unfold_modules(stage.modules) if name in blocks]
        most = config.recompute_num_layers if full and config.recompute_method == "block" else None
        found |= dict.fromkeys(own[:most], config.recompute_granularity)
    return found
