"""One stage as a module: the whole model's tree, with weights for the stage's own layers only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.runtime.pipeline.families import NORM, run_text_blocks, skip_absent_features
from trimtab.runtime.pipeline.flow import ENCODED, LOGITS, Batch, Cuts, Run, Sealed, Step, has_images


class Elsewhere(nn.Module):
    """Stands for a layer of another stage: no weights, hands its first argument on."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def take_stage(model: nn.Module, layers: Sequence[str], kept: Sequence[str]) -> nn.Module:
    """The model's tree with `Elsewhere` in place of those of its `layers` that are not `kept`.

    Modules inside the kept layers, parameters, buffers and the configuration are the model's own, not copies: two
    stages of one rank that hold a tied weight share it. Names in the state dict are the model's.
    """
    memo: dict[int, Any] = {id(x): x for module in model.modules() for x in _tensors(module)}
    for module in model.modules():
        config = getattr(module, "config", None)
        memo[id(config)] = config
    for name in layers:
        layer = model.get_submodule(name)
        memo[id(layer)] = layer if name in kept else Elsewhere()
    taken: nn.Module = copy.deepcopy(model, memo)
    skip_absent_features(taken.get_submodule("model.language_model"))
    return taken


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


class StageModule(nn.Module):
    """Runs the steps `start <= i < stop` of a flow: tensors alive at the first cut in, those at the last cut out."""

    def __init__(self, model: nn.Module, cuts: Cuts, start: int, stop: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.cuts, self.start, self.stop, self.dtype = cuts, start, stop, dtype
        self.is_last = stop == len(cuts.flow.steps)

    def forward(self, *received: Tensor, sealed: Sealed) -> Tensor | tuple[Tensor, ...]:
        """Logits on the last stage, elsewhere the tensors of `Cuts.wires`, in their order, sizes and `dtype`.

        None is a view, or the very tensor that came in: schedules with split backwards detach them in place.
        """
        batch = sealed.batch
        wires = self.cuts.wires(self.start, batch)
        values = {wire.name: tensor for wire, tensor in zip(wires, received, strict=True)}
        given = (*received, *batch.get(ENCODED, {}).values())
        self._run_steps(values, Run(model=self.model, batch=batch))
        if self.is_last:
            return values[LOGITS]
        sent = []
        for wire in self.cuts.wires(self.stop, batch):
            tensor = values[wire.name].to(self.dtype)
            if tensor._is_view() or any(tensor is x for x in given) or not tensor.is_contiguous():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            assert tensor.shape == wire.shape, f"{wire.name} is {tuple(tensor.shape)}, expected was {wire.shape}"
            graded = wire.requires_grad and torch.is_grad_enabled()
            assert tensor.requires_grad == graded, f"{wire.name} has requires_grad {tensor.requires_grad}"
            sent.append(tensor)
        return tuple(sent)

    def run_images(self, batch: Batch) -> dict[str, Tensor]:
        """What the text reads of a batch's images; for a stage that holds the whole tower."""
        run, values = Run(model=self.model, batch=batch), dict[str, Tensor]()
        for step in self.cuts.flow.steps[: self.cuts.num_image_steps]:
            if step.layer in self.cuts.read:
                self._run_step(step, values, run)
        return {name: values[name] for name in self.cuts.written_by_images}

    def _run_step(self, step: Step, values: dict[str, Tensor], run: Run) -> None:
        assert step.run is not None
        result = step.run(self.model.get_submodule(step.layer), run, *(values.get(name) for name in step.reads))
        values.update(dict.fromkeys(step.writes, result))

    def _run_steps(self, values: dict[str, Tensor], run: Run) -> None:
        """Layers whose result nothing reads are left out."""
        images, text_done = has_images(run.batch) and ENCODED not in run.batch, False
        values.update(run.batch.get(ENCODED, {}))
        steps = self.cuts.flow.steps[self.start : self.stop]
        for step in steps:
            if step.layer not in self.cuts.read or not (images or step.part == "text"):
                continue
            if step.run is not None and not (step.layer == NORM and text_done):  # the text model calls its norm itself
                self._run_step(step, values, run)
            elif not text_done:
                read = {name for block in steps if block.run is None for name in block.reads} - {"hidden"}
                values["hidden"] = run_text_blocks(run, values["hidden"], {x: values[x] for x in read if x in values})
                text_done = True
