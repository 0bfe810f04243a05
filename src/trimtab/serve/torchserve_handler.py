"""TorchServe's side of an export: Transformers' handler of chat completions behind /predictions/NAME.

This file is copied into the model archive as it stands. Its worker needs `trimtab[serve]`, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from starlette.exceptions import HTTPException

from trimtab.runtime.placing.folder import model_class, read_config
from trimtab.runtime.placing.load import load_placed
from trimtab.serve.application import Chat, PlacedModel
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.config_check import check_config
from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import refusal
from trimtab.serve.processor import load_processor
from trimtab.serve.worker import ModelThread


class ChatHandler:
    """One worker, one model over all devices of its map; the requests of one batch together, without streams."""

    def initialize(self, context: Any) -> None:
        """Reads setup_config.json beside this file and loads the model as it says."""
        archive = Path(context.system_properties["model_dir"])
        setup = json.loads((archive / "setup_config.json").read_text(encoding="utf-8"))
        folder = archive / setup["model_path"]  # an absolute path stays what it is
        check_config(folder)
        places = setup["device_map"]
        dtype = None if setup["torch_dtype"] is None else getattr(torch, setup["torch_dtype"])
        if isinstance(places, str):
            places = _accelerates_map(folder, places, setup["max_memory"], dtype)
        offload = archive / setup["offload_folder"] if setup["offload_folder"] else None
        model = load_placed(folder, places, runs_on=setup["runs_on"], dtype=dtype, offload_folder=offload)
        limits = ServeLimits(max_new_tokens=setup["max_new_tokens"])
        chat = ChatProcessor(load_processor(folder), limits, name=context.model_name)
        self._thread = ModelThread(model, limits)
        self._thread.try_batch(chat.examples())
        self._thread.start()
        placed = PlacedModel(context.model_name, model, chat)
        self._handler = Chat(model_manager=placed, generation_state=self._thread)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[str]:
        """A JSON text for each request of the batch."""
        return asyncio.run(self._handle([row.get("body", row.get("data")) for row in data], context))

    async def _handle(self, bodies: list[Any], context: Any) -> list[str]:
        return list(await asyncio.gather(*(self._answer(i, body, context) for i, body in enumerate(bodies))))

    async def _answer(self, i: int, body: Any, context: Any) -> str:
        request_id = uuid.uuid4().hex
        context.set_response_content_type(i, "application/json")
        self._thread.wanted.add(request_id)
        try:
            if not isinstance(body, dict) or body.get("stream"):
                raise HTTPException(400, "the body must be one JSON object without stream: answers come whole here")
            answer = await self._handler.handle_request(body, request_id)
        except HTTPException as error:
            context.set_response_status(code=error.status_code, phrase="refused", idx=i)
            answer = refusal(error)
        finally:
            self._thread.wanted.discard(request_id)
        return bytes(answer.body).decode()


def _accelerates_map(
    folder: Path, rule: str, max_memory: dict[str, str] | None, dtype: torch.dtype | None
) -> dict[str, int | str]:
    """Accelerate's own map by `rule` under `max_memory`, from the names of devices as JSON has them.

    As Transformers reads the rules: "auto" and "balanced" first even out what each device may hold, "balanced_low_0"
    does so with little on device 0, "sequential" fills one device after the other.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = model_class(folder, config)(config).to(dtype or config.dtype)
    model.tie_weights()
    memory = {int(k) if k.isdigit() else k: v for k, v in (max_memory or {}).items()} or None
    classes = list(model._no_split_modules or ())
    if rule != "sequential":
        low_zero = rule == "balanced_low_0"
        memory = get_balanced_memory(model, memory, no_split_module_classes=classes, low_zero=low_zero)
    return dict(infer_auto_device_map(model, max_memory=memory, no_split_module_classes=classes))
